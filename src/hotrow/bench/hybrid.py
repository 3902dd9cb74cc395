"""`hotrow bench hybrid`: two trainers and two shards under `Sync`, `Exact` and `Hybrid`, over a slow link.

Shards are on hosts of their own (`hosts.py`), both trainers on a third, as those of one node; dense gradients stay in
it. A host's link is a token bucket of `LINK` bits a second each way, as clouds limit rates: 256 KiB may go at once, and
the queue at both ends holds 256 KiB. Bursts overflow it, those of `Sync` most. With a queue of 16 MiB nothing is lost:
`vs_sync.deep_queue`, beside it, says what overlapping alone is worth. All hosts share this machine's cores, so the link
is slow in proportion: rows of a step take somewhat longer on it than the model does. DLRM, dim 64, 1,024 samples a
trainer, keys drawn from 26 tables with Criteo's published cardinalities by Zipf's law (as in `bench hot`). Trainers are
`hotrow.Trainer` with a run that differs in its policy only: files are read, losses and metrics logged. Policies take
turns in the same processes; a figure is a ratio of medians over rounds.

    hybrid.vs_sync, exact_vs_sync   samples a second
    hybrid.flat                     the same model on key spaces of 6.25 to 100 trillion parameters. The key space is
                                    nominal: keys are drawn from all of it, but each shard keeps a bounded number of
                                    rows and evicts others. Memory is that of the shards' processes
    hybrid.auc_gap                  `hybrid_auc.py`
    hybrid.recovery_s, lost, twice  `hybrid_failures.py`
    hybrid.vs_persia                `hybrid_persia.py`; needs Persia's package, which HOTROW_PERSIA names
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.bench import hybrid_auc, hybrid_failures, hybrid_persia
from hotrow.bench.drawn import drawn_log
from hotrow.bench.hosts import Hosts, hear, shards_on, tell, unavailable
from hotrow.bench.hot import CARDINALITIES, Draws, keys_of
from hotrow.bench.hybrid_worker import PolicyName, Turn, Work
from hotrow.bench.report import Report, add, missing, new_report
from hotrow.service.local import ShardProcess

TRAINERS, SHARDS, DIM, BATCH, DEEP = 2, 2, 64, 1024, [512, 256]
LINK, QUEUE, DEEP_QUEUE = 2.5e8, 256 << 10, 16 << 20
POLICIES: tuple[PolicyName, ...] = ("sync", "hybrid", "exact")
NOMINAL = {"6.25T": 6.25e12, "25T": 25e12, "100T": 100e12}
FLAT_TABLES, CAPACITY = 8, 20_000
_PATIENCE_S = 120.0


def run(quick: bool = False) -> Report:
    """Takes every figure that this machine can."""
    report = new_report(
        "hybrid",
        {
            "trainers": TRAINERS,
            "shards": SHARDS,
            "model": "DLRM",
            "dim": DIM,
            "batch": BATCH,
            "link_bits_a_second": LINK,
            "rows": sum(CARDINALITIES),
            "quick": quick,
        },
    )
    if reason := unavailable():
        for id in ("hybrid.vs_sync", "hybrid.exact_vs_sync", "hybrid.flat"):
            missing(report, id, f"it needs hosts of its own: {reason}")
    else:
        with tempfile.TemporaryDirectory(prefix="hotrow-hybrid-") as folder:
            _speed(report, Path(folder), quick)
            if not quick:
                _speed(report, Path(folder), quick, DEEP_QUEUE, ".deep_queue")
            _flat(report, Path(folder), quick)
    hybrid_failures.measure(report, quick)
    if quick:
        missing(report, "hybrid.auc_gap", "it takes many runs: `hotrow bench hybrid` without --quick has it")
    else:
        hybrid_auc.measure(report, quick, seeds=3)
    hybrid_persia.measure(report, quick)
    return report


def _speed(report: Report, folder: Path, quick: bool, queue: int = QUEUE, suffix: str = "") -> None:
    """Figures of the link that is asked for have what they must be; of another they are only reported."""
    warm, steps, rounds = (6, 15, 1) if quick else (10, 40, 5)
    data = _criteo_log(folder, warm + steps)
    with _cluster(folder, queue) as (hosts, shards, key):
        addresses = [shard.address for shard in shards]
        # The first turn wakes everybody up, and does not count.
        order: list[PolicyName] = ["hybrid", *(policy for _ in range(rounds) for policy in POLICIES)]
        turns = [Turn(policy, addresses, data, DIM, DEEP, BATCH, warm, steps) for policy in order]
        said = [took for _, took in _take_turns(hosts, key, turns)][1:]
    found = {
        policy: [took for name, took in zip(order[1:], said, strict=True) if name == policy] for policy in POLICIES
    }
    rates = {p: statistics.median(took["samples_a_second"] for took in of_p) for p, of_p in found.items()}
    figures: list[tuple[PolicyName, str, float, float]] = [
        ("hybrid", "vs_sync", 2.6, 3.5),
        ("exact", "exact_vs_sync", 2.0, 3.0),
    ]
    for policy, id, must, aim in figures:
        sides: dict[str, Any] = {"ours": _shown(rates, found, policy), "baseline": _shown(rates, found, "sync")}
        wanted: dict[str, Any] = {} if suffix else {"must": must, "aim": aim}
        note = f"a queue of {queue >> 10} KiB at each end of a link"
        add(report, f"hybrid.{id}{suffix}", rates[policy] / rates["sync"], "x", note=note, **wanted, **sides)


def _shown(
    rates: Mapping[PolicyName, float], found: Mapping[PolicyName, list[dict[str, Any]]], policy: PolicyName
) -> dict[str, Any]:
    last = found[policy][-1]
    return {
        "samples_a_second": round(rates[policy]),
        "all": [round(took["samples_a_second"]) for took in found[policy]],
        "bytes_in_a_step": round(last["bytes_in"]),
        "bytes_out_a_step": round(last["bytes_out"]),
        "cpu_ms_a_step": round(last["cpu_ms"], 1),
        "phases_ms_a_step": last["phases_ms"],
    }


def _flat(report: Report, folder: Path, quick: bool) -> None:
    warm, steps, rounds = (30, 15, 1) if quick else (60, 60, 3)
    names = ("6.25T", "100T") if quick else tuple(NOMINAL)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            data = _wide_log(folder, int(NOMINAL[name] / DIM), warm + steps, number)
            with _cluster(folder) as (hosts, shards, key):
                addresses, room = [shard.address for shard in shards], CAPACITY // FLAT_TABLES
                turn = Turn("hybrid", addresses, data, DIM, DEEP, BATCH, warm, steps, room)
                for _, took in _take_turns(hosts, key, [turn]):
                    held = sum(_resident(shard.process.pid) for shard in shards)
                    found[name].append((took["samples_a_second"], held))
    rates = {name: statistics.median(rate for rate, _ in of_name) for name, of_name in found.items()}
    memory = {name: statistics.median(held for _, held in of_name) for name, of_name in found.items()}
    said = {
        "samples_a_second": {name: round(rate) for name, rate in rates.items()},
        "shards_memory_mib": {name: round(held / 2**20, 1) for name, held in memory.items()},
        "resident_rows": CAPACITY * SHARDS,
    }
    spread = max(rates.values()) / min(rates.values()) - 1
    note = "the key space is nominal: rows are kept up to a capacity, others evicted"
    add(report, "hybrid.flat", spread, "of samples/s", must=0.10, aim=0.05, better="lower", ours=said, note=note)
    growth = max(memory.values()) / min(memory.values()) - 1
    add(report, "hybrid.flat_memory", growth, "of memory", better="lower", ours=said, note=note)


@contextmanager
def _cluster(folder: Path, queue: int = QUEUE) -> Iterator[tuple[Hosts, list[ShardProcess], Path]]:
    """Hosts with a shard on each of the first ones, and the key that trainers need."""
    with (
        Hosts(SHARDS + 1, link=LINK, queue=queue, burst=QUEUE) as hosts,
        shards_on(hosts, range(SHARDS), folder) as (shards, key),
    ):
        yield hosts, shards, key


def _take_turns(hosts: Hosts, key: Path, turns: Sequence[Turn]) -> Iterator[tuple[Turn, dict[str, Any]]]:
    """Has the trainers take every turn; each with what the first of them measured."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "WORLD_SIZE": str(TRAINERS)}
    shared = {**meeting, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = Work(str(key), list(turns)).command()
    trainers = []
    for rank in range(TRAINERS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(TRAINERS)}
        trainers.append(hosts.start(SHARDS, command, {**shared, **own}, **pipes))
    for turn in turns:
        hear(trainers)
        tell(trainers)
        first, *_ = hear(trainers)
        yield turn, json.loads(first)
    for trainer in trainers:
        trainer.wait(_PATIENCE_S)


def _criteo_log(folder: Path, steps: int) -> str:
    """Samples for so many steps of all trainers."""
    keys = Draws(seed=200).keys(steps * TRAINERS, BATCH)
    return str(drawn_log(folder, "criteo", keys.reshape(-1, keys.shape[2])).path)


def _wide_log(folder: Path, rows: int, steps: int, seed: int) -> str:
    """Keys out of so many rows in all, by Zipf's law with exponent 1: the number of a row is log-uniform."""
    draw = np.random.default_rng(seed)
    chances = draw.random((steps * TRAINERS * BATCH, FLAT_TABLES))
    numbers = np.exp(chances * np.log(rows // FLAT_TABLES)).astype(np.int64)
    return str(drawn_log(folder, "wide", keys_of(numbers)).path)


def _resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
