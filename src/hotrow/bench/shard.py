"""`hotrow bench shard`: rows over ranks, placed for the network there is, against row-wise and against TorchRec.

Two hosts with two ranks each, real processes in network namespaces; the link between hosts has a tenth of the rate of
each host's loopback. Ranks measure the links, plan for what they found, and take turns at

- row-wise: every lookup asks the owner of its row, as row-wise sharding of sequences is published and built elsewhere,
- rank dedup: the same with each key of a rank once, the honest baseline,
- ours: what the planner chose with a budget for copies; also in row-wise's own memory, and in 16 bits on the wire,
- copies: the hottest rows on every rank and every node whether that pays or not, to see what copies are worth.

Bytes are those the kernel counts on the hosts' links, headers and all. An exchange's time runs from the moment when the
last rank has come to it until the last has ended it: what ranks wait for another's work is not communication.
Predictions are made before anything runs, from the law or the profile and the measured links, not from the batches.

Samples a second are those of whole training steps against TorchRec's EmbeddingCollection with the same light model.
Also: planning 1,000 tables of 10^6 rows, and a simulated cluster of 16 hosts with 8 devices each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from hotrow.bench import real_logs
from hotrow.bench.hosts import Hosts, unavailable
from hotrow.bench.report import Report, add, missing, new_report, reading
from hotrow.bench.shard_plan import simulate_large
from hotrow.bench.shard_work import Work
from hotrow.data import prepare
from hotrow.errors import HotrowError

NODES, RANKS = 2, 2
LINK, INSIDE = 1e9, 10e9  # bits a second
BUDGET = 16 << 20
LOGS = ("globo", "diginetica")

Found = list[dict[str, Any]]
"""What each rank read."""


class Size(NamedTuple):
    """How much is measured: a step, turns and steps of each side, samples of real logs."""

    work: Work
    turns: tuple[int, int]
    training: tuple[int, int]
    log_samples: int
    log_batch: int
    copies: tuple[int, int]
    seconds: float
    """That the ranks may take."""


FULL = Size(
    Work(tables=2, rows=100_000, dim=64, batch=1024, length=200, zipf=1.05),
    turns=(4, 3),
    training=(5, 2),
    log_samples=200_000,
    log_batch=8192,
    copies=(1024, 8192),
    seconds=900,
)
QUICK = Size(
    Work(tables=2, rows=10_000, dim=64, batch=256, length=100, zipf=1.05),
    turns=(1, 2),
    training=(1, 1),
    log_samples=0,
    log_batch=0,
    copies=(256, 2048),
    seconds=300,
)


def run(quick: bool = False) -> Report:
    """All figures; `quick` measures smaller steps, and less of everything."""
    size = QUICK if quick else FULL
    workload = {
        **size.work.told(),
        "model": "sequence features, a learned weight for each row of a history, MLP of 64",
        "optimizer": "row-wise Adagrad",
        "hosts": f"{NODES} x {RANKS} ranks, {LINK / 1e9:g} Gbit/s between hosts, {INSIDE / 1e9:g} within",
        "budget": f"{BUDGET >> 20} MiB a rank for copies",
    }
    report = new_report("shard", workload, ("torchrec", "fbgemm-gpu-cpu"))
    ids = ("bytes_saved", "bytes_saved_dedup", "comm", "bytes_error", "time_error", "memory", "vs_torchrec")
    if reason := unavailable():
        for id in ids:
            missing(report, f"shard.{id}", reason)
    else:
        with TemporaryDirectory(prefix="hotrow-bench-") as folder:
            found = _on_hosts(report, size, Path(folder))
        _bytes(report, "shard", _sides(found, "zipf"), musts=True)
        for log in found[0]["logs"]:
            _bytes(report, f"shard.{log}", _sides(found, log), musts=False)
        _errors(report, found)
        _memory(report, _sides(found, "zipf"))
        _training(report, found, size.work)
    _planning(report, quick)
    _simulated(report, quick)
    return report


def _on_hosts(report: Report, size: Size, folder: Path) -> Found:
    """Runs the ranks and gives what each of them read."""
    peer = find_spec("torchrec") is not None
    job = {
        "work": size.work.told(),
        "budget": BUDGET,
        "turns": size.turns[0],
        "steps": size.turns[1],
        "train_turns": size.training[0],
        "train_steps": size.training[1],
        "torchrec": peer,
        "replicated": size.copies[0],
        "node": size.copies[1],
        "logs": _logs(report, size, folder),
        "log_batch": size.log_batch,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return on_hosts(folder, size.seconds)


def on_hosts(folder: Path, seconds: float) -> Found:
    """What the ranks read that do `job.json` of a folder, each a process on one of the hosts."""
    out = [folder / f"{rank}.json" for rank in range(NODES * RANKS)]
    with Hosts(NODES, link=LINK, inside=INSIDE) as hosts:
        processes = []
        for rank, file in enumerate(out):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(NODES * RANKS),
                "LOCAL_RANK": str(rank % RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": hosts.address(0),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "TORCH_LOGS": "-all",
            }
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "hotrow.bench.shard_rank",
                str(folder / "job.json"),
                str(file),
            ]
            with (folder / f"{rank}.err").open("wb") as err:
                processes.append(hosts.start(rank // RANKS, command, environment, stderr=err))
        for rank, process in enumerate(processes):
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise HotrowError(f"Rank {rank} was not done after {seconds:.0f} seconds.") from None
            if code:
                said = (folder / f"{rank}.err").read_text().strip().splitlines() or ["nothing"]
                raise HotrowError(f"Rank {rank} ended with {code}; it said: {said[-1]}")
    return [json.loads(file.read_text()) for file in out]


def _logs(report: Report, size: Size, folder: Path) -> dict[str, str]:
    """Prepared data sets of the real logs there are."""
    prepared = {}
    for name in LOGS:
        found = real_logs.find(name, size.log_samples) if size.log_samples else "left out by --quick"
        if isinstance(found, str):
            missing(report, f"shard.{name}.bytes_saved", found)
            continue
        pq.write_table(found.rows, folder / f"{name}.parquet")
        made = prepare(folder / f"{name}.parquet", folder / name, schema=found.schema, split="none")
        prepared[name] = str(made.path)
    return prepared


class Side(NamedTuple):
    """One side of an exchange, all ranks together: a step's bytes over the slow link, seconds, predictions."""

    bytes: float
    seconds: list[float]
    calls: list[float]
    held: int
    expected: dict[str, Any]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def told(self) -> dict[str, Any]:
        """The readings behind a figure."""
        return {
            "mb_between_hosts_a_step": round(self.bytes / 1e6, 3),
            "exchange": reading(self.seconds),
            "fetch_and_update": reading(self.calls),
            "mb_held_by_the_fullest_rank": round(self.held / 1e6, 3),
            "expected_mb": round(self.expected["between"] / 1e6, 3),
            "expected_ms": round(self.expected["seconds"] * 1e3, 2),
            "dedup": self.expected["dedup"],
            "copies": self.expected["copies"],
        }


def _part(rank: Mapping[str, Any], part: str) -> dict[str, Any]:
    """What a rank read of a part: "zipf", or a log."""
    found: dict[str, Any] = rank["zipf"] if part == "zipf" else rank["logs"][part]
    return found


def _sides(found: Found, part: str) -> dict[str, Side]:
    """The sides of a part, of all ranks together."""
    ranks = [_part(rank, part)["sides"] for rank in found]
    out = {}
    for name in ranks[0]:
        read = [rank[name] for rank in ranks]
        steps = range(read[0]["steps"])
        out[name] = Side(
            sum(r["bytes"] for r in read) / len(steps),
            [exchange_seconds([r["exchanges"][step] for r in read]) for step in steps],
            [max(r["calls"][step] for r in read) for step in steps],
            max(r["held"] for r in read),
            read[0]["expected"],
        )
    return out


def exchange_seconds(ranks: Sequence[Sequence[tuple[float, float]]]) -> float:
    """What a step's exchanges took: each from when the last rank had come to it until the last one had ended it.

    Each rank gives when it began and ended each of them; all go by one clock, that of the machine.
    """
    each = zip(*ranks, strict=True)
    return float(sum(max(end for _, end in times) - max(begin for begin, _ in times) for times in each))


def _bytes(report: Report, prefix: str, sides: Mapping[str, Side], *, musts: bool) -> None:
    """What the plan saves of the slow link's bytes and of the time of exchanges."""
    every, rank = sides["row-wise"], sides["rank dedup"]
    for name, id in (("ours", ""), ("same memory", "_same_memory"), ("ours, bfloat16", "_bf16"), ("copies", "_copies")):
        ours, held_to = sides[name], musts and name in ("ours", "same memory")
        told: dict[str, Any] = {"ours": ours.told(), "baseline": every.told()}
        must, aim = (0.85, 0.95) if held_to else (None, None)
        add(report, f"{prefix}.bytes_saved{id}", 1 - ours.bytes / every.bytes, "", must=must, aim=aim, **told)
        must, aim = (6.0, 10.0) if held_to else (None, None)
        add(report, f"{prefix}.comm{id}", every.median / ours.median, "x", must=must, aim=aim, **told)
    ours = sides["ours"]
    told = {"ours": ours.told(), "baseline": rank.told()}
    aim = 0.5 if musts else None
    add(report, f"{prefix}.bytes_saved_dedup", 1 - ours.bytes / rank.bytes, "", aim=aim, **told)
    add(report, f"{prefix}.comm_dedup", rank.median / ours.median, "x", **told)


def _errors(report: Report, found: Found) -> None:
    """The worst prediction of any side, of bytes and of time."""
    parts = {part: _sides(found, part) for part in ("zipf", *found[0]["logs"])}
    every = {f"{part}, {name}": side for part, sides in parts.items() for name, side in sides.items()}
    off = {name: side.expected["between"] / side.bytes - 1 for name, side in every.items()}
    late = {name: side.expected["seconds"] / side.median - 1 for name, side in every.items()}
    links = {part: _links_text(_part(found[0], part)["topology"]) for part in parts}
    for id, errors, must, aim in (("bytes_error", off, 0.05, 0.02), ("time_error", late, 0.25, 0.1)):
        worst = max(errors, key=lambda name: abs(errors[name]))
        each = {name: round(error, 4) for name, error in errors.items()}
        add(
            report,
            f"shard.{id}",
            abs(errors[worst]),
            "",
            must=must,
            aim=aim,
            better="lower",
            ours={"predicted / measured - 1": each, "links": links},
            note=f"{worst}, the worst of {len(errors)}",
        )


def _links_text(topology: Mapping[str, Any]) -> str:
    """Bandwidth and latency of each link."""
    links = {name: topology[name] for name in ("between", "within", "rail")}
    each = (f"{name} {link['bandwidth'] / 1e6:.0f} MB/s {link['latency'] * 1e3:.1f} ms" for name, link in links.items())
    return ", ".join(each)


def _memory(report: Report, sides: Mapping[str, Side]) -> None:
    """Bytes that the fullest rank holds more than with row-wise."""
    every = sides["row-wise"]
    for name, id, most in (("ours", "shard.memory", BUDGET), ("same memory", "shard.memory_same", 0)):
        more = sides[name].held - every.held
        add(
            report, id, more, "bytes", must=most, better="lower", ours=sides[name].told(), baseline=every.told(),
            note="of the fullest rank, beside what row-wise takes",
        )  # fmt: skip


def _training(report: Report, found: Found, work: Work) -> None:
    """Samples a second of whole steps."""
    speed: dict[str, dict[str, Any]] = {}
    for name in found[0]["train"]:
        read = [rank["train"][name] for rank in found]
        steps = range(read[0]["steps"])
        taken = [max(r["calls"][step] for r in read) for step in steps]
        speed[name] = {
            "samples_a_second": work.batch * NODES * RANKS / statistics.median(taken),
            **reading(taken),
            "mb_between_hosts_a_step": round(sum(r["bytes"] for r in read) / len(steps) / 1e6, 2),
        }
    ours = speed.pop("ours")
    if not speed:
        missing(report, "shard.vs_torchrec", "torchrec is not installed (make peers installs it)")
        return
    best = max(speed, key=lambda name: speed[name]["samples_a_second"])
    ratio = ours["samples_a_second"] / speed[best]["samples_a_second"]
    add(report, "shard.vs_torchrec", ratio, "x", must=1.0, aim=2.0, ours=ours, baseline=speed, note=f"the best: {best}")


def _planning(report: Report, quick: bool) -> None:
    """1,000 tables of 10^6 rows, in a process of its own for its peak of memory."""
    if quick:
        missing(report, "shard.plan_s", "left out by --quick")
        return
    code = "import json; from hotrow.bench.shard_plan import plan_large; print(json.dumps(plan_large()))"
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    planned = json.loads(said)
    add(report, "shard.plan_s", planned["seconds"], "s", must=60, aim=10, better="lower", ours=planned)
    gib = planned["peak_bytes"] / 2**30
    add(report, "shard.plan_gib", gib, "GiB", must=4, better="lower", ours=planned)


def _simulated(report: Report, quick: bool) -> None:
    """The table of plans for 16 hosts x 8 devices."""
    found = simulate_large(quick)
    rows = {row["name"]: row for row in found["compare"]}
    ours, every, rank = rows["this plan"], rows["row-wise"], rows["rank dedup"]
    note = f"simulated, {found['keys']}, {found['lookups']:,.0f} lookups a rank and step; 16 x 8, NVLink and 100 Gbit/s"
    add(report, "shard.16x8.bytes_saved", ours["saved"], "", ours=ours, baseline=rows, note=note)
    saved = 1 - ours["between"] / rank["between"]
    add(report, "shard.16x8.bytes_saved_dedup", saved, "", ours=ours, baseline=rank)
    add(report, "shard.16x8.comm", every["seconds"] / ours["seconds"], "x", ours=ours, baseline=every)
