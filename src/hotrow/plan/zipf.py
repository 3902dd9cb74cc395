"""Zipf's law over any number of rows without an array of them: the row of rank r is used in proportion to r^-s.

The first few thousand ranks stand alone, the others in geometric bins that are 0.2% wide; what a bin takes together is
the sum of the law over it (Euler and Maclaurin's, exact to 12 digits there). Row r has the key r - 1. A table of
10^9 rows takes 200 KB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow.errors import SettingsError
from hotrow.plan.cost import HOT, Ints, TableUse
from hotrow.plan.plan import row_bytes
from hotrow.plan.topology import Topology
from hotrow.plan.uses import Use
from hotrow.profile.counts import Histogram
from hotrow.table import Table

_ALONE = 4096
_WIDTH = 1.002


@dataclass(frozen=True)
class Zipf:
    """`rows` rows, used in proportion to their rank to the power of minus `s`."""

    s: float
    rows: int

    def __post_init__(self) -> None:
        if not 0 <= self.s <= 10:
            raise SettingsError(f"A Zipf law has an exponent from 0 to 10, not {self.s:g}.")
        if not 1 <= self.rows <= 1 << 40:
            raise SettingsError(f"A table has from 1 to 2^40 rows, not {self.rows:,}.")

    def bins(self) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Where each bin of ranks begins, counted from 0, and the end; and one row's share of all accesses in each."""
        alone = np.arange(min(self.rows, _ALONE) + 1)
        steps = max(0.0, np.log(self.rows / _ALONE) / np.log(_WIDTH))
        binned = np.geomspace(_ALONE, max(self.rows, _ALONE), int(steps) + 2).astype(np.int64)
        edges = np.unique(np.concatenate([alone, binned[binned < self.rows], [self.rows]]))
        mass = self._sum(edges[:-1] + 1, edges[1:])
        return edges, mass / mass.sum() / np.diff(edges)

    def use(self, table: Table, draws: int, topology: Topology) -> TableUse:
        """The use of such a table by ranks that each look up `draws` keys in a step, independently."""
        edges, p = self.bins()
        classes = len(p)
        order, hot = np.arange(classes, 0, -1), np.arange(min(self.rows, HOT))
        use = Use.of_probabilities(p, draws, topology)
        return TableUse(table, row_bytes(table), order, np.diff(edges), use, hot=hot)

    def draw(self, random: np.random.Generator, draws: int) -> Ints:
        """So many keys, drawn independently; within a bin all rows are alike."""
        edges, p = self.bins()
        ends = np.cumsum(p * np.diff(edges))
        at = np.minimum(np.searchsorted(ends, random.random(draws), side="right"), len(p) - 1)
        return edges[at] + (random.random(draws) * np.diff(edges)[at]).astype(np.int64)

    def histogram(self, accesses: int) -> Histogram:
        """The counts that so many accesses give in the mean, in whole numbers; rows below 1 are left out."""
        edges, p = self.bins()
        size = np.rint(accesses * p).astype(np.int64)
        counts, at = np.unique(size[size > 0], return_inverse=True)
        keys = np.bincount(at, np.diff(edges)[size > 0], len(counts)).astype(np.int64)
        return Histogram(counts[::-1].copy(), keys[::-1].copy())

    def _sum(self, first: Ints, last: Ints) -> npt.NDArray[np.float64]:
        """The sum of k^-s for k from `first` to `last`."""
        a, b = first.astype(np.float64), last.astype(np.float64)
        s = self.s
        whole = np.log(b / a) if s == 1 else (b ** (1 - s) - a ** (1 - s)) / (1 - s)
        ends = (a**-s + b**-s) / 2 + s / 12 * (a ** (-s - 1) - b ** (-s - 1))
        return np.where(first == last, a**-s, whole + ends)
