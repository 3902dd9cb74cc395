"""`hotrow bench cache_auc`: what stale copies cost in AUC, and what caches of several sizes and policies save.

A crew of workers in one process, each with a cache of its own: every step each worker takes its own batch, reads
through its cache, and updates there; dense gradients are averaged and applied once. It is what four processes do,
without the processes: exchanges happen at the step that needs them, in rank order, so a run repeats exactly. Caches
hold 10% of a log's rows, rows have row-wise Adagrad, rates fall to 0, and "s = 0" is the exact side.

    criteo   Criteo's sample (`HOTROW_DATA/criteo.tsv.zst`), 64,000 samples to train on, seen once: 1,000 steps
    made     a made log of a million samples and 6,000 rows, seen once: 7,000 steps. Models are far from done, and what
             Wide & Deep comes to moves by 0.01 from seed to seed

"drift 0" is the bound s alone, as HET has it: a young row waits for it as an old one does. On logs this short most rows
are young, so `drift` leaves little to save; what it costs after a long run is in `hotrow bench cache`. Sizes and
policies are compared without it, on the last of two epochs: bytes are what a shard's link would carry (keys, clocks,
rows, state), against keys and rows there and gradients back for every unique row of every batch.

Runs have one thread each, as many at a time as there are cores: six minutes on 16, about half an hour on two.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter
from torch.nn import functional as F

from hotrow import _native
from hotrow.bench.hot_auc import criteo_log
from hotrow.bench.report import Report, add, new_report
from hotrow.data import DataSet, Reader, prepare
from hotrow.data.batch import Batch
from hotrow.data.synth import SynthSettings, write_log
from hotrow.embeddings import Embeddings
from hotrow.lookup import Lookup
from hotrow.models import Model, ModelInputs, build
from hotrow.objectives.binary_metrics import BinaryMetrics
from hotrow.plan import Plan
from hotrow.profile.counts import KeyCounts
from hotrow.schedule import Linear
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.table import Feature, Table
from hotrow.tiers import HostTier
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.cached import Cache, CachedTier
from hotrow.train.dense import DenseAdam, DenseStep
from hotrow.world import World

WORKERS, DIM, SHARE = 4, 8, 0.10
RATE, DENSE_RATE = 0.02, 0.001
BATCH = {"criteo": 16, "made": 32}
CLOCKS: tuple[int | str, ...] = (0, 10, 100, 10_000, "unbounded")
SHARES = (0.03, 0.05, 0.10, 0.15)
POLICIES = ("lru", "lfu", "pinned")
MODELS: dict[str, dict[str, Any]] = {
    "wide_deep": {"name": "wide_deep", "deep": [64, 32]},
    "deepfm": {"name": "deepfm", "deep": [64, 32]},
    "dcnv2": {"name": "dcnv2", "deep": [64, 32], "layers": 2},
}


class Came(NamedTuple):
    """What came of one training: AUC, and of the last epoch hit share, bytes against no cache, broken bounds."""

    auc: float
    hit_share: float
    saved: float
    violations: int


def run(quick: bool = False) -> Report:
    """All figures of this page."""
    workload = {
        "workers": WORKERS,
        "batch": BATCH,
        "dim": DIM,
        "cache": f"{SHARE:.0%} of the rows, LFU, drift {Cache().drift:g}",
        "optimizer": "row-wise Adagrad, rates fall to 0",
        "quick": quick,
    }
    report = new_report("cache_auc", workload)
    with tempfile.TemporaryDirectory(prefix="hotrow-crew-") as folder:
        logs = {"made": _made_log(Path(folder), quick)}
        if not isinstance(real := criteo_log(Path(folder), quick), str):
            logs = {"criteo": DataSet.open(real.data), **logs}
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), fresh, initializer=_alone) as pool:
            under_way = [_by_clock(pool, name, data, name == next(iter(logs)), quick) for name, data in logs.items()]
            sizes = _by_size(pool, *next(iter(logs.items())), quick)
            for tell in (*under_way, sizes):
                tell(report)
    return report


def _alone() -> None:
    torch.set_num_threads(1)
    _native.set_threads(1)


def _by_clock(pool: Executor, log: str, data: DataSet, first: bool, quick: bool) -> Callable[[Report], None]:
    """Begins the runs of one log; what is returned waits for them and tells. The gap of the first log counts."""
    seeds, capacity = range(1 if quick else 3), int(_rows(data) * SHARE)
    clocks = {name: CLOCKS if first and name == "wide_deep" and not quick else (0, 100) for name in MODELS}
    asked = [(name, s, None) for name in MODELS for s in clocks[name]] + [(name, 100, 0.0) for name in MODELS]
    runs = {
        (name, s, drift): [
            pool.submit(train, data.path, MODELS[name], seed, s, capacity, BATCH[log], drift=drift) for seed in seeds
        ]
        for name, s, drift in asked
    }
    prefix = "cache.auc" if first else f"cache.auc.{log}"

    def tell(report: Report) -> None:
        gaps = {}
        for (name, s, drift), running in runs.items():
            came, exact = ([run.result() for run in some] for some in (running, runs[name, 0, None]))
            gap = [one.auc - base.auc for one, base in zip(came, exact, strict=True)]
            ours = {
                "auc": [round(one.auc, 5) for one in came],
                "hit_share": round(came[0].hit_share, 4),
                "saved": round(came[0].saved, 4),
            }
            note = f"{log}, mean of {len(gap)} seeds"
            if s != 0:
                note += f"; {statistics.mean(gap):+.5f} to s = 0; bounds broken: {sum(one.violations for one in came)}"
            auc = statistics.mean(one.auc for one in came)
            add(report, f"{prefix}.{name}.s{s}{'' if drift is None else '.drift0'}", auc, "AUC", ours=ours, note=note)
            if s == 100 and drift is None:
                gaps[name] = gap
        mean = {name: statistics.mean(gap) for name, gap in gaps.items()}
        worst = max(mean, key=lambda name: abs(mean[name]))
        add(
            report,
            f"cache.auc_gap{'' if first else '.' + log}",
            abs(mean[worst]),
            "AUC",
            must=0.0005 if first else None,
            aim=0.0002 if first else None,
            better="lower",
            ours={name: [round(one, 6) for one in gap] for name, gap in gaps.items()},
            note=f"s = 100 against s = 0 on {log}, mean of {len(seeds)} seeds; {worst}, the largest",
        )

    return tell


def _by_size(pool: Executor, log: str, data: DataSet, quick: bool) -> Callable[[Report], None]:
    """Begins the runs of all sizes and policies; what is returned waits for them and tells."""
    rows, model = _rows(data), MODELS["wide_deep"]
    chosen = [(p, s) for p in (("lfu",) if quick else POLICIES) for s in ((SHARE,) if quick else SHARES)]
    runs = [
        pool.submit(train, data.path, model, 0, 100, int(rows * s), BATCH[log], p, epochs=2, drift=0.0)
        for p, s in chosen
    ]

    def tell(report: Report) -> None:
        for (policy, share), run in zip(chosen, runs, strict=True):
            came = run.result()
            add(
                report,
                f"cache.by_size.{policy}.{share:.0%}",
                came.saved,
                "of bytes",
                ours={"hit_share": round(came.hit_share, 4), "auc": round(came.auc, 5), "rows": int(rows * share)},
                note=f"saved on {log}, whose rows are {rows:,}, with drift 0",
            )

    return tell


def train(
    path: Path,
    model: Mapping[str, Any],
    seed: int,
    clock: int | str,
    capacity: int,
    batch_size: int,
    policy: str = "lfu",
    epochs: int = 1,
    drift: float | None = None,
) -> Came:
    """Trains a crew on the data set at `path` and evaluates what the server has in the end."""
    data = DataSet.open(path)
    torch.manual_seed(seed)
    settings = TypeAdapter(Model).validate_python(dict(model))
    features = data.schema.feature_settings()
    dim = DIM + settings.extra_row_values
    names = list(dict.fromkeys(feature.table for feature in features))
    falling = Linear(steps=epochs * data.samples("train") // (batch_size * WORKERS) + 1)
    tables = [Table(name=name, dim=dim, optimizer=RowWiseAdagrad(lr=RATE, schedule=falling)) for name in names]
    network = build(settings, ModelInputs(features, {f.name: dim for f in features}, len(data.schema.dense)))
    dense = DenseStep(network, DenseAdam(lr=DENSE_RATE, schedule=falling))
    host = HostTier(tables, seed)
    kept = {} if drift is None else {"drift": drift}
    cache = Cache.model_validate({"capacity": capacity, "policy": policy, "clock": clock, "ahead": 0, **kept})
    checker = Checker(cache.bound, sample=16)
    crew = [_Worker(tables, features, host, cache, World(rank, WORKERS), seed, checker) for rank in range(WORKERS)]
    readers = [
        Reader(data, "train", batch_size, seed=seed, rank=rank, world=WORKERS, drop_last=True)
        for rank in range(WORKERS)
    ]
    for epoch in range(epochs):
        for worker in crew:
            worker.begin()
        for reader in readers:
            reader.seek(epoch, 0)
        for batches in zip(*readers, strict=False):
            lookups = [worker.fetch(batch) for worker, batch in zip(crew, batches, strict=True)]
            for worker, lookup in zip(crew, lookups, strict=True):
                worker.train(network, lookup)
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter.grad /= WORKERS
            dense.step()
    for worker in crew:
        worker.tier.flush()
    served = Embeddings(tables, features, tiers={"host": host}, seed=seed)
    hits, misses, moved, plain = np.sum([worker.counted() for worker in crew], axis=0).tolist()
    return Came(
        _auc(network, served, data), hits / max(hits + misses, 1), 1 - moved / max(plain, 1), checker.violations()
    )


class _Worker:
    """One of the crew."""

    def __init__(
        self,
        tables: list[Table],
        features: list[Feature],
        host: HostTier,
        cache: Cache,
        world: World,
        seed: int,
        checker: Checker,
    ) -> None:
        self.tier = CachedTier(host, cache, seed=seed, world=world, checker=checker)
        plan = Plan.all_on("cached", tables)
        self._embeddings = Embeddings(tables, features, tiers={"cached": self.tier}, plan=plan, seed=seed)
        self._row_bytes = [4 * table.dim for table in tables]
        self._plain = 0
        self._before: Mapping[str, Any] = {}

    def begin(self) -> None:
        """From here on counts."""
        self._before, self._plain = dict(self.tier.counters()), 0

    def fetch(self, batch: Batch) -> Lookup:
        """A batch and its rows."""
        lookup = self._embeddings.group(batch)
        for t, row in enumerate(self._row_bytes):
            self._plain += len(lookup.grouping.keys(t)) * 2 * (8 + row)
        return self._embeddings.fetch(lookup)

    def train(self, model: torch.nn.Module, lookup: Lookup) -> None:
        """Forward and backward on one batch, its rows updated; dense gradients add up over the crew."""
        batch = lookup.batch
        assert batch.labels is not None
        loss = F.binary_cross_entropy_with_logits(model(self._embeddings.embed(lookup), batch.dense), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._embeddings.step()

    def counted(self) -> tuple[int, int, int, int]:
        """Hits, misses, bytes moved, and bytes that would have been without a cache."""
        now = self.tier.counters()
        hits, misses, there, back = (
            now[name] - self._before.get(name, 0) for name in ("hits", "misses", "bytes_in", "bytes_out")
        )
        return hits, misses, there + back, self._plain


def _auc(model: torch.nn.Module, embeddings: Embeddings, data: DataSet) -> float:
    metrics = BinaryMetrics()
    model.eval()
    embeddings.eval()
    with torch.no_grad():
        for batch in Reader(data, "test", 4096, shuffle=False):
            assert batch.labels is not None
            metrics.update(model(embeddings(batch), batch.dense), batch.labels, batch.weights, batch.users)
    return metrics.compute()["auc"]


def _made_log(folder: Path, quick: bool) -> DataSet:
    """A log that models learn much of in one pass: rows are few and used often."""
    settings = SynthSettings(samples=60_000 if quick else 1_000_000, users=4000, items=2000, history_length=4, seed=1)
    write_log(settings, folder / "log")
    return prepare(folder / "log", folder / "made", validation=0, workers=1)


def _rows(data: DataSet) -> int:
    """Distinct keys of the training split, over all tables."""
    table_of = {feature.name: feature.table for feature in data.schema.feature_settings()}
    counts: dict[str, KeyCounts] = {}
    for batch in Reader(data, "train", 1 << 14, shuffle=False):
        for group in batch.groups:
            for name in group.features:
                counts.setdefault(table_of[name], KeyCounts()).add(group[name].values.numpy())
    return sum(count.distinct for count in counts.values())
