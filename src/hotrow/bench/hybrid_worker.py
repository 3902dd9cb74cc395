"""One trainer of `hotrow bench hybrid`, a process on a host of its own: `python -m hotrow.bench.hybrid_worker JSON`.

It takes turns: each trains a DLRM for some steps under one policy, with tables of its own, on keys that lie in a file.
Rows are on the shards and dense gradients are averaged with the other trainers (Gloo). Before each turn it waits for a
line, so that whoever started it may look at the shards in between, and after it says what it measured as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hotrow import _native
from hotrow.data.batch import Batch
from hotrow.embeddings import Embeddings
from hotrow.models import DLRMSettings, ModelInputs, build
from hotrow.plan import Plan
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.table import Eviction, Feature, Table
from hotrow.tiers.served import ServedTier
from hotrow.train.dense import DenseAdam, DenseStep
from hotrow.train.exact import ExactPipeline
from hotrow.train.hybrid import HybridPipeline
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Pipeline
from hotrow.train.ranks import DenseSync, Ranks, together

PolicyName = Literal["sync", "exact", "hybrid"]
NO_FLAGS = (False, False, False)


@dataclass(frozen=True)
class Turn:
    """`warm` steps that do not count, then `steps` that do."""

    policy: PolicyName
    shards: list[str]
    keys: list[str]
    """A file of keys [steps, batch, tables] for each trainer."""
    dim: int
    deep: list[int]
    warm: int
    steps: int
    capacity: int | None = None
    """Rows that a table holds on each shard, None: all."""
    staleness: int = 8


@dataclass(frozen=True)
class Work:
    """What a trainer does."""

    key: str
    turns: list[Turn]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "hotrow.bench.hybrid_worker", json.dumps(asdict(self))]


def main(work: Work) -> None:
    """Takes every turn."""
    torch.set_num_threads(1)
    _native.set_threads(1)
    with together("cpu", timeout=300.0) as ranks:
        for number, turn in enumerate(work.turns):
            print("ready", flush=True)
            sys.stdin.readline()
            print(json.dumps(_take(turn, number, work.key, ranks)), flush=True)


def _take(turn: Turn, number: int, key: str, ranks: Ranks) -> dict[str, Any]:
    keys = np.load(turn.keys[ranks.world.rank], mmap_mode="r")
    features = [Feature(name=f"c{t}") for t in range(keys.shape[2])]
    eviction = None if turn.capacity is None else Eviction(capacity=turn.capacity)
    tables = [Table(name=f.name, dim=turn.dim, optimizer=RowWiseAdagrad(lr=0.05), eviction=eviction) for f in features]
    world, combine = ranks.world, turn.policy != "hybrid"
    tier = ServedTier(turn.shards, tables, world=world, combine=combine, group=f"turn {number}", key=key, timeout=120)
    embeddings = Embeddings(tables, features, tiers={"served": tier}, plan=Plan.all_on("served", tables))
    torch.manual_seed(0)
    settings = DLRMSettings(top=tuple(turn.deep))
    model = build(settings, ModelInputs(features, {f.name: turn.dim for f in features}, 0))
    dense, sync, phases = DenseStep(model, DenseAdam(lr=0.001)), DenseSync(model, ranks), Phases()
    count = turn.warm + turn.steps

    def step(fetched: Any) -> None:
        with phases("model"):
            logits = model(embeddings.embed(fetched.lookup), None)
            F.binary_cross_entropy_with_logits(logits, fetched.batch.labels).backward()  # type: ignore[no-untyped-call]
        sync.begin(NO_FLAGS)
        pipeline.update()
        with phases("reduce"):
            sync.end(NO_FLAGS)
        dense.step()

    with _pipeline(turn, itertools.islice(_batches(keys, features), count), embeddings, ranks, phases) as pipeline:
        for fetched in itertools.islice(pipeline, turn.warm):
            step(fetched)
        dist.barrier()
        phases.take()
        before, start, busy = dict(tier.counters()), time.perf_counter(), time.process_time()
        for fetched in pipeline:
            step(fetched)
        with pipeline.paused():  # every update is applied
            dist.barrier()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        after, spent = tier.counters(), phases.take()
    tier.close()
    moved = {name: (after[name] - before[name]) / turn.steps for name in ("bytes_in", "bytes_out")}
    spent = {name: round(1000 * s / turn.steps, 2) for name, s in spent.items()}
    samples = keys.shape[1] * world.size * turn.steps
    return {
        "samples_a_second": samples / seconds,
        "seconds": seconds,
        "cpu_ms": 1000 * busy / turn.steps,
        "phases_ms": spent,
        **moved,
    }


def _batches(keys: Any, features: list[Feature]) -> Iterator[Batch]:
    draw = np.random.default_rng(0)
    for drawn in itertools.cycle(keys):
        labels = torch.from_numpy((draw.random(len(drawn)) < 0.25).astype(np.float32))
        yield Batch.plain({f.name: torch.from_numpy(drawn[:, t].copy()) for t, f in enumerate(features)}, labels=labels)


def _pipeline(turn: Turn, batches: Iterator[Batch], embeddings: Embeddings, ranks: Ranks, phases: Phases) -> Pipeline:
    if turn.policy == "hybrid":
        workers = ranks.world.size
        return HybridPipeline(batches, embeddings, staleness=turn.staleness, workers=workers, phases=phases)
    if turn.policy == "exact":
        return ExactPipeline(batches, embeddings, exchange=ranks.gather, phases=phases)
    return Pipeline(batches, embeddings, phases=phases)


if __name__ == "__main__":
    said = json.loads(sys.argv[1])
    main(Work(said["key"], [Turn(**turn) for turn in said["turns"]]))
