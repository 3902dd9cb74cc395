"""What a plan will hold in training: the share of accesses, and of samples that touch hot rows only, with intervals.

From counts of the whole data set the share of accesses is known; the share of samples is measured on a random
sample of chunks. From counts of a sample both are judged chunk by chunk: for each, the rows are chosen again from
all other chunks within the same budget, and the chunk is looked up in those. So the plan is never measured on what
it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow.plan.hot import NOTHING, Cut, HotRows, choose
from hotrow.profile.counts import Histogram, Ints, KeyCounts, order
from hotrow.profile.sample import LEVEL, Chunk, Interval, Sample, Uses, ratio, squares

Bools = npt.NDArray[np.bool_]
IsHot = Callable[[Mapping[str, Uses]], Mapping[str, Bools]]
"""For a chunk's distinct keys of each table, which of them are hot."""


class Prediction(NamedTuple):
    """Shares in the whole data set: of each table's accesses, of all accesses, of samples with hot rows only."""

    tables: dict[str, Interval]
    accesses: Interval
    samples: Interval | None


def predict(
    hot: HotRows,
    sample: Sample,
    counts: Mapping[str, KeyCounts],
    *,
    sampled: bool,
    judge_samples: bool = True,
    level: float = LEVEL,
) -> Prediction:
    """What `hot` will hold. `sampled` says whether `counts` are of `sample` itself or of the whole data set.

    Without `judge_samples` nothing is read where the counts are of the whole, and nothing is said of samples.
    """
    names = list(hot.tables)
    if not (sampled or judge_samples):
        return Prediction({name: t.share for name, t in hot.tables.items()}, hot.share, None)
    planned = _planned(hot)
    judge = _left_out(hot, counts) if sampled else planned
    tally = _Tally(names)
    for chunk in sample.chunks():
        uses = {name: chunk.uses(name) for name in names}
        distinct = {name: used for name, (used, _) in uses.items()}
        tally.see(chunk, uses, planned(distinct), judge(distinct))
    seen = sum(tally.whole_planned) / max(sum(tally.samples), 1.0)
    samples = ratio(tally.whole, tally.samples, sample.fraction, seen, level, sum(tally.lost_samples().values()))
    if not sampled:
        return Prediction({name: t.share for name, t in hot.tables.items()}, hot.share, samples)
    hits, sizes, flips = np.array(tally.hits), np.array(tally.sizes), tally.lost()
    tables = {
        name: ratio(hits[:, t], sizes[:, t], sample.fraction, hot.tables[name].share.value, level, flips[name])
        for t, name in enumerate(names)
    }
    accesses = ratio(hits.sum(axis=1), sizes.sum(axis=1), sample.fraction, hot.share.value, level, sum(flips.values()))
    return Prediction(tables, accesses, samples)


class _Tally:
    """What chunks hit, by those judged fairly; and what each key that the plan has, but not without the chunk, took."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.hits: list[list[float]] = []
        self.sizes: list[list[float]] = []
        self.samples: list[float] = []
        self.whole: list[float] = []
        self.whole_planned: list[float] = []
        self._flipped: dict[str, list[Uses]] = {name: [] for name in names}
        self._spoiled: dict[str, list[Uses]] = {name: [] for name in names}

    def see(
        self,
        chunk: Chunk,
        uses: Mapping[str, tuple[Uses, npt.NDArray[np.int32]]],
        planned: Mapping[str, Bools],
        fair: Mapping[str, Bools],
    ) -> None:
        whole, whole_planned = self._whole(chunk, uses, fair), self._whole(chunk, uses, planned)
        spoiled = whole_planned & ~whole
        for name in self._names:
            (keys, times), lookups = uses[name]
            flipped = planned[name] & ~fair[name]
            self._flipped[name].append(Uses(keys[flipped], times[flipped]))
            owners = chunk.owners[name]
            of = np.flatnonzero(flipped[lookups] & spoiled[owners])
            samples, first = np.unique(owners[of], return_index=True)
            spoiled[samples] = False  # each is laid to one key: where it takes two, neither alone decides
            self._spoiled[name].append(Uses(keys, np.bincount(lookups[of[first]], minlength=len(keys))))
        self.hits.append([float(uses[name][0].times[fair[name]].sum()) for name in self._names])
        self.sizes.append([float(uses[name][0].times.sum()) for name in self._names])
        self.samples.append(float(chunk.samples))
        self.whole.append(float(whole.sum()))
        self.whole_planned.append(float(whole_planned.sum()))

    def _whole(
        self, chunk: Chunk, uses: Mapping[str, tuple[Uses, npt.NDArray[np.int32]]], is_hot: Mapping[str, Bools]
    ) -> Bools:
        """Which samples of the chunk look up hot rows only."""
        whole = np.ones(chunk.samples, np.bool_)
        for name in self._names:
            whole[chunk.owners[name][~is_hot[name][uses[name][1]]]] = False
        return whole

    def lost(self) -> dict[str, float]:
        """For each table, the squares of the accesses that each flipped key took."""
        return {name: squares(entries) for name, entries in self._flipped.items()}

    def lost_samples(self) -> dict[str, float]:
        """The same for the samples that were hot but for such keys."""
        return {name: squares(entries) for name, entries in self._spoiled.items()}


def _planned(hot: HotRows) -> IsHot:
    """Hot is what the plan says."""
    keys: dict[str, Ints] = {}
    for name, shares in hot.plan.shares.items():
        named = shares[0].keys
        keys[name] = np.empty(0, np.int64) if named is None else named

    def judge(uses: Mapping[str, Uses]) -> dict[str, Bools]:
        return {name: _is_in(used.keys, keys[name]) for name, used in uses.items()}

    return judge


def _left_out(hot: HotRows, counts: Mapping[str, KeyCounts]) -> IsHot:
    """Hot is what would be planned without the chunk."""
    classes = {name: counts[name].histogram() for name in hot.tables}
    widths = {name: table.row_bytes for name, table in hot.tables.items()}

    def judge(uses: Mapping[str, Uses]) -> dict[str, Bools]:
        with_it = {name: counts[name].of(used.keys) for name, used in uses.items()}
        without = {name: np.maximum(with_it[name] - used.times, 0) for name, used in uses.items()}
        moved = {n: _moved(classes[n], with_it[n], without[n]) for n in uses if n not in hot.kept}
        cuts = {**dict.fromkeys(hot.kept, NOTHING), **choose(moved, widths, hot.memory)}
        return {name: _passes(cuts[name], without[name], used.keys) for name, used in uses.items()}

    return judge


def _moved(classes: Histogram, before: Ints, after: Ints) -> Histogram:
    """The histogram after keys of count `before` fell to `after`."""
    count = np.concatenate([classes.counts, before, after])
    keys = np.concatenate([classes.keys, np.full(len(before), -1), np.ones(len(after), np.int64)])
    values, at = np.unique(count, return_inverse=True)
    total = np.bincount(at, keys, len(values)).astype(np.int64)
    left = (total > 0) & (values > 0)
    return Histogram(values[left][::-1], total[left][::-1])


def _passes(cut: Cut, counts: Ints, keys: Ints) -> Bools:
    """Whether each key is hot by `cut`; among those of the last count, by where they stand in their order."""
    hot = counts > cut.threshold
    if cut.extra:
        hot |= (counts == cut.threshold) & (order(keys).astype(np.float64) < 2.0**64 * (cut.extra / cut.among))
    return hot


def _is_in(keys: Ints, held: Ints) -> Bools:
    """Which of `keys` stand in the sorted `held`."""
    if len(held) == 0:
        return np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(held, keys), len(held) - 1)
    return np.equal(held[at], keys)
