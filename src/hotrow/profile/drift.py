"""How far the accesses of a table have moved from one profile to another.

What decides whether a plan is still good is `kept`: what the hot set of the first takes of the second's accesses,
beside what the second's own hot set of the same size would take. Distances between the two distributions of
accesses over keys come with their `noise`: what two samples of these sizes from one distribution are expected to
differ by, for in a long tail that is a lot.

Where counts are a summary, keys without a counter are one class together; distances are then lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow.errors import DataError, nearest
from hotrow.profile.counts import Ints, KeyCounts

Floats = npt.NDArray[np.float64]

TOPS = (0.001, 0.01, 0.1)
"""Hot sets that are compared, as shares of the first profile's keys."""


class HotDrift(NamedTuple):
    """The hottest `rows` keys of the first profile: shares of accesses they take, and what they have in common."""

    rows: int
    before: float
    after: float
    best: float
    overlap: float

    @property
    def kept(self) -> float:
        """What they still take, as a share of what the best keys of the second would."""
        return self.after / self.best if self.best else 1.0


@dataclass(frozen=True)
class Drift:
    """One table. `new` is the share of the second's accesses to keys the first has not; distances are from 0 to 1."""

    accesses: tuple[int, int]
    keys: tuple[int, int]
    new: float
    gone: float
    total_variation: float
    noise: float
    jensen_shannon: float
    hot: tuple[HotDrift, ...]

    def as_data(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"hot": [h._asdict() | {"kept": h.kept} for h in self.hot]}


def drift(
    before: Mapping[str, KeyCounts], after: Mapping[str, KeyCounts], tops: Sequence[float] = TOPS
) -> dict[str, Drift]:
    """Of every table of the first profile, to the second; both must have the same tables."""
    for name in [*before, *after]:
        if name not in before or name not in after:
            known = before if name not in before else after
            raise DataError(f'Only one of the two profiles has a table "{name}".{nearest(name, known)}')
    return {name: table_drift(before[name], after[name], tops) for name in before}


def table_drift(before: KeyCounts, after: KeyCounts, tops: Sequence[float] = TOPS) -> Drift:
    """Of one table."""
    first, second = _aligned(before, after)
    total = (max(before.total, 1), max(after.total, 1))
    rest = (before.total - int(first.sum()), after.total - int(second.sum()))  # of keys without a counter
    p, q = np.append(first, rest[0]) / total[0], np.append(second, rest[1]) / total[1]
    return Drift(
        (before.total, after.total),
        (before.distinct, after.distinct),
        new=float(second[first == 0].sum()) / total[1],
        gone=float(first[second == 0].sum()) / total[0],
        total_variation=float(np.abs(p - q).sum()) / 2,
        noise=_noise(np.append(first + second, sum(rest)), before.total, after.total),
        jensen_shannon=_jensen_shannon(p, q),
        hot=tuple(_hot(before, after, max(1, round(top * before.distinct))) for top in tops if before.kept),
    )


def _aligned(before: KeyCounts, after: KeyCounts) -> tuple[Ints, Ints]:
    """The counts of both, for every key that one of them has."""
    keys, first = before.above(1)
    others, counts = after.above(1)
    new = before.of(others) == 0
    return (
        np.concatenate([first, np.zeros(int(new.sum()), np.int64)]),
        np.concatenate([after.of(keys), counts[new]]),
    )


def _hot(before: KeyCounts, after: KeyCounts, rows: int) -> HotDrift:
    keys, counts = before.hottest(rows)
    best, most = after.hottest(len(keys))
    return HotDrift(
        len(keys),
        float(counts.sum()) / max(before.total, 1),
        float(after.of(keys).sum()) / max(after.total, 1),
        float(most.sum()) / max(after.total, 1),
        len(np.intersect1d(keys, best, assume_unique=True)) / max(len(keys), 1),
    )


def _jensen_shannon(p: Floats, q: Floats) -> float:
    """In bits: 0 for the same distribution, 1 for two that have no key in common."""
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(p > 0, p * np.log2(p / middle), 0) + np.where(q > 0, q * np.log2(q / middle), 0)
    return min(1.0, max(0.0, float(bits.sum()) / 2))


def _noise(pooled: Ints, first: int, second: int) -> float:
    """The total variation to expect if both were drawn from one distribution, given how often each key is used in both.

    Of m uses together X are the first's, binomially; the mean of |X - E X| is De Moivre's formula.
    """
    if not first or not second:
        return 0.0
    counts, keys = np.unique(pooled[pooled > 0], return_counts=True)
    share = first / (first + second)
    deviation = np.array([_mean_deviation(int(m), share) for m in counts])
    return min(1.0, float((deviation * keys).sum()) * (1 / first + 1 / second) / 2)


def _mean_deviation(m: int, p: float) -> float:
    v = math.floor(m * p) + 1
    logs = math.lgamma(m + 1) - math.lgamma(v + 1) - math.lgamma(m - v + 1)
    return 2 * v * math.exp(logs + v * math.log(p) + (m - v + 1) * math.log(1 - p)) if v <= m else 0.0
