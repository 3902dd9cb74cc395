"""`hotrow bench hot_auc`: what AUC hot rows cost, in both modes: a run with a plan against the same run without one.

`split` computes the same as no plan but for rounding; `hot_cold` trains on other batches. The AUC of one run moves with
the order of the samples alone, on a test split as small as Criteo's here by about 0.001, twice what is to be shown, and
by up to 0.0005 with rounding alone. So each seed, of order and initial weights, is trained in every way, and a figure
is the mean of the differences over seeds, with its standard error beside it.

    criteo   the first 80,000 lines of a Criteo log (`HOTROW_DATA/criteo.tsv.zst`), 64,000 to train on
    demo     the log of `hotrow demo`, trained on as there; lists, histories and what repeats in a session kept once

It needs no GPU: on a CPU the device tier is a dense array. Runs have one thread each, as many at a time as there are
cores.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hotrow.bench.real_logs import FOLDER
from hotrow.bench.report import Report, add, missing, new_report
from hotrow.data import DataSet, prepare
from hotrow.data.synth import SynthSettings, write_log
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.trainer import train

MUST, AIM = 0.0005, 0.0001
SAMPLES = 1_500_000
"""Of the demo's log. With a quarter of them, seen once, the AUC of runs without a plan varied by 0.002."""
JUDGE = 4_000
"""Test samples whose loss steers hot and cold turns: there are hundreds of turns in an epoch as short as these."""


class Workload(NamedTuple):
    """A data set and how it is trained on; `seeds` to train without a plan and with each mode."""

    name: str
    data: Path
    batch_size: int
    epochs: int
    dim: int
    rate: float
    dense_rate: float
    memory: str
    seeds: Mapping[str, int]


def run(quick: bool = False) -> Report:
    """The figures of this page alone."""
    report = new_report("hot_auc", {"model": "DLRM", "optimizer": "row-wise Adagrad, rates fall to 0", "quick": quick})
    measure(report, quick)
    return report


def measure(report: Report, quick: bool) -> None:
    """Adds `hot.auc_gap`, the largest of all, and each log's and mode's own."""
    with tempfile.TemporaryDirectory(prefix="hotrow-auc-") as folder:
        workloads = [demo_log(Path(folder), quick)]
        criteo = criteo_log(Path(folder), quick)
        if isinstance(criteo, Workload):
            workloads.append(criteo)
        else:
            for mode in ("split", "hot_cold"):
                missing(report, f"hot.auc_gap.criteo.{mode}", criteo)
        # Started afresh, for a forked process shares locks with threads that it does not have.
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), fresh) as pool:
            gaps = {(w.name, mode): gap for w in workloads for mode, gap in gaps_of(w, Path(folder), pool).items()}
    worst = max(gaps, key=lambda at: abs(gaps[at].mean))
    for (log, mode), gap in gaps.items():
        _tell(report, f"hot.auc_gap.{log}.{mode}", gap, "")
    _tell(report, "hot.auc_gap", gaps[worst], f"{worst[1]} on {worst[0]}, the largest of {len(gaps)}")


class Gap(NamedTuple):
    """AUC without and with a plan, seed by seed."""

    plain: Sequence[float]
    planned: Sequence[float]
    hot: float
    """Share of accesses (split) or samples (hot_cold) that had hot rows only."""

    @property
    def differences(self) -> list[float]:
        return [b - a for a, b in zip(self.plain, self.planned, strict=True)]

    @property
    def mean(self) -> float:
        return statistics.mean(self.differences)

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        n = len(self.plain)
        return statistics.stdev(self.differences) / n**0.5 if n > 1 else None


def gaps_of(workload: Workload, folder: Path, pool: Executor) -> dict[str, Gap]:
    """For each mode how the AUC of all its seeds differs from that of runs without a plan."""
    modes = {"plain": None, "split": "split", "hot_cold": "hot_cold"}
    under_way = {
        (name, seed): pool.submit(auc_of, settings(workload, folder / f"{workload.name}-{name}-{seed}", seed, mode))
        for name, mode in modes.items()
        for seed in range(workload.seeds.get(name, 0))
    }
    done = {at: future.result() for at, future in under_way.items()}
    found = {}
    for mode in ("split", "hot_cold"):
        plain, planned = ([done[name, seed][0] for seed in range(workload.seeds[mode])] for name in ("plain", mode))
        found[mode] = Gap(plain, planned, done[mode, 0][1])
    return found


def settings(workload: Workload, folder: Path, seed: int, mode: str | None) -> dict[str, Any]:
    """A run file as data."""
    w = workload
    steps = w.epochs * (-(-DataSet.open(w.data).samples("train") // w.batch_size) + 1)  # hot_cold may have one more
    falling = {"name": "linear", "steps": steps, "final": 0.0}
    found: dict[str, Any] = {
        "data": {"path": str(w.data), "batch_size": w.batch_size, "seed": seed},
        "tables": {
            "dim": w.dim,
            "init": {"name": "uniform", "scale": 0.01},
            "optimizer": {"name": "rowwise_adagrad", "lr": w.rate, "schedule": falling},
        },
        "model": {"name": "dlrm"},
        "optimizer": {"name": "adam", "lr": w.dense_rate, "schedule": falling},
        "train": {"epochs": w.epochs, "threads": 1, "seed": seed},
        "output": {"folder": str(folder), "tensorboard": False},
    }
    if mode is None:
        return found
    judge = {"judge": JUDGE} if mode == "hot_cold" else {}
    return {**found, "plan": {"memory": w.memory, "mode": mode, **judge}}


def auc_of(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Trains; the AUC of the test split, and what share was hot."""
    result = train(parse(Run, dict(settings)))
    return result.metrics["auc"], result.plan.get("measured", 0.0)


def demo_log(folder: Path, quick: bool) -> Workload:
    write_log(SynthSettings(samples=SAMPLES // 75 if quick else SAMPLES), folder / "log")
    prepare(folder / "log", folder / "demo", validation=0)
    seeds = {"plain": 2, "split": 1, "hot_cold": 2} if quick else {"plain": 8, "split": 4, "hot_cold": 8}
    memory = "64KiB" if quick else "112KiB"  # about half of the samples look up hot rows only
    return Workload("demo", folder / "demo", 256 if quick else 1024, 2, 16, 0.15, 0.002, memory, seeds)


def criteo_log(folder: Path, quick: bool) -> Workload | str:
    """The Criteo sample, or why it is not here."""
    found = os.environ.get(FOLDER)
    if not found:
        return f"{FOLDER} names no folder with real logs"
    log = Path(found) / "criteo.tsv.zst"
    if not log.is_file():
        return f"the folder that {FOLDER} names has no {log.name}"
    prepare(log, folder / "criteo", format="criteo", split="samples:64000", validation=0, bad="missing")
    seeds = {"plain": 2, "split": 1, "hot_cold": 2} if quick else {"plain": 16, "split": 6, "hot_cold": 16}
    return Workload("criteo", folder / "criteo", 256, 1, 4, 0.05, 0.005, "2MiB", seeds)


def _tell(report: Report, id: str, gap: Gap, note: str) -> None:
    error = None if gap.error is None else round(gap.error, 6)
    add(
        report,
        id,
        abs(gap.mean),
        "",
        must=MUST,
        aim=AIM,
        better="lower",
        ours={
            "auc": round(statistics.mean(gap.planned), 6),
            "difference": round(gap.mean, 6),
            "standard_error": error,
            "seeds": len(gap.plain),
            "hot": round(gap.hot, 4),
        },
        baseline={
            "auc": round(statistics.mean(gap.plain), 6),
            "spread": round(statistics.stdev(gap.plain), 6) if len(gap.plain) > 1 else None,
        },
        note=note,
    )
