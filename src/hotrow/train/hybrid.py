"""Hybrid training (Persia): fetches run ahead of the model and updates trail it, within one bound on both together.

A batch is fetched when all updates but the last k are applied: so many batches are in flight at most besides itself,
and no queue is longer than that. The model never waits for an update unless k are in flight. The bound is not used up
for nothing: fetching stays only so far ahead that the model finds a batch ready, one more when it had to wait for one
and one less when there were some to spare for a while. So rows are as fresh as the tiers are fast.

With several workers the dense all-reduce keeps their models within one step of each other: nobody finishes step s
before everybody has begun it. That bounds what a row can miss of the *other* workers' updates once each worker keeps
two bounds of its own: it fetches at most a batches ahead of its model, and begins a step with at most t updates of its
own not yet applied. A row fetched for step j then has every worker's updates up to step j - a - t - 2, so with
a + t = k - 1 the bound of k holds over all workers (`tests/train/test_hybrid.py` checks it). One needs no such split.

What rows really missed is measured: for each fetched row the number of updates to that very row that were still in
flight, at the cost of two searches a unique key and batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.data.batch import Batch
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Behind, Extras, Fetches, Flight, no_extras
from hotrow.train.ready import Ready

Keys = npt.NDArray[np.int64]
_SPARE = 16  # takes that found batches to spare before fewer are fetched ahead
_MOST = 128  # batches in flight that the native core tells apart


class Staleness:
    """How many updates fetched rows missed: `rows[c]` of them missed c updates of their own."""

    def __init__(self) -> None:
        self._tables: list[_native.InFlight] = []
        self._rows = np.zeros(_MOST, np.int64)
        self._batches = np.zeros(_MOST, np.int64)
        self._taking = threading.Lock()

    def enter(self, number: int, keys: Sequence[Keys], missed: int) -> None:
        """A batch is about to be fetched, while `missed` updates before it are not applied."""
        while len(self._tables) < len(keys):
            self._tables.append(_native.InFlight())
        with self._taking:
            self._batches[missed] += 1
            for table, of_table in zip(self._tables, keys, strict=True):
                table.enter(of_table, number, self._rows)

    def leave(self, number: int, keys: Sequence[Keys]) -> None:
        """The batch's update is applied."""
        for table, of_table in zip(self._tables, keys, strict=True):
            table.leave(of_table, number)

    def take(self) -> dict[str, Any]:
        """What was measured, and begins anew; nothing if nothing was."""
        with self._taking:
            rows, batches = self._rows.copy(), self._batches.copy()
            self._rows[:] = 0
            self._batches[:] = 0
        if not batches.any():
            return {}
        said: dict[str, Any] = {}
        for name, counts in (("rows", rows), ("batches", batches)):
            top = int(np.flatnonzero(counts).max(initial=0))
            said[name] = counts[: top + 1].tolist()
            said[f"{name}_mean"] = float(counts @ np.arange(_MOST)) / max(int(counts.sum()), 1)
            said[f"{name}_most"] = top
        return said


class HybridPipeline(Behind):
    """Batches whose rows miss `staleness` updates at most; exactly so many in the `worst` case."""

    def __init__(
        self,
        batches: Iterable[Batch],
        embeddings: Fetches,
        *,
        staleness: int,
        workers: int = 1,
        ramp: int = 0,
        worst: bool = False,
        ahead: int = 4,
        pin: bool = False,
        phases: Phases | None = None,
        extras: Extras = no_extras,
    ) -> None:
        self._most, self._ramp, self._workers = staleness, ramp, workers
        self._lead = 1  # batches fetched ahead of the model: as few as it need not wait for
        self._spare = 0  # takes in a row that found more than one batch ready
        self._measured = Staleness()
        self._worst = worst
        self._waiting: deque[Flight] = deque()  # fetched, and not taken yet
        self._start = self._landed = embeddings.steps
        super().__init__(batches, embeddings, ahead=ahead, room=staleness + 1, pin=pin, phases=phases, extras=extras)

    def _last_to_miss(self, number: int) -> int:
        """The last batch that can be fetched while the update of batch `number` is not applied."""
        given = number + 1
        while given - number <= self._split(given)[1]:
            given += 1
        last = number
        while last + 1 - number <= self._bound(last + 1) and last + 1 - given <= self._split(last + 1)[0]:
            last += 1
        return last

    def _ends(self) -> bool:
        return self._closed or self._exhausted or self._draining

    def staleness(self) -> dict[str, Any]:
        return self._measured.take()

    def _bound(self, number: int) -> int:
        """Updates that a batch may miss."""
        k = self._most
        if number < self._ramp:  # slowly at first, so that a large bound does not pass 1 within a few steps
            k = k * number**2 // self._ramp**2
        return k if self._workers == 1 else max(k, 1)

    def _split(self, number: int) -> tuple[int, int]:
        """How far the batch may be fetched ahead of the model, and taken ahead of updates."""
        k = self._bound(number)
        if self._workers == 1:
            return k, k
        return k - 1 - (k - 1) // 2, (k - 1) // 2

    def _may_fetch(self, number: int) -> bool:
        lead = self._split(number)[0]
        if not self._worst:
            lead = min(lead, self._lead)
        return number - self._applied <= self._bound(number) and number - self._given <= lead

    def _may_take(self, number: int) -> bool:
        return number - self._applied <= self._split(number)[1]

    def __next__(self) -> Ready:
        with self._changed:
            ready = self._landed - self._taken
            self._spare = self._spare + 1 if ready > 1 else 0
            if not ready and self._taken > self._start:
                self._lead = min(self._lead + 1, self._most)
            elif self._spare > _SPARE:
                self._lead, self._spare = max(self._lead - 1, 1), 0
            self._changed.notify_all()
        fetched = super().__next__()
        self._waiting.popleft()
        return fetched

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Batches fetched before the pause are fetched again after it, as in a run that is resumed from there."""
        with super().paused():
            yield
            for flight in self._waiting:
                self._refetch(flight)

    def _fetch(self, flight: Flight) -> None:
        with self._changed:
            missed = flight.number - self._applied
        flight.keys = flight.fetched.lookup.keys()
        self._measured.enter(flight.number, flight.keys, missed)
        super()._fetch(flight)
        self._waiting.append(flight)
        with self._changed:
            self._landed = flight.number + 1
            self._changed.notify_all()

    def _apply(self, flight: Flight) -> None:
        if self._worst:
            with self._changed:  # until the last batch that may miss this update is fetched
                self._changed.wait_for(lambda: self._ends() or self._landed > self._last_to_miss(flight.number))
        super()._apply(flight)
        self._measured.leave(flight.number, flight.keys)
