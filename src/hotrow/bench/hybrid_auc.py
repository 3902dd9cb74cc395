"""What AUC staleness costs: runs under `Hybrid` against the same runs under `Sync`, seed by seed.

Two figures for each k. `auc_gap` is of a run as it is: rows are as fresh as this machine makes them, and how many
updates they missed is said beside it. `auc_worst` is of a run in which every update is applied as late as k allows
(`Hybrid(worst=True)`), so that every row misses the k batches before: a bound on what any network can do to it. In
both the bound grows over the policy's `ramp` steps. Without that, k = 64 costs 0.039 on the demo's log at worst,
and rows that miss 1.2 updates on average still cost 0.003; with it 0.0014, and nothing that can be seen.

A figure is the mean of the differences over seeds, of order and initial weights, with its standard error beside it.
The logs are those of `hot_auc`; an epoch of the Criteo sample has 250 steps, of which k = 64 is a quarter.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hotrow.bench.hot_auc import Workload, criteo_log, demo_log, settings
from hotrow.bench.report import Report, add, missing, new_report
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train

MUST, AIM = 0.001, 0.0003
BOUNDS = (4, 16, 64)


def run(quick: bool = False, seeds: int | None = None, bounds: Sequence[int] = BOUNDS) -> Report:
    """The figures of this page alone."""
    seeds = seeds or (1 if quick else 3)
    report = new_report("hybrid_auc", {"model": "DLRM", "staleness": list(bounds), "seeds": seeds, "quick": quick})
    measure(report, quick, seeds, bounds)
    return report


def measure(report: Report, quick: bool, seeds: int, bounds: Sequence[int] = BOUNDS) -> None:
    """Adds `hybrid.auc_gap`, the largest of all, and each log's and bound's own, as it is and in the worst case."""
    with tempfile.TemporaryDirectory(prefix="hotrow-hybrid-auc-") as folder:
        workloads = [demo_log(Path(folder), quick)]
        criteo = criteo_log(Path(folder), quick)
        if isinstance(criteo, Workload):
            workloads.append(criteo)
        else:
            missing(report, "hybrid.auc_gap.criteo", criteo)
        kinds = [(0, False), *((k, worst) for k in bounds for worst in (False, True))]
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), fresh) as pool:
            under_way = {
                (w.name, kind, seed): pool.submit(trained, _settings(w, Path(folder), seed, *kind))
                for w in workloads
                for kind in kinds
                for seed in range(seeds)
            }
            done = {at: future.result() for at, future in under_way.items()}
    gaps: dict[str, float] = {}
    for w in workloads:
        plain = [done[w.name, (0, False), seed] for seed in range(seeds)]
        for k, worst in kinds[1:]:
            stale = [done[w.name, (k, worst), seed] for seed in range(seeds)]
            gap = _tell(report, f"hybrid.auc_{'worst' if worst else 'gap'}.{w.name}.{k}", plain, stale, worst)
            gaps |= {} if worst else {f"{w.name}.{k}": gap}
    most = max(gaps, key=lambda name: gaps[name])
    note = f"{most}, the largest of {len(gaps)}"
    add(report, "hybrid.auc_gap", gaps[most], "", must=MUST, aim=AIM, better="lower", note=note)


def trained(settings: Mapping[str, Any]) -> tuple[float, float]:
    """The AUC of a run on its test split, and how many updates a row missed on average."""
    run = parse(Run, dict(settings))
    auc = train(run).metrics["auc"]
    lines = [line for line in RunFolder(run.output.folder).lines() if line["kind"] == "staleness"]
    rows = sum(sum(line["rows"]) for line in lines)
    return auc, sum(line["rows_mean"] * sum(line["rows"]) for line in lines) / max(rows, 1)


def _settings(workload: Workload, folder: Path, seed: int, staleness: int, worst: bool) -> dict[str, Any]:
    found = settings(workload, folder / f"{workload.name}-{staleness}-{worst}-{seed}", seed, None)
    return {**found, "policy": {"name": "hybrid", "staleness": staleness, "worst": worst}}


def _tell(
    report: Report, id: str, plain: Sequence[tuple[float, float]], stale: Sequence[tuple[float, float]], worst: bool
) -> float:
    differences = [b - a for (a, _), (b, _) in zip(plain, stale, strict=True)]
    mean = statistics.mean(differences)
    error = round(statistics.stdev(differences) / len(differences) ** 0.5, 6) if len(differences) > 1 else None
    add(
        report,
        id,
        abs(mean),
        "",
        must=None if worst else MUST,
        aim=None if worst else AIM,
        better="lower",
        ours={
            "auc": round(statistics.mean(auc for auc, _ in stale), 6),
            "difference": round(mean, 6),
            "standard_error": error,
            "updates_missed": round(statistics.mean(missed for _, missed in stale), 3),
        },
        baseline={"auc": round(statistics.mean(auc for auc, _ in plain), 6)},
    )
    return abs(mean)
