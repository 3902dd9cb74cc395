"""`hotrow bench cache`: rows on a shard, with and without a cache in front of them, over a link of 1 or 10 Gbit/s.

One shard and four workers, each a process on a host of its own (`hosts.py`), dim 128, batch 128 a worker, row-wise
Adagrad; workers are ranks of a run by `hotrow.Trainer`, which reads a data set and logs. Before anything counts, over a
fast link, every row gets the clock that a run as long as Criteo's log leaves it with, and caches the most probable
tenth: what such a run leaves on the shard and in a cache. Bytes are those of the shard's link, both ways, from the
kernel's counters; workers' dense gradients go over other links. The time of the exchange is what workers spend in
requests to the shard, wherever they do it; with a cache most of it runs ahead of the step that needs it. What is
written back at the end of a run is told apart. Without a cache the same run, under `sync`, asks the shard for every
batch's rows and pushes their gradients, which the shard applies when it has those of all workers: waiting for each
other is a part of that exchange. Both send unique keys only. Hosts share the machine's cores: with fewer than five,
processes wait for each other, and that counts.

    wide_deep, deepfm, dcnv2   26 tables of a 16th of Criteo's published cardinalities (2.1M rows), keys drawn by
                               Zipf's law fitted to its sample (as in `bench hot`); a cache of 10% of the rows
    graph                      GraphSAGE on neighbours in a graph of users and items; a cache of 10% of them

AUC, hit rates by size and policy: `hotrow bench cache_auc`. The shard's own rate: `shard_rate.py`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow.bench import shard_rate
from hotrow.bench.cache_worker import Work
from hotrow.bench.drawn import drawn_log
from hotrow.bench.hosts import Hosts, hear, shards_on, tell, unavailable
from hotrow.bench.hot import CARDINALITIES, Draws, keys_of
from hotrow.bench.report import Report, add, missing, new_report
from hotrow.data import prepare
from hotrow.data.graph import Graph
from hotrow.data.synth import SynthSettings, write_log
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.cached import Cache

Ints = npt.NDArray[np.int64]

WORKERS, DIM, BATCH, SHARE, CLOCK = 4, 128, 128, 0.10, 100
FILLING = 20e9  # bits a second while caches are filled
BEFORE = 45_840_617  # samples of the run before: those of Criteo's log
SCALE = 16  # tables are so many times smaller than Criteo's
SIZES = tuple(max(rows // SCALE, min(rows, 1000)) for rows in CARDINALITIES)
ROWS = sum(SIZES)
CTR: dict[str, dict[str, Any]] = {
    "wide_deep": {"name": "wide_deep", "deep": [64]},
    "deepfm": {"name": "deepfm", "deep": [64]},
    "dcnv2": {"name": "dcnv2", "deep": [64], "layers": 1, "rank": 16},
}
GRAPH: dict[str, Any] = {"name": "graph", "width": 32, "deep": [32]}
IDS = ("cache.bytes_saved", "cache.exchange_1g", "cache.exchange_10g", "cache.violations")


class Job(NamedTuple):
    """What is trained on, and what each worker fills the shard and its cache with before."""

    model: dict[str, Any]
    fills: list[Path]
    data: Path
    data_steps: list[dict[str, Any]]
    rows: int


class Measured(NamedTuple):
    """One run, after warm-up: bytes over the shard's link and seconds of exchange, both a step; what workers said."""

    bytes: float
    exchange_s: float
    samples_s: float
    said: list[dict[str, Any]]
    violations: int
    last_bytes: int


def run(quick: bool = False) -> Report:
    """Takes every figure that this machine can."""
    report = new_report(
        "cache",
        {
            "workers": WORKERS,
            "shards": 1,
            "dim": DIM,
            "batch": BATCH,
            "cache": f"{SHARE:.0%} of the rows, LFU, clock {CLOCK}, drift {Cache().drift:g}",
            "rows": ROWS,
            "quick": quick,
        },
    )
    if reason := unavailable():
        for id in IDS:
            missing(report, id, reason)
    else:
        with tempfile.TemporaryDirectory(prefix="hotrow-cache-") as folder:
            _measure(report, Path(folder), quick)
    missing(report, "cache.auc_gap", "hotrow bench cache_auc gives it")
    shard_rate.measure(report, 2 if quick else 6)
    return report


def _measure(report: Report, folder: Path, quick: bool) -> None:
    warm, steps, plain_steps = (20, 60, 8) if quick else (150, 300, 20)
    models = ["wide_deep", "graph"] if quick else [*CTR, "graph"]
    data, fills = _draw(folder, warm + steps)
    jobs = {name: Job(CTR[name], fills, data, [], ROWS) for name in models if name in CTR}
    jobs["graph"] = _graph(folder, quick)
    saved, faster, broken = {}, {}, 0
    rates = {"1g": 1e9} if quick else {"1g": 1e9, "10g": 1e10}
    for name, job in jobs.items():
        for label, rate in rates.items():
            if label == "10g" and name != "wide_deep":
                continue
            plain = _run(job, rate, None, 2, plain_steps, folder)
            cache = {"capacity": int(job.rows * SHARE), "policy": "lfu"}
            cached = _run(job, rate, cache, warm, steps, folder)
            broken += cached.violations
            sides: dict[str, Any] = {"ours": _said(cached), "baseline": _said(plain)}
            if label == "1g":
                saved[name] = 1 - cached.bytes / plain.bytes
                add(report, f"cache.bytes_saved.{name}", saved[name], "of bytes", **sides)
            faster[f"{name}.{label}"] = plain.exchange_s / cached.exchange_s
            add(report, f"cache.exchange_{label}.{name}", faster[f"{name}.{label}"], "x", **sides)
    worst = min(saved, key=lambda name: saved[name])
    add(report, "cache.bytes_saved", saved[worst], "of bytes", must=0.88, aim=0.93, note=f"{worst}, the lowest")
    slow = {name: value for name, value in faster.items() if name.endswith("1g")}
    lowest = min(slow, key=lambda name: slow[name])
    add(report, "cache.exchange_1g", slow[lowest], "x", must=8.2, aim=15.0, note=f"{lowest}, the lowest")
    add(report, "cache.violations", broken, "", must=0, aim=0, better="lower", note="of one row in 16, all runs")


def _run(job: Job, rate: float, cache: Mapping[str, Any] | None, warm: int, steps: int, folder: Path) -> Measured:
    with Hosts(WORKERS + 1, link=FILLING) as hosts, shards_on(hosts, [0], folder) as ([shard], key):
        workers, checked = [], []
        meeting = {"MASTER_ADDR": hosts.address(1), "MASTER_PORT": "29555"}
        ranks = {**meeting, "WORLD_SIZE": str(WORKERS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for rank in range(WORKERS):
            checked.append(folder / f"checked-{rank}.npz")
            work = Work(
                shard=shard.address,
                key=str(key),
                batch=BATCH,
                data=str(job.data),
                data_steps=job.data_steps,
                model=job.model,
                dim=DIM,
                fill=str(job.fills[rank]) if cache is not None else "",
                warm=warm,
                steps=steps,
                cache=None if cache is None else dict(cache),
                clock=CLOCK,
                checked="" if cache is None else str(checked[-1]),
            )
            env = {
                **ranks,
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers.append(hosts.start(rank + 1, work.command(), env, **pipes))
        hear(workers)
        hosts.shape(rate)
        before = hosts.bytes(0)
        tell(workers)
        said = [json.loads(line) for line in hear(workers)]
        after = hosts.bytes(0)
        tell(workers)
        for worker in workers:
            worker.wait(timeout=120)
        last = sum(hosts.bytes(0)) - sum(after)
    violations = 0 if cache is None else Checker.load(checked, CLOCK).violations()
    moved = after.sent - before.sent + after.received - before.received
    seconds = sum(one["exchange_s"] for one in said) / WORKERS / steps
    rate_of = WORKERS * BATCH * steps / max(one["seconds"] for one in said)
    return Measured(moved / steps, seconds, rate_of, said, violations, last)


def _said(measured: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bytes_a_step": round(measured.bytes),
        "exchange_ms_a_step": round(measured.exchange_s * 1e3, 2),
        "samples_a_second": round(measured.samples_s),
    }
    counters = [one["counters"] for one in measured.said]
    if all("hits" in counted for counted in counters):
        hits, misses = (sum(counted.get(name, 0) for counted in counters) for name in ("hits", "misses"))
        found["hit_share"] = round(hits / max(hits + misses, 1), 4)
        found["bytes_at_the_end"] = measured.last_bytes
    return found


def _draw(folder: Path, steps: int) -> tuple[Path, list[Path]]:
    """Samples for so many steps of all workers, and for each a file of keys to begin with."""
    draws = Draws(100, SIZES)
    hottest, clocks = draws.hottest(int(ROWS * SHARE)), [_clocks(chance) for chance in draws.chances()]
    keys = draws.keys(steps * WORKERS, BATCH)
    hot = {f"hot.c{t}": keys_of(numbers) for t, numbers in enumerate(hottest)}
    rows = {f"c{t}": (keys_of(np.arange(len(of))), of) for t, of in enumerate(clocks)}
    fills = [_fill(folder, rank, rows, hot) for rank in range(WORKERS)]
    return drawn_log(folder, "drawn", keys.reshape(-1, keys.shape[2])).path, fills


def _fill(folder: Path, rank: int, rows: Mapping[str, tuple[Ints, Ints]], hot: Mapping[str, Ints]) -> Path:
    """A worker's share of the keys and clocks of each table, and what it uses at first, in a file."""
    fill = dict(hot)
    for table, (keys, clocks) in rows.items():
        fill |= {f"all.{table}": keys[rank::WORKERS], f"clocks.{table}": clocks[rank::WORKERS]}
    file = folder / f"fill-{len(rows)}-{rank}.npz"
    np.savez(file, **fill)  # type: ignore[arg-type]
    return file


def _clocks(chances: npt.NDArray[np.float64]) -> Ints:
    """Updates that a row has had after the run before: the batches that used it, as far as is expected."""
    used = -np.expm1(BATCH * np.log1p(-chances))
    clocks: Ints = np.maximum(1, np.rint(BEFORE / BATCH * used)).astype(np.int64)
    return clocks


def _graph(folder: Path, quick: bool) -> Job:
    """A log of users and items, prepared, and its graph."""
    log, data, file = folder / "log", folder / "data", folder / "clicks.graph"
    write_log(SynthSettings(samples=50_000 if quick else 200_000), log)
    graph = Graph.of_data_set(prepare(log, data, validation=0, workers=1))
    graph.save(file)
    chances = [np.diff(side.begins) / (graph.edges + 1) for side in graph.sides]  # as far as the graph tells
    rows = {
        table: (side.keys, _clocks(chance))
        for table, side, chance in zip(graph.between, graph.sides, chances, strict=True)
    }
    fills = [_fill(folder, rank, rows, {}) for rank in range(WORKERS)]
    count = sum(len(side.keys) for side in graph.sides)
    return Job(GRAPH, fills, data, [{"name": "neighbours", "graph": str(file), "fan_outs": [8, 4]}], count)
