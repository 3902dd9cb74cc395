"""`Reader`: batches of a data set in an order that seed and epoch alone decide, read ahead by threads.

An epoch's order is made of windows. The row groups of the split are permuted by (seed, epoch), each `window`
of them form a window, and the samples of a window are permuted among themselves: as random as a window is
wide, at the price of reading whole row groups and holding `threads` + 1 windows in memory. Without `shuffle`
the order is that of the files.

The epoch is cut into steps of `world` batches, and rank r takes the r-th batch of each step: the samples of a
step do not depend on the number of ranks, only on `world * batch_size`. What remains for the last step is
shared out evenly among the ranks, so that all have the same number of batches; at most `world - 1` samples
(`dropped`) are left out, or the whole last step with `drop_last`. Every rank decodes every window.

Row counts are known from the manifest, so `seek` reads nothing of what it jumps over.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotrow.data.ahead import ahead
from hotrow.data.batch import Batch
from hotrow.data.dataset import DataSet, arrow_schema
from hotrow.data.samples import Rows, Samples
from hotrow.errors import DataError, SettingsError


class _RowGroup(NamedTuple):
    file: Path
    number: int
    samples: int


class Reader:
    """Iterating gives the batches from the present position to the end of the epoch; then comes the next.

    reader = Reader(dataset, "train", 2048, seed=1)
    for epoch in range(3):
        for batch in reader:
            ...
    """

    def __init__(
        self,
        dataset: DataSet,
        split: str = "train",
        batch_size: int = 2048,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        window: int = 4,
        threads: int = 1,
        prefetch: int = 8,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("world", world, 1),
            ("window", window, 1),
            ("threads", threads, 0),
            ("prefetch", prefetch, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise SettingsError(f"A reader's {name} must be at least {least}, not {value}.")
        if not 0 <= rank < world:
            raise SettingsError(f"Rank {rank} is not one of {world} ranks, which count from 0.")
        self.dataset = dataset
        self.split = split
        self.batch_size = batch_size
        self.rank, self.world = rank, world
        self._shuffle, self._seed = shuffle, seed
        self._window, self._threads, self._prefetch = window, threads, prefetch
        self._columns = arrow_schema(dataset.schema).names
        self._footers: dict[Path, Any] = {}
        self._groups = [
            _RowGroup(dataset.path / part.file, index, samples)
            for part in dataset.parts(split)
            for index, samples in enumerate(part.row_groups)
        ]
        self.samples = sum(group.samples for group in self._groups)
        step = world * batch_size
        rest = self.samples % step
        self._batches = self.samples // step + int(rest >= world and not drop_last)
        self.dropped = rest if drop_last else rest if rest < world else 0
        self._epoch = self._batch = 0

    def __len__(self) -> int:
        """Batches an epoch has for this rank; the same for every rank."""
        return self._batches

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and batch (of this rank) that come next: what `seek` takes."""
        return self._epoch, self._batch

    def seek(self, epoch: int, batch: int = 0) -> None:
        """The next batch is `batch` of `epoch`; the end of an epoch is the beginning of the next."""
        if epoch < 0 or not 0 <= batch <= len(self):
            raise SettingsError(f"There is no batch {batch} of epoch {epoch}: it has {len(self)} batches.")
        self._epoch, self._batch = (epoch + 1, 0) if batch == len(self) else (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, batch = self.position
        if batch == len(self):
            self._epoch = epoch + 1
            return
        made = self._read(epoch, batch)
        with closing(ahead(made, self._prefetch) if self._threads else made) as batches:
            for done, made_batch in enumerate(batches, start=batch + 1):
                self._epoch, self._batch = (epoch, done) if done < len(self) else (epoch + 1, 0)
                yield made_batch

    def _read(self, epoch: int, batch: int) -> Generator[Batch]:
        """This rank's batches of an epoch from `batch` on."""
        cuts = self._cuts(batch)
        sizes = deque((cuts[:, 1] - cuts[:, 0]).tolist())
        waiting: list[Samples] = []
        with closing(self._loaded(epoch, cuts)) as loaded:
            for samples in loaded:
                waiting.append(samples)
                count = sum(part.size for part in waiting)
                if count < sizes[0]:
                    continue
                joined, at = Samples.join(waiting), 0
                while sizes and count - at >= sizes[0]:
                    size = sizes.popleft()
                    yield joined.batch(at, at + size)
                    at += size
                waiting = [joined.part(at, count)] if at < count else []

    def _cuts(self, batch: int) -> NDArray[np.int64]:
        """First and last sample, in the epoch's order, of each batch of this rank from `batch` on: [n, 2]."""
        step = self.world * self.batch_size
        begins = np.arange(batch, len(self), dtype=np.int64) * step
        widths = np.minimum(self.samples - begins, step)
        return np.stack([begins + widths * r // self.world for r in (self.rank, self.rank + 1)], axis=1)

    def _loaded(self, epoch: int, cuts: NDArray[np.int64]) -> Generator[Samples]:
        """What this rank takes from each window, in order; some windows are loaded ahead."""
        windows = self._windows(epoch, cuts)
        if self._threads == 0:
            yield from (self._load(*window) for window in windows)
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hotrow-reader")
        try:
            loading = deque(pool.submit(self._load, *w) for w in itertools.islice(windows, self._threads))
            while loading:
                samples = loading.popleft().result()
                loading.extend(pool.submit(self._load, *w) for w in itertools.islice(windows, 1))
                yield samples
        finally:
            pool.shutdown(cancel_futures=True)

    def _windows(self, epoch: int, cuts: NDArray[np.int64]) -> Iterator[tuple[list[_RowGroup], Rows]]:
        """The row groups of each window this rank needs, and which of their samples, in order."""
        groups = self._groups
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(groups))
            groups = [groups[i] for i in order]
        begin = 0
        for number, at in enumerate(range(0, len(groups), self._window), start=1):
            members = groups[at : at + self._window]
            count = sum(group.samples for group in members)
            own = np.clip(cuts - begin, 0, count)
            own = own[own[:, 1] > own[:, 0]]
            begin += count
            if not len(own):
                continue
            whole = bool((own[1:, 0] == own[:-1, 1]).all())
            rows: Rows = slice(int(own[0, 0]), int(own[-1, 1]))
            if not whole:
                rows = np.concatenate([np.arange(first, last) for first, last in own])
            if self._shuffle:
                rows = np.random.default_rng([self._seed, epoch, number]).permutation(count)[rows]
            yield members, rows

    def _load(self, groups: list[_RowGroup], rows: Rows) -> Samples:
        tables = []
        for group in groups:
            try:
                file = pq.ParquetFile(group.file, metadata=self._footers.get(group.file))
                self._footers[group.file] = file.metadata
                with file:
                    tables.append(file.read_row_group(group.number, self._columns, use_threads=False))
            except (OSError, KeyError, pa.ArrowException) as error:
                raise DataError(f"{group.file}, row group {group.number}, cannot be read: {error}.") from error
        return Samples.take(pa.concat_tables(tables), rows, self.dataset.schema)
