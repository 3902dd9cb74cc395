"""`Checker`: watches the clocks of copies while several workers train, and counts what the bound forbids.

Promises of a cache with bound s, workers being in step: copies of a row that two workers read in one step differ by at
most 2s clocks, and a worker sees its own updates, so the clock of a row it reads is never below the one its own last
update left. Workers in one process share a checker; those in several save theirs, and `load` brings them together.
With `sample` n it looks at one row in n, the same ones everywhere. For tests and benchmarks: it keeps every read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotrow import _native

Keys = npt.NDArray[np.int64]
Clocks = npt.NDArray[np.int64]


class Checker:
    """What was read, by whom and at which step, for a bound of `clock`; None for no bound."""

    def __init__(self, clock: int | None, sample: int = 1) -> None:
        self.clock, self._sample = clock, sample
        self._lock = threading.Lock()
        self._tables: dict[str, int] = {}
        self._reads: list[npt.NDArray[np.int64]] = []  # step, table, key, clock
        self._own: dict[tuple[int, int], dict[int, int]] = {}  # of worker and table: key to clock after its last update
        self.unseen = 0  # own updates that a read did not see

    def read(self, worker: int, table: str, step: int, keys: Keys, clocks: Clocks) -> None:
        """A worker reads rows at these clocks; below 0 the row is not in its cache."""
        keys, clocks = self._some(keys, clocks)
        with self._lock:
            t = self._tables.setdefault(table, len(self._tables))
            own = self._own.get((worker, t), {})
            known = np.array([own.get(key, -1) for key in keys.tolist()], np.int64)
            self.unseen += int((clocks < known).sum())
            self._reads.append(np.stack([np.full_like(keys, step), np.full_like(keys, t), keys, clocks]))

    def updated(self, worker: int, table: str, keys: Keys, clocks: Clocks) -> None:
        """A worker has updated its copies, which have these clocks now."""
        keys, clocks = self._some(keys, clocks)
        with self._lock:
            t = self._tables.setdefault(table, len(self._tables))
            self._own.setdefault((worker, t), {}).update(zip(keys.tolist(), clocks.tolist(), strict=True))

    def differences(self) -> npt.NDArray[np.int64]:
        """For each row and step at which several workers read it: by how many clocks their copies differed."""
        step, table, key, clock = np.concatenate([np.empty((4, 0), np.int64), *self._reads], axis=1)
        order = np.lexsort((key, table, step))
        rows = np.stack([step, table, key])[:, order]
        first = np.concatenate([[True], (rows[:, 1:] != rows[:, :-1]).any(axis=0)])[: len(order)]
        starts = np.flatnonzero(first)
        if len(starts) == 0:
            return np.empty(0, np.int64)
        apart = np.maximum.reduceat(clock[order], starts) - np.minimum.reduceat(clock[order], starts)
        several = np.diff(np.append(starts, len(order))) > 1
        return apart[several]

    def violations(self) -> int:
        """Reads that broke a promise."""
        apart = self.differences()
        too_far = 0 if self.clock is None else int((apart > 2 * self.clock).sum())
        return too_far + self.unseen

    def save(self, path: Path) -> None:
        """Writes what was seen to a file."""
        reads = np.concatenate([np.empty((4, 0), np.int64), *self._reads], axis=1)
        np.savez(path, reads=reads, tables=np.array(list(self._tables), dtype=str), unseen=self.unseen)

    @staticmethod
    def load(paths: Iterable[Path], clock: int | None) -> Checker:
        """What the checkers of several workers saw, together."""
        all_of = Checker(clock)
        for path in paths:
            with np.load(path, allow_pickle=False) as found:
                reads = found["reads"].copy()
                here = [all_of._tables.setdefault(str(name), len(all_of._tables)) for name in found["tables"]]
                reads[1] = np.array(here, np.int64)[reads[1]] if len(here) else reads[1]
                all_of._reads.append(reads)
                all_of.unseen += int(found["unseen"])
        return all_of

    def _some(self, keys: Keys, clocks: Clocks) -> tuple[Keys, Clocks]:
        here = clocks >= 0
        if self._sample > 1:
            here &= _native.hash_keys(np.ascontiguousarray(keys)) % self._sample == 0
        return keys[here], clocks[here]
