"""`Marks`: some samples of a split, a bit for each in the order of the files; what a reader is told to read only.

A billion samples take 120 MiB. Marks are looked up by row group, which is what a reader reads by.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hotrow.data.samples import Pieces

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Marks:
    """For each row group of a split which of its samples are marked."""

    def __init__(self, groups: Iterable[Bools]) -> None:
        self._bits: list[NDArray[np.uint8]] = []
        self._sizes: list[int] = []
        self.counts: list[int] = []
        for marked in groups:
            self._bits.append(np.packbits(marked))
            self._sizes.append(len(marked))
            self.counts.append(int(marked.sum()))

    @property
    def samples(self) -> int:
        """How many are marked."""
        return sum(self.counts)

    def of(self, group: int) -> Bools:
        """The marks of a row group's samples."""
        return np.unpackbits(self._bits[group], count=self._sizes[group]).view(np.bool_)

    def others(self) -> Marks:
        """All samples that are not marked."""
        return Marks(~self.of(group) for group in range(len(self._bits)))


def pieces(marked: Bools, sessions: Ints, order: Ints) -> Pieces:
    """Runs of marked samples within each session, by sessions in `order`; a session begins at each of `sessions`."""
    begins = marked.copy()
    begins[1:] &= ~marked[:-1]
    begins[sessions] = marked[sessions]
    starts = np.flatnonzero(begins)
    ends = np.flatnonzero(np.append(begins[1:] | ~marked[1:], True) & marked) + 1
    rank = np.empty(len(sessions), np.int64)
    rank[order] = np.arange(len(order))
    by = np.argsort(rank[np.searchsorted(sessions, starts, side="right") - 1], kind="stable")
    return Pieces(starts[by], (ends - starts)[by])
