"""What training looks up: how often the device had the row, and, where plans are made on the way, how often each key.

An access is one sample's use of one key: what profiles count and plans predict. A deduplicated batch looks a row up
once for many samples, so its lookups are weighted by the samples that share them. A thread of its own does it, a few
batches behind at most: `settle` before rows move. Where nothing is shared and no key is counted, the tier's own counts
are taken, at no cost.

Live counts forget: each new plan halves them, so the batches of i plans ago weigh 2^-i. They keep four keys for each
row that the budget could hold, and at least 65,536; beyond, the rare ones are dropped with a known error (`KeyCounts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow.data.batch import Batch, Group
from hotrow.plan import row_bytes
from hotrow.profile.counts import LIMIT, KeyCounts
from hotrow.table import Table
from hotrow.tiers.device import DeviceTier

Keys = npt.NDArray[np.int64]
_BEHIND = 4
_LEAST = 1 << 16


class Seen(NamedTuple):
    """So many of `total` accesses found their row on the device."""

    hits: int = 0
    total: int = 0

    def since(self, before: Seen) -> Seen:
        return Seen(self.hits - before.hits, self.total - before.total)

    @property
    def value(self) -> float:
        return self.hits / max(self.total, 1)


class Accesses:
    """`hits` of `total` accesses of the run, and the counts of keys where they are wanted."""

    def __init__(self, tier: DeviceTier, table_of: Mapping[str, str]) -> None:
        self.hits = self.total = 0
        self.counts: dict[str, KeyCounts] | None = None
        self._tier, self._table_of = tier, dict(table_of)
        self._number = {name: t for t, name in enumerate(tier.tables)}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hotrow-accesses")
        self._behind: deque[Future[None]] = deque()
        self._seen = (tier.hits, tier.lookups)

    def count(self, tables: Sequence[Table], memory: int) -> None:
        """From now on also counts keys, for plans of `memory` bytes."""
        self.counts = {t.name: KeyCounts(_limit(t, memory)) for t in tables}

    def see(self, batch: Batch) -> None:
        """Counts a batch whose update was just made."""
        before, self._seen = self._seen, (self._tier.hits, self._tier.lookups)
        shared = any(group.inverse is not None or group.begins is not None for group in batch.groups)
        if shared or self.counts is not None:
            while len(self._behind) >= _BEHIND:
                self._behind.popleft().result()
            self._behind.append(self._pool.submit(self._count, batch))
        else:
            self.hits += self._seen[0] - before[0]
            self.total += self._seen[1] - before[1]

    def settle(self) -> Seen:
        """Hits and accesses of all batches seen; returns when they have been counted."""
        while self._behind:
            self._behind.popleft().result()
        return Seen(self.hits, self.total)

    def forget(self) -> None:
        """What was counted so far weighs half from now on."""
        self.settle()
        if self.counts is not None:
            self.counts = {name: counts.halved() for name, counts in self.counts.items()}

    def close(self) -> None:
        self._pool.shutdown()

    def _count(self, batch: Batch) -> None:
        for table, keys, times in uses(batch, self._table_of):
            held = self._tier.maps[self._number[table]].find(keys) >= 0
            self.hits += int(held.sum() if times is None else times[held].sum())
            self.total += len(keys) if times is None else int(times.sum())
            if self.counts is not None:
                self.counts[table].add(keys, times)


def uses(batch: Batch, table_of: Mapping[str, str]) -> Iterator[tuple[str, Keys, Keys | None]]:
    """For each feature its table, the keys it stores and how many accesses each of them is; None: one."""
    for group in batch.groups:
        samples = None if group.inverse is None else np.bincount(group.inverse.numpy(), minlength=group.unique_size)
        for number, feature in enumerate(group.features):
            if feature in table_of:
                yield table_of[feature], *_uses(group, number, samples)


def _uses(group: Group, number: int, samples: Keys | None) -> tuple[Keys, Keys | None]:
    s, values = group.unique_size, group.values.numpy()
    offsets = group.offsets.numpy()[number * s : (number + 1) * s + 1]
    lengths = np.diff(offsets)
    if group.begins is None:
        return values[offsets[0] : offsets[-1]], None if samples is None else np.repeat(samples, lengths)
    begins = group.begins.numpy()[number * s : (number + 1) * s][lengths > 0]
    if len(begins) == 0:
        return values[:0], None
    ends, first = begins + lengths[lengths > 0], int(begins.min())
    size = int(ends.max()) - first
    weights = None if samples is None else samples[lengths > 0]
    # A key is used by every window that began at or before it and has not ended; one between windows by none.
    entered = np.bincount(begins - first, weights, size + 1) - np.bincount(ends - first, weights, size + 1)
    times = np.cumsum(entered)[:-1].astype(np.int64)
    return values[first : first + size][times > 0], times[times > 0]


def _limit(table: Table, memory: int) -> int:
    return min(LIMIT, max(_LEAST, 4 * (memory // row_bytes(table))))
