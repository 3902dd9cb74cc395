"""What a threshold would cost, from a sample: the rows of a table used at least so often in the whole data set.

FAE's calibrator asks this of about 5% of its inputs. Here the answer has an interval for the rows (bootstrap over
the chunks) and for the share of accesses they take (t-interval, each chunk judged by the others); see `sample` for
what they rest on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hotrow.errors import SettingsError
from hotrow.profile.counts import Ints, KeyCounts
from hotrow.profile.sample import FEWEST, LEVEL, Floats, Interval, Sample, Uses, ratio, squares, student

LEAST = 10
"""Accesses in the sample that a threshold must come to: below, noise decides who passes."""
_GROUPS, _RESAMPLES, _BLOCK = 64, 200, 1 << 14


class ThresholdCost(NamedTuple):
    """Keys used at least `threshold` times in the whole: their rows, bytes and share of the table's accesses."""

    threshold: int
    rows: Interval
    bytes: Interval
    share: Interval


def threshold_costs(
    sample: Sample,
    counts: Mapping[str, KeyCounts],
    thresholds: Sequence[int],
    row_bytes: Mapping[str, int],
    *,
    level: float = LEVEL,
    seed: int = 0,
) -> dict[str, list[ThresholdCost]]:
    """For each table what each threshold would cost. `counts` are the sample's own."""
    for threshold in thresholds:
        if threshold * sample.fraction < LEAST:
            raise SettingsError(
                f"A threshold of {threshold:,} accesses comes to {threshold * sample.fraction:.1f} in a sample of "
                f"{sample.fraction:.1%}; it takes {LEAST} to tell. Draw a larger sample, or ask from "
                f"{int(np.ceil(LEAST / sample.fraction)):,} on."
            )
    wanted = np.array(thresholds, np.float64) * sample.fraction
    rows = {name: _Rows(known, wanted, sample.fraction, level, seed) for name, known in counts.items()}
    shares = {name: _Shares(known, wanted, sample.fraction, level) for name, known in counts.items()}
    for chunk in sample.chunks():
        for name, known in counts.items():
            uses, _ = chunk.uses(name)
            rows[name].see(uses)
            shares[name].see(uses, known.of(uses.keys))
    return {
        name: [
            ThresholdCost(threshold, r, r.times(row_bytes[name]), s)
            for threshold, r, s in zip(thresholds, rows[name].intervals(), shares[name].intervals(), strict=True)
        ]
        for name in counts
    }


def known_costs(counts: KeyCounts, thresholds: Sequence[int], row_bytes: int) -> list[ThresholdCost]:
    """The same from counts of the whole data set: certain, and exact where the counts are."""
    classes = counts.histogram()
    found = []
    for threshold in thresholds:
        sure, maybe = classes.counts >= threshold, classes.counts + counts.error >= threshold
        low, high = float(classes.keys[sure].sum()), float(classes.keys[maybe].sum())
        taken, most = (float((classes.counts * classes.keys)[which].sum()) for which in (sure, maybe))
        total, rows = max(counts.total, 1), Interval(low, low, high, 1.0)
        share = Interval(taken / total, taken / total, min(1.0, (most + high * counts.error) / total), 1.0)
        found.append(ThresholdCost(threshold, rows, rows.times(row_bytes), share))
    return found


class _Shares:
    """Hits of each chunk among the keys that the other chunks put above each threshold."""

    def __init__(self, counts: KeyCounts, wanted: Floats, fraction: float, level: float) -> None:
        self._wanted, self._fraction, self._level = wanted, fraction, level
        self._total = counts.total
        histogram = counts.histogram()
        self._seen = [
            float((histogram.counts * histogram.keys)[histogram.counts >= w].sum()) / max(self._total, 1)
            for w in wanted
        ]
        self._hits: list[Floats] = []
        self._sizes: list[float] = []
        self._flipped: list[list[Uses]] = [[] for _ in wanted]

    def see(self, uses: Uses, known: Ints) -> None:
        keys, times = uses
        size = float(times.sum())
        elsewhere = (known - times) * (self._total / max(self._total - size, 1.0))
        self._hits.append(np.array([times[elsewhere >= w].sum() for w in self._wanted], np.float64))
        self._sizes.append(size)
        for flipped, w in zip(self._flipped, self._wanted, strict=True):
            lost = (known >= w) & (elsewhere < w)
            flipped.append(Uses(keys[lost], times[lost]))

    def intervals(self) -> list[Interval]:
        hits = np.array(self._hits)
        return [
            ratio(hits[:, i], self._sizes, self._fraction, seen, self._level, squares(self._flipped[i]))
            for i, seen in enumerate(self._seen)
        ]


class _Rows:
    """How often each key near a threshold is used in each of some groups of chunks, for the bootstrap."""

    def __init__(self, counts: KeyCounts, wanted: Floats, fraction: float, level: float, seed: int) -> None:
        self._wanted, self._fraction, self._level = wanted, fraction, level
        near, _ = counts.above(
            max(1, int(wanted.min() / 4))
        )  # others cannot pass, but by a chance that does not matter
        self._near = np.sort(near)
        classes = counts.histogram()
        self._passed = np.array([classes.keys[classes.counts >= w].sum() for w in wanted], np.float64)
        self._random = np.random.default_rng(seed)
        self._entries: list[tuple[Ints, Ints]] = []

    def see(self, uses: Uses) -> None:
        at = np.searchsorted(self._near, uses.keys)
        at[at == len(self._near)] = 0
        found = np.equal(self._near[at], uses.keys) if len(self._near) else np.zeros(len(at), np.bool_)
        self._entries.append((at[found], uses.times[found]))

    def intervals(self) -> list[Interval]:
        plain = self._passed
        if self._fraction >= 1:
            return [Interval(p, p, p, 1.0) for p in plain]
        passed = self._resampled()
        groups = min(_GROUPS, len(self._entries))
        left = 1 - self._fraction  # of the noise of sampling, what sampling without replacement leaves
        value = np.maximum(plain - left * (passed.mean(axis=1) - plain), 0)
        half = 2 * np.sqrt(left) * passed.std(axis=1, ddof=1) * student(self._level, groups - 1)
        return [
            Interval(float(v), max(0.0, float(v - h)), float(v + h), self._level)
            for v, h in zip(value, half, strict=True)
        ]

    def _resampled(self) -> Floats:
        """How many keys pass each threshold in each resample of the chunks, `[thresholds, resamples]`."""
        chunks = len(self._entries)
        if chunks < FEWEST:
            raise SettingsError(f"{chunks} chunks are too few to say anything of the whole; draw at least {FEWEST}.")
        groups = min(_GROUPS, chunks)
        group_of = self._random.permutation(chunks) % groups
        weights = self._random.multinomial(groups, np.full(groups, 1 / groups), _RESAMPLES).T.astype(np.float32)
        key = np.concatenate([at for at, _ in self._entries])
        group = np.repeat(group_of, [len(at) for at, _ in self._entries])
        times = np.concatenate([times for _, times in self._entries])
        order = np.argsort(key, kind="stable")
        key, group, times = key[order], group[order], times[order]
        passed = np.zeros((len(self._wanted), _RESAMPLES))
        for first in range(0, len(self._near), _BLOCK):
            block = slice(*np.searchsorted(key, [first, first + _BLOCK]))
            rows = min(_BLOCK, len(self._near) - first)
            cell = (key[block] - first) * groups + group[block]
            held = np.bincount(cell, times[block], rows * groups).reshape(rows, groups).astype(np.float32)
            drawn = held @ weights
            for i, wanted in enumerate(self._wanted):
                passed[i] += (drawn >= wanted).sum(axis=0)
        return passed
