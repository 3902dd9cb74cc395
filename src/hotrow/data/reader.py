"""`Reader`: batches of a data set in an order that seed and epoch alone decide, read ahead by threads.

Batches are as deduplicated as the files: each group of columns that repeat together is a group of the batch with its
inverse, sliding histories are windows of shared stretches, and nothing is expanded on the way but dense columns.

An epoch's order is made of windows. The row groups of the split are permuted by (seed, epoch), each `window`
of them form a window, and the sessions of a window are permuted among themselves: as random as a window is
wide, at the price of reading whole row groups and holding `threads` + 1 windows in memory. Without `shuffle`
the order is that of the files; without a session column every sample is a session of its own.

Samples of a session stay together in their order: that is what makes a batch repeat itself. So a batch of B samples
holds about B / S sessions of S samples, and where the samples of a session have correlated gradients (correlation c)
the variance of the batch's mean gradient is 1 + c (S - 1) times that of B samples drawn one by one: a larger batch,
which deduplication pays for, or a lower rate makes up for it. A session cut by a batch's end goes on in the next one.

The epoch is cut into steps of `world` batches, and rank r takes the r-th batch of each step: the samples of a
step do not depend on the number of ranks, only on `world * batch_size`. What remains for the last step is
shared out evenly among the ranks, so that all have the same number of batches; at most `world - 1` samples
(`dropped`) are left out, or the whole last step with `drop_last`. Every rank decodes every window.

Row counts are known from the manifest, so `seek` reads nothing of what it jumps over.

With `only`, an epoch is the marked samples alone: the marked pieces of each session, still together and in their order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.data.ahead import ahead
from hotrow.data.batch import Batch
from hotrow.data.dataset import DataSet
from hotrow.data.marks import Bools, Marks, pieces
from hotrow.data.rowgroups import Footers
from hotrow.data.samples import Draws, Pieces, Taken, Window, needed
from hotrow.data.steps import Step, apply, schema_after
from hotrow.errors import SettingsError


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
        steps: Sequence[Step] = (),
        only: Marks | None = None,
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
        self.schema = schema_after(steps, dataset.schema)
        self._steps = tuple(steps)
        self._without = set(dataset.schema.columns) - needed(dataset.schema, sessions=shuffle)
        self._footers: Footers = {}
        self._groups = dataset.row_groups(split)
        self._begins = [0, *itertools.accumulate(group.samples for group in self._groups)]
        self._only = only
        self._counts = [group.samples for group in self._groups] if only is None else only.counts
        self.samples = sum(self._counts)
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
        cuts = deque(self._cuts(batch).tolist())
        waiting: list[Taken] = []
        with closing(self._loaded(epoch, cuts)) as loaded:
            for begin, ordered in loaded:
                end = begin + ordered.size
                while cuts and cuts[0][0] < end:
                    first, last = cuts[0]
                    waiting.append(ordered.take(max(first, begin) - begin, min(last, end) - begin))
                    if last > end:
                        break
                    cuts.popleft()
                    yield Taken.join(waiting).batch()
                    waiting = []

    def _cuts(self, batch: int) -> NDArray[np.int64]:
        """First and last sample, in the epoch's order, of each batch of this rank from `batch` on: [n, 2]."""
        step = self.world * self.batch_size
        begins = np.arange(batch, len(self), dtype=np.int64) * step
        widths = np.minimum(self.samples - begins, step)
        return np.stack([begins + widths * r // self.world for r in (self.rank, self.rank + 1)], axis=1)

    def _loaded(self, epoch: int, cuts: Sequence[Sequence[int]]) -> Generator[tuple[int, _Ordered]]:
        """Each window this rank needs, and its first sample in the epoch's order; some are loaded ahead."""
        windows = self._windows(epoch, np.array(cuts))
        if self._threads == 0:
            yield from ((w.begin, self._load(w)) for w in windows)
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hotrow-reader")
        try:
            loading = deque(_loading(pool, self._load, itertools.islice(windows, self._threads)))
            while loading:
                begin, future = loading.popleft()
                ordered = future.result()
                loading.extend(_loading(pool, self._load, itertools.islice(windows, 1)))
                yield begin, ordered
        finally:
            pool.shutdown(cancel_futures=True)

    def _windows(self, epoch: int, cuts: NDArray[np.int64]) -> Iterator[_Planned]:
        """The windows this rank needs, in order."""
        order = np.arange(len(self._groups))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        begin = 0
        for number, at in enumerate(range(0, len(order), self._window), start=1):
            members = [i for i in order[at : at + self._window].tolist() if self._counts[i]]
            end = begin + sum(self._counts[i] for i in members)
            if members and ((cuts[:, 0] < end) & (cuts[:, 1] > begin)).any():
                yield _Planned(begin, members, [self._seed, epoch, number] if self._shuffle else None, epoch)
            begin = end

    def _load(self, planned: _Planned) -> _Ordered:
        schema, numbers = self.dataset.schema, planned.numbers
        with self.dataset.reading():
            read = [self._groups[i].read(schema, self._footers, self._without) for i in numbers]
        only = None if self._only is None else np.concatenate([self._only.of(i) for i in numbers])
        draws = Draws(self._seed, planned.epoch, [(self._begins[i], self._begins[i + 1]) for i in numbers])
        return _Ordered(apply(self._steps, Window.of(read, schema, draws)), planned.seed, only)


class _Planned(NamedTuple):
    """A window to be loaded: its first sample in the epoch's order, its row groups, the seed of its own order."""

    begin: int
    numbers: list[int]
    seed: list[int] | None
    epoch: int


def _loading(
    pool: ThreadPoolExecutor, load: Callable[[_Planned], _Ordered], windows: Iterable[_Planned]
) -> Iterator[tuple[int, Future[_Ordered]]]:
    return ((w.begin, pool.submit(load, w)) for w in windows)


class _Ordered:
    """A window and the order of its samples, or of those marked: that of the files, or by sessions from a seed."""

    def __init__(self, window: Window, seed: list[int] | None, only: Bools | None = None) -> None:
        self.window = window
        sessions = np.zeros(1, dtype=np.int64) if seed is None else window.sessions()
        order = np.arange(1) if seed is None else np.random.default_rng(seed).permutation(len(sessions))
        if only is None:
            self._pieces = Pieces(sessions[order], np.diff(sessions, append=window.size)[order])
        else:
            self._pieces = pieces(only, sessions, order)
        self._ends = np.cumsum(self._pieces.counts)
        self.size = int(self._ends[-1])

    def take(self, first: int, last: int) -> Taken:
        """The samples from `first` up to `last` in this order."""
        a = int(np.searchsorted(self._ends, first, side="right"))
        b = int(np.searchsorted(self._ends, last, side="left")) + 1
        starts, counts = self._pieces.starts[a:b].copy(), self._pieces.counts[a:b].copy()
        counts[-1] -= self._ends[b - 1] - last
        skipped = first - (self._ends[a] - self._pieces.counts[a])
        starts[0] += skipped
        counts[0] -= skipped
        return self.window.take(Pieces(starts, counts))
