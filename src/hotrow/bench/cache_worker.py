"""One worker of `hotrow bench cache`, a process on a host of its own: `python -m hotrow.bench.cache_worker JSON`.

It trains on batches that lie in a file: rows from the shard, through a cache or not, dense gradients averaged with the
other workers (Gloo). It says "warm" when the cache has seen enough, waits for a line, makes the steps that count, and
says what it measured as JSON. What is written back at the end, when it is told to, is counted apart.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch.nn import functional as F

from hotrow import _native
from hotrow.data import DataSet, Reader
from hotrow.data.batch import Batch
from hotrow.data.steps import Step, schema_after
from hotrow.embeddings import Embeddings
from hotrow.models import Model, ModelInputs, build
from hotrow.plan import Plan
from hotrow.service.remote import RemoteRows
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.table import Feature, Table
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.cached import Cache, CachedTier
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Tier
from hotrow.train.dense import DenseAdam, DenseStep
from hotrow.train.pipeline import Pipeline
from hotrow.world import World

PASSES, AT_ONCE = 4, 50_000


@dataclass(frozen=True)
class Work:
    """What one worker does; the same for all but `rank` and `batches`."""

    rank: int
    workers: int
    shard: str
    key: str
    meeting: str
    """Where workers meet, host and port; the first one serves it."""
    batch: int
    keys: str
    """A file of keys [steps, batch, tables]; empty: batches are read from `data`."""
    data: str
    data_steps: list[dict[str, Any]]
    model: dict[str, Any]
    dim: int
    fill: str
    """A file of what is there before anything counts: "all.TABLE" are keys of this worker's share of the rows and
    "clocks.TABLE" their clocks; "hot.TABLE" is used as often as `PASSES` says. Either may be left out."""
    warm: int
    """Steps after that, which do not count either."""
    steps: int
    cache: dict[str, Any] | None
    checked: str
    """Where the checker's observations go; empty for none."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "hotrow.bench.cache_worker", json.dumps(asdict(self))]


class TimedServed(ServedTier):
    """The served tier, with the seconds that its requests took: a batch's own, or those of a cache in front of it."""

    seconds = 0.0

    def fetch(self, *arguments: Any) -> Any:
        with self._timed():
            return super().fetch(*arguments)

    def update(self, *arguments: Any) -> None:
        with self._timed():
            super().update(*arguments)

    def exchange(self, *arguments: Any) -> Any:
        with self._timed():
            return super().exchange(*arguments)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def main(work: Work) -> None:
    """Warms up, waits to be told, and measures."""
    torch.set_num_threads(1)
    _native.set_threads(1)
    torch.manual_seed(0)
    world = World(work.rank, work.workers)
    _meet(work)
    settings = TypeAdapter(Model).validate_python(work.model)
    features, batches = _drawn(work) if work.keys else _read(work)
    dim = work.dim + settings.extra_row_values
    names = list(dict.fromkeys(feature.table for feature in features))
    tables = [Table(name=name, dim=dim, optimizer=RowWiseAdagrad(lr=0.05)) for name in names]
    checker = Checker(_bound(work), sample=16) if work.checked else None
    tier, served = _tier(work, tables, world, checker)
    embeddings = Embeddings(tables, features, tiers={tier.name: tier}, plan=Plan.all_on(tier.name, tables))
    model = build(settings, ModelInputs(features, {feature.name: dim for feature in features}, 0))
    trainer = Trainer(embeddings, model, work.workers)
    if work.fill:
        _fill(embeddings, served, work)
    with Pipeline(batches, embeddings, ahead=3, told=embeddings.looks_ahead) as pipeline:
        trainer.steps(pipeline, work.warm)
        print("warm", flush=True)
        sys.stdin.readline()
        before, waited = dict(tier.counters()), served.seconds
        start = time.perf_counter()
        trainer.steps(pipeline, work.steps)
        seconds = time.perf_counter() - start
        after = tier.counters()
    counted = {name: after[name] - before.get(name, 0) for name in after if isinstance(after[name], int)}
    said = {"exchange_s": served.seconds - waited, "seconds": seconds, "counters": counted}
    print(json.dumps({**said, "staleness": after.get("staleness", {})}), flush=True)
    sys.stdin.readline()
    if checker is not None:
        checker.save(Path(work.checked))
    dist.barrier()
    tier.close()
    dist.destroy_process_group()


class Trainer:
    """Forward, backward, an average of dense gradients, both updates."""

    def __init__(self, embeddings: Embeddings, model: nn.Module, workers: int) -> None:
        self._embeddings, self._model, self._workers = embeddings, model, workers
        self._dense = DenseStep(model, DenseAdam(lr=0.001))

    def steps(self, pipeline: Pipeline, count: int) -> None:
        """So many steps; all workers end together."""
        for fetched in itertools.islice(pipeline, count):
            labels = fetched.batch.labels
            assert labels is not None
            logits = self._model(self._embeddings.embed(fetched.lookup), None)
            F.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self._workers
            self._dense.step()
            pipeline.update()
        dist.barrier()


def _fill(embeddings: Embeddings, served: ServedTier, work: Work) -> None:
    """Gives the shard rows with clocks, and uses those that a long run leaves in a cache a few times."""
    draw = np.random.default_rng(work.rank)
    with np.load(work.fill, allow_pickle=False) as stored:
        for number, table in enumerate(embeddings.tables.values()):
            if f"all.{table.name}" not in stored:
                continue
            keys, clocks = stored[f"all.{table.name}"], stored[f"clocks.{table.name}"].astype(np.uint32)
            columns = {
                "keys": keys,
                "values": draw.uniform(-0.05, 0.05, (len(keys), table.dim)).astype(np.float32),
                "state": (1e-4 * clocks).astype(np.float32),
                "clocks": clocks,
                "uses": clocks,
                "last": np.zeros(len(keys), np.uint32),
            }
            RemoteRows(served.client, table, number).import_(columns)
        dist.barrier()
        keys = {table: stored[f"hot.{table}"] for table in embeddings.tables if f"hot.{table}" in stored}
        pieces = -(-sum(map(len, keys.values())) // AT_ONCE)
        for piece in list(range(pieces)) * PASSES:
            batch = Batch.plain({name: [some[piece::pieces].tolist()] for name, some in keys.items()})
            (1e-3 * embeddings(batch).vectors().sum()).backward()
            embeddings.step()
    dist.barrier()


def _drawn(work: Work) -> tuple[list[Feature], Iterator[Batch]]:
    keys = np.load(work.keys, mmap_mode="r")
    features = [Feature(name=f"c{t}") for t in range(keys.shape[2])]
    draw = np.random.default_rng(work.rank)

    def batches() -> Iterator[Batch]:
        for drawn in keys:
            labels = torch.from_numpy((draw.random(len(drawn)) < 0.25).astype(np.float32))
            columns = {f.name: torch.from_numpy(drawn[:, t].copy()) for t, f in enumerate(features)}
            yield Batch.plain(columns, labels=labels)

    return features, batches()


def _read(work: Work) -> tuple[list[Feature], Iterator[Batch]]:
    data = DataSet.open(work.data)
    steps = TypeAdapter(tuple[Step, ...]).validate_python(work.data_steps)
    reader = Reader(data, "train", work.batch, rank=work.rank, world=work.workers, drop_last=True, steps=steps)

    def batches() -> Iterator[Batch]:
        for epoch in itertools.count():
            reader.seek(epoch, 0)
            yield from reader

    return schema_after(steps, data.schema).feature_settings(), batches()


def _bound(work: Work) -> int | None:
    return None if work.cache is None else Cache(**work.cache).bound


def _tier(work: Work, tables: list[Table], world: World, checker: Checker | None) -> tuple[Tier, TimedServed]:
    served = TimedServed([work.shard], tables, world=world, combine=False, key=work.key, timeout=120)
    if work.cache is None:
        return served, served
    return CachedTier(served, Cache(**work.cache), world=world, checker=checker), served


def _meet(work: Work) -> None:
    host, _, port = work.meeting.rpartition(":")
    patience = datetime.timedelta(seconds=120)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), work.workers, is_master=work.rank == 0, timeout=patience
    )
    dist.init_process_group("gloo", store=store, rank=work.rank, world_size=work.workers, timeout=patience)


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
