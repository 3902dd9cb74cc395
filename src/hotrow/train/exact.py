"""Exact training that still fetches ahead: the batches in flight are known, so only what they share has to wait.

A batch is fetched ahead of the model, but for rows that batches before it still have to update: those are fetched when
they have, those of the batch just before it in the last moment (`late`), all others earlier (`early`), beside the
model. So each row travels once (rows of this process are fetched ahead too, and read again). The update of a remote
tier goes in two parts: first the rows that the next batch has too, the rest beside the next step, which it may outlast.
The answer to the first part brings the late rows. So between two steps only rows that both have travel to a remote tier
and back, in one round trip; the same bits as `Sync`, since every row sees every update in the same order.
Adam counts its updates, so the rows of a table with Adam all go first.

With several workers a row may also be updated by another worker's batch: then hashes of all workers' keys (4 bytes
each) are exchanged when a batch is fetched. All agree so on which rows go first; a hash met twice costs a transfer.
They also agree on which updates are applied, and a worker that is behind catches up before it gives rows to others.

A tier that has a table with admission or eviction gives and takes rows in the order of fetches: it is asked when it is
the batch's turn, as under `Sync`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.data.batch import Batch
from hotrow.tiers.tier import Tier, Wait
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Behind, Extras, Fetches, Flight, no_extras

Keys = npt.NDArray[np.int64]
Exchange = Callable[[list[Keys]], list[Keys]]
"""From this worker's hashes, table by table, to those of all workers."""
_NONE = np.empty(0, np.int64)


class ExactPipeline(Behind):
    """Batches fetched up to `lead` ahead of the model, each complete when it is taken."""

    def __init__(
        self,
        batches: Iterable[Batch],
        embeddings: Fetches,
        *,
        lead: int = 2,
        ahead: int = 4,
        exchange: Exchange | None = None,
        pin: bool = False,
        phases: Phases | None = None,
        extras: Extras = no_extras,
    ) -> None:
        self._lead = lead
        self._exchange = exchange
        self._tables: list[_native.InFlight] = []
        self._counted = np.zeros(128, np.int64)
        self._coming: deque[_Shared] = deque()  # batches that are entered and not yet applied
        self._leaving: deque[_Shared] = deque()  # applied, and still among those that others are compared with
        self._seen = embeddings.steps  # no batch before it is compared with: those are applied, by all workers
        self._entered = self._landed = self._firsts = embeddings.steps
        self._moved = -1  # the last batch that was fetched again because rows had moved
        self._unsettled: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._settling = threading.Thread(target=self._run_settling, name="hotrow-settle", daemon=True)
        super().__init__(batches, embeddings, ahead=ahead, room=lead + 1, pin=pin, phases=phases, extras=extras)
        self._settling.start()

    def close(self, *, drop: bool = False) -> None:
        try:
            super().close(drop=drop)
        finally:
            self._unsettled.put(None)
            self._settling.join()

    def _may_fetch(self, number: int) -> bool:
        return number - self._firsts <= self._lead  # not sooner: late rows of the next batch are on their way

    def _may_take(self, number: int) -> bool:
        return self._firsts >= number and self._applied >= number - 1

    def _fetch(self, flight: Flight) -> None:
        item = flight.fetched
        if not self._embeddings.current(item.lookup):
            item = replace(item, lookup=self._embeddings.group(item.batch))
        shared = self._enter(flight.number, item.lookup.keys())
        flight.fetched, flight.keys = item, shared
        shared.in_parts = item.lookup.in_place and any(_comes_late(tier) for tier, _ in item.lookup.routed)
        self._embeddings.fetch(item.lookup, flight.number, only=shared.at_once)
        if shared.in_parts:
            item.lookup.fetch_some(shared.alone(), flight.number, _comes_late)
        shared.lookup = item.lookup
        with self._changed:
            self._landed = flight.number + 1
            self._changed.notify_all()

    def _enter(self, number: int, keys: list[Keys]) -> _Shared:
        """Finds what a batch has in common with those before it; from now on the others find it too."""
        while len(self._tables) < len(keys):
            self._tables.append(_native.InFlight())
        self._leave()
        own = everybody = keys
        if self._exchange is not None:
            own = [_hashes(of_table) for of_table in keys]
            *everybody, seens = self._exchange([*own, np.array([self._seen])])
            self._seen = int(seens.max())
            # Other workers may ask this one for rows: it has to have applied what any of them takes as applied.
            self._wait(lambda: self._closed or self._applied >= self._seen)
        with self._changed:
            before = self._coming[-1] if self._coming and self._coming[-1].number == number - 1 else None
        for table, of_table in zip(self._tables, everybody, strict=True):
            table.enter(of_table, number, self._counted)
        seen = self._seen
        shared = _Shared(number, seen, own, everybody)
        for table, mine in zip(self._tables, own, strict=True):
            late = table.shared(mine, number - 1, number) if before is not None else _NONE
            early = table.shared(mine, seen, number - 1) if seen < number - 1 else _NONE
            shared.late.append(late)
            shared.early.append(np.setdiff1d(early, late, assume_unique=True))
        if before is not None:
            before.first = [t.shared(m, number, number + 1) for t, m in zip(self._tables, before.own, strict=True)]
        with self._changed:
            self._coming.append(shared)
            self._entered = number + 1
            self._changed.notify_all()
        return shared

    def _leave(self) -> None:
        """Compares with batches that are applied no more. Called when one enters: none leaves while it does."""
        while self._leaving:
            shared = self._leaving.popleft()
            for table, of_table in zip(self._tables, shared.everybody, strict=True):
                table.leave(of_table, shared.number)
            self._seen = shared.number + 1

    def _complete(self, flight: Flight) -> None:
        lookup, shared = flight.fetched.lookup, flight.keys
        if not self._embeddings.current(lookup):
            self._refetch(flight)
            shared.moved, self._moved = True, flight.number
            return
        with self._phases("read_again"):
            if any(not fetched_ahead(tier) for tier, _ in lookup.routed):
                self._embeddings.fetch(lookup, flight.number, only=lambda tier: not fetched_ahead(tier))
            with shared.completing:
                if shared.in_parts:
                    lookup.fetch_some(shared.missing(), flight.number, _comes_late, late=True)
                shared.complete = True
            if shared.seen <= self._moved:  # batches before it look up other rows of tiers than was known
                lookup.read_again([np.arange(len(of_table)) for of_table in shared.own], flight.number, fetched_ahead)
            else:
                again = shared.late if shared.has_early else shared.both()
                lookup.read_again(again, flight.number, shared.at_once)

    def _apply(self, flight: Flight) -> None:
        shared: _Shared = flight.keys
        with self._changed:  # the next batch's keys say which rows go first
            self._changed.wait_for(lambda: self._closed or self._exhausted or self._entered > flight.number + 1)
        first = None if shared.moved else shared.first
        if first is None or not any(tier.remote for tier, _ in flight.fetched.lookup.routed):
            flight.update.apply()
            self._first_applied(flight)
        else:
            following = self._following(flight)
            late = [] if following is None else following.late
            lookup = None if following is None else following.lookup
            begun = flight.update.apply_first(first, lookup, late, _comes_late)
            for wait in begun:
                wait()
            if following is not None:
                following.has_late = True
            self._first_applied(flight)
            shared.rest = flight.update.apply_rest(first)  # now: it would have shared the link with what is waited for

    def _following(self, flight: Flight) -> _Shared | None:
        """The batch after a flight's, if it is fetched, so that late rows can be written beside the others."""
        with self._changed:
            found = [s for s in self._coming if s.number == flight.number + 1 and s.lookup is not None]
        return found[0] if found and found[0].lookup.in_place and self._embeddings.current(found[0].lookup) else None

    def _drain(self) -> None:
        """As for any policy, and every fetch that may be made is: ranks exchange hashes in it, so all make the same."""
        super()._drain()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._exhausted or not self._may_fetch(self._landed)
            )

    def _settle(self, flight: Flight) -> None:
        self._unsettled.put(flight)

    def _run_settling(self) -> None:
        """Waits for the rest of each update, beside the first part of the next."""
        try:
            while (flight := self._unsettled.get()) is not None:
                shared: _Shared = flight.keys
                for wait in shared.rest:
                    wait()
                self._leaving.append(shared)
                with self._changed:
                    self._coming.remove(shared)
                super()._settle(flight)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _first_applied(self, flight: Flight) -> None:
        with self._changed:
            self._firsts = flight.number + 1
            self._changed.notify_all()

    def _after(self, flight: Flight) -> None:
        """Brings rows of the batch after the next, beside the model, that are as they will be at its turn."""
        with self._changed:
            found = [s for s in self._coming if s.number == flight.number + 2 and s.lookup is not None]
        for shared in (s for s in found if s.lookup.in_place):
            with self._gate, self._phases("read_behind"):
                lookup = shared.lookup
                if not self._embeddings.current(lookup) or any(tier.collective for tier, _ in lookup.routed):
                    return
                with shared.completing:
                    if shared.complete:
                        return
                    lookup.read_again(shared.early, shared.number, shared.at_once)
                    if shared.in_parts:
                        lookup.fetch_some(shared.early, shared.number, _comes_late, late=True)
                    shared.has_early = True


class _Shared:
    """What a batch shares with others in flight.

    `own` are its keys as they are compared and `everybody` those of all workers; updates before `seen` were applied
    by all when it was fetched, and it has `moved` if its rows did afterwards. Positions among its keys: `late`, what
    the batch before has, `early`, what batches before that had when it was fetched, `first`, what the next has.
    `in_parts` if some tiers give those later than the others; it `has_late` and `has_early` ones then, and all when it
    is `complete`. `rest` waits for the part of its update that went behind.
    """

    def __init__(self, number: int, seen: int, own: list[Keys], everybody: list[Keys]) -> None:
        self.number, self.seen, self.own, self.everybody = number, seen, own, everybody
        self.late: list[Keys] = []
        self.early: list[Keys] = []
        self.first: list[Keys] | None = None
        self.rest: list[Wait] = []
        self.in_parts = self.has_early = self.has_late = self.complete = self.moved = False
        self.completing = threading.Lock()
        self.lookup: Any = None  # once it is fetched

    def at_once(self, tier: Tier) -> bool:
        """Whether a tier gives all rows ahead of the model, those that will have changed included."""
        return fetched_ahead(tier) and not (self.in_parts and _comes_late(tier))

    def both(self) -> list[Keys]:
        return [np.union1d(late, early) for late, early in zip(self.late, self.early, strict=True)]

    def alone(self) -> list[Keys]:
        """What no batch in flight will change."""
        return [np.delete(np.arange(len(own)), both) for own, both in zip(self.own, self.both(), strict=True)]

    def missing(self) -> list[Keys]:
        """What has not come yet."""
        none = [_NONE] * len(self.own)
        if self.has_early:
            return none if self.has_late else self.late
        return self.early if self.has_late else self.both()


def fetched_ahead(tier: Tier) -> bool:
    """Whether the order of fetches and updates makes no difference to which rows a tier has."""
    return all(table.admission is None and table.eviction is None for table in tier.tables.values())


def _comes_late(tier: Tier) -> bool:
    """Whether a row waits for the updates before it. Ranks of a collective tier could not agree on when."""
    return tier.remote and not tier.collective and fetched_ahead(tier)


def _hashes(keys: Keys) -> Keys:
    return (_native.hash_keys(keys) >> np.uint64(32)).astype(np.int64)
