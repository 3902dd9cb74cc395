"""How often rows are used in a global step, in expectation: by a rank, by any rank of a node, by anyone.

A row that was counted c times in S samples falls into a batch of B with each of its uses by chance f = B / S, so a
rank uses it with chance 1 - (1 - f)^c, and a node of g ranks with 1 - (1 - g f)^c. Uses of one row come in bursts,
though: a session repeats itself, and what is popular today is not tomorrow. `Bursts` are measured on a few steps as
the reader gives them: how many uses of a row count as one, for a rank, a node and the world, by how often it is used.
On session logs a rank's batch holds up to several times fewer distinct keys than independent samples would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import SettingsError
from hotrow.plan.topology import Topology
from hotrow.profile.counts import Histogram, Ints, KeyCounts

Floats = npt.NDArray[np.float64]
_BINS = 64
_HALVINGS = 40


@dataclass(frozen=True)
class Use:
    """Of classes of rows, an entry each: a rank's lookups in a step, and the chance that there is one."""

    lookups: Floats
    rank: Floats
    node: Floats
    world: Floats

    @staticmethod
    def of_probabilities(p: Floats, draws: int, topology: Topology) -> Use:
        """Of rows that each of a rank's `draws` lookups in a step hits with probability `p`."""
        with np.errstate(divide="ignore"):  # a row that is always hit
            once = draws * np.log1p(-p)
        rank, node, world = (-np.expm1(k * once) for k in (1, topology.ranks, topology.size))
        return Use(draws * p, rank, node, world)

    @staticmethod
    def of_counts(counts: Ints, samples: int, batch: int, topology: Topology, bursts: Bursts | None = None) -> Use:
        """Of rows counted so often in `samples`, of which each rank takes `batch` a step."""
        if samples < 1 or batch < 1:
            raise SettingsError(f"A step needs samples: there are {samples:,}, in batches of {batch:,}.")
        fraction = batch / max(samples, batch * topology.size)
        times = counts.astype(np.float64)
        chances = []
        for level, ranks in enumerate((1, topology.ranks, topology.size)):
            effective = times if bursts is None else times / bursts.of(level, counts)
            chances.append(_chance(effective, ranks * fraction))
        rank, node, world = chances
        node = np.clip(node, rank, np.minimum(1.0, topology.ranks * rank))
        return Use(times * fraction, rank, node, np.clip(world, node, np.minimum(1.0, topology.nodes * node)))


def _chance(times: Floats, fraction: float) -> Floats:
    """That one of so many uses falls into this fraction of all samples."""
    if fraction >= 1:
        return np.ones_like(times)
    chance: Floats = -np.expm1(times * np.log1p(-fraction))
    return chance


@dataclass(frozen=True)
class Bursts:
    """For ranks, nodes and the world, and each power of two a row's count may reach: uses that count as one."""

    sizes: Floats

    def of(self, level: int, counts: Ints) -> Floats:
        """Uses that count as one, never more than there are."""
        sizes: Floats = np.clip(self.sizes[level][_bin(counts)], 1.0, np.maximum(counts, 1))
        return sizes

    @staticmethod
    def measured(batches: Iterable[Ints], counts: KeyCounts, samples: int, batch: int, topology: Topology) -> Bursts:
        """From the keys of successive rank batches of one table, as the reader gives them: rank after rank."""
        histogram = counts.histogram()
        seen = _met(batches, counts, (1, topology.ranks, topology.size))
        sizes = np.ones((3, _BINS))
        for level, ranks in enumerate((1, topology.ranks, topology.size)):
            groups, hits = seen[level]
            if groups == 0 and level:  # too few batches for a step of all ranks: as far as could be seen
                sizes[level] = sizes[level - 1]
            elif groups:
                fraction = ranks * batch / max(samples, batch * topology.size)
                sizes[level] = _fitted(histogram, hits / groups, fraction)
        return Bursts(sizes)


def _met(batches: Iterable[Ints], counts: KeyCounts, groups: Sequence[int]) -> list[tuple[int, Floats]]:
    """For groups of 1, g, ... successive batches: how many there were, and the distinct keys they met by count."""
    found = [(0, np.zeros(_BINS)) for _ in groups]
    waiting: list[list[Ints]] = [[] for _ in groups]
    for keys in batches:
        distinct, _ = _native.unique(np.ascontiguousarray(keys, np.int64))
        for level, size in enumerate(groups):
            waiting[level].append(distinct)
            if len(waiting[level]) == size:
                met = distinct if size == 1 else _native.unique(np.concatenate(waiting[level]))[0]
                number, hits = found[level]
                found[level] = number + 1, hits + np.bincount(_bin(counts.of(met)), minlength=_BINS)
                waiting[level] = []
    return found


def _fitted(histogram: Histogram, hits: Floats, fraction: float) -> Floats:
    """The size of bursts in each bin with which as many distinct keys are expected as were met: by bisection."""
    bins = _bin(histogram.counts)
    counts, keys = histogram.counts.astype(np.float64), histogram.keys.astype(np.float64)
    low, high = np.ones(_BINS), np.exp2(np.arange(_BINS) + 1.0)
    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        expected = np.bincount(bins, keys * _chance(counts / middle[bins], fraction), _BINS)
        more = expected > hits
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    known = np.bincount(bins, keys, _BINS) > 0
    at = np.arange(_BINS)
    return np.interp(at, at[known], low[known]) if known.any() else np.ones(_BINS)


def _bin(counts: Ints) -> Ints:
    return np.log2(np.maximum(counts, 1)).astype(np.int64)


def measured_bursts(
    batches: Iterable[Mapping[str, Ints]],
    counts: Mapping[str, KeyCounts],
    samples: int,
    batch: int,
    topology: Topology,
) -> dict[str, Bursts]:
    """`Bursts.measured` of every table, from batches that hold the keys of each."""
    read = list(batches)
    return {
        name: Bursts.measured((keys[name] for keys in read), known, samples, batch, topology)
        for name, known in counts.items()
    }
