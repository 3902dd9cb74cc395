"""`hotrow bench cache_auc`: what stale copies cost in AUC, and what caches of several sizes and policies save.

Runs of `hotrow.Trainer` under `bounded`, on four ranks and a shard, processes of this machine (`cache_crew.py`), each
rank with a cache of its own. Rows are exchanged for at the step that needs them, none ahead. Caches hold 10% of a log's
rows, rows have row-wise Adagrad, rates fall to 0, and "s = 0" is the exact side: a step's pushes of all ranks are
combined into one update, as any run of several trainers has them. Beyond s = 0 exchanges come in the order in which
ranks get to them, so no two runs are the same to the last bit. AUC is that of the checkpoint: caches write back first.

What docs/benchmarks has was recorded before: a crew in one process with a loop of its own, at s = 0 one update after
another for each worker, exchanges in rank order, the rows of a batch alone without the frames around them. The gap to
s = 0 was staleness alone; now it is also that updates are combined there, which weighs more (docs/cache.md).

    criteo   Criteo's sample (`HOTROW_DATA/criteo.tsv.zst`), 64,000 samples to train on, seen once: 1,000 steps
    made     a made log of a million samples and 6,000 rows, seen once: 7,000 steps. Models are far from done, and what
             Wide & Deep comes to moves by 0.01 from seed to seed

"drift 0" is the bound s alone, as HET has it: a young row waits for it as an old one does. On logs this short most rows
are young, so `drift` leaves little to save; what it costs after a long run is in `hotrow bench cache`. Sizes and
policies are compared without it, on the last of two epochs: bytes are what ranks and the shard send each other (keys,
clocks, rows, state, and what frames them), against keys and rows there and gradients back for every unique row of every
batch.

Ranks have one thread each, and runs are as many at a time as there are cores for their ranks. One of 1,000 steps takes
less than a minute on two cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotrow.bench.cache_crew import Came, together
from hotrow.bench.hot_auc import criteo_log
from hotrow.bench.report import Report, add, new_report
from hotrow.data import DataSet, Reader, prepare
from hotrow.data.synth import SynthSettings, write_log
from hotrow.profile.counts import KeyCounts
from hotrow.tiers.cached import Cache

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
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // WORKERS)) as pool:
            under_way = [_by_clock(pool, name, data, name == next(iter(logs)), quick) for name, data in logs.items()]
            sizes = _by_size(pool, *next(iter(logs.items())), quick)
            for tell in (*under_way, sizes):
                tell(report)
    return report


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
    """Trains a crew on the data set at `path`, and evaluates."""
    steps = epochs * -(-DataSet.open(path).samples("train") // (batch_size * WORKERS))
    falling = {"name": "linear", "steps": steps + 1}
    kept = {} if drift is None else {"drift": drift}
    settings = {
        "data": {"path": str(path), "batch_size": batch_size, "seed": seed},
        "tables": {"dim": DIM, "optimizer": {"name": "rowwise_adagrad", "lr": RATE, "schedule": falling}},
        "model": dict(model),
        "optimizer": {"name": "adam", "lr": DENSE_RATE, "schedule": falling},
        "policy": {"name": "bounded", "clock": clock, "ahead": 0},
        "train": {"epochs": epochs, "threads": 1, "seed": seed},
        "cluster": {"cache": {"capacity": capacity, "policy": policy, **kept}},
    }
    return together(settings, WORKERS, None if isinstance(clock, str) else clock)


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
