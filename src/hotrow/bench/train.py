"""`hotrow bench train`: `hotrow train` on two CPU cores, against plain PyTorch and against a loop of one's own.

The run is that of `hotrow demo` on the demo's log: files are read and shuffled, losses and metrics logged, checkpoints
cut; only evaluations are outside the clock. Each side is a process of its own, held to the same two cores, and sides
take turns. A figure is the ratio of medians over all rounds.

    train.cpu.vs_torch   the run / a plain PyTorch loop on tensors in memory with numbered keys, at its best number of
                         threads (`train_torch.py`)
    train.own_loop       the run as a user's own loop (`train_sides.own_steps`) / the run
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hotrow.bench import train_torch
from hotrow.bench.rate import Measured, elsewhere, speeds
from hotrow.bench.report import Report, add, missing, new_report
from hotrow.bench.train_sides import PLAIN, SIDES
from hotrow.data import prepare
from hotrow.data.synth import SynthSettings, write_log
from hotrow.demo import RUN_FILE
from hotrow.run import load_run

CORES = 2
PEERS = ("torch1", "torch2")


class Size(NamedTuple):
    """Samples of the log, rounds of turns, and the steps that do not count."""

    samples: int
    rounds: int
    warm: int


FULL = Size(samples=1_500_000, rounds=5, warm=50)
QUICK = Size(samples=60_000, rounds=1, warm=10)


def run(quick: bool = False) -> Report:
    """Both figures; `quick` trains on a small log, once."""
    size = QUICK if quick else FULL
    report = new_report("train", _workload(size), ("pyarrow",))
    if not hasattr(os, "sched_setaffinity"):
        for id in ("train.cpu.vs_torch", "train.own_loop"):
            missing(report, id, "this system does not hold a process to some of its cores")
        return report
    with TemporaryDirectory(prefix="hotrow-bench-") as name, two_cores():
        file = ready(Path(name), size.samples)
        _add(report, turns(file, size))
    return report


def _workload(size: Size) -> dict[str, Any]:
    return {
        "run": "the demo's (DLRM, batches of 1024)",
        "log": f"the demo's, {size.samples:,} samples",
        "cores": CORES,
        "rounds": size.rounds,
        "left_out": f"the first {size.warm} steps, and evaluations",
    }


def ready(folder: Path, samples: int) -> Path:
    """Log, data set, the peer's numbered keys, and the run file, which is the demo's."""
    write_log(SynthSettings(samples=samples), folder / "log")
    data = prepare(folder / "log", folder / "data")
    file = folder / "run.toml"
    file.write_text(RUN_FILE)
    train_torch.number(data, load_run(file).data.train, folder / PLAIN)
    return file


@contextmanager
def two_cores() -> Iterator[None]:
    """Holds this process, and so those that it starts, to two of its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def turns(file: Path, size: Size) -> dict[str, list[Measured]]:
    """What each side did in each round."""
    found: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for _ in range(size.rounds):
        for side, measured in found.items():
            measured.append(one(side, file, size.warm))
    return found


def one(side: str, file: Path, warm: int) -> Measured:
    """One training of a side."""
    return elsewhere("hotrow.bench.train_sides", side, file, warm)


def _add(report: Report, found: Mapping[str, Sequence[Measured]]) -> None:
    read = {side: speeds(measured) for side, measured in found.items()}
    best = max(PEERS, key=lambda side: read[side]["samples_a_second"])
    peers = "; ".join(f"{side.removeprefix('torch')} threads {read[side]['samples_a_second']:,}" for side in PEERS)
    ours = read["trainer"]["samples_a_second"]
    add(
        report,
        "train.cpu.vs_torch",
        ours / read[best]["samples_a_second"],
        "x",
        must=1.5,
        aim=2.5,
        ours=read["trainer"],
        baseline={"threads": int(best.removeprefix("torch")), **read[best]},
        note=f"{ours:,} samples a second; plain PyTorch with {peers}",
    )
    add(
        report,
        "train.own_loop",
        read["own"]["samples_a_second"] / ours,
        "x",
        must=0.95,
        aim=1.0,
        ours=read["own"],
        baseline=read["trainer"],
        note="a module and a loop of the user's, which logs its loss and cuts no checkpoint / the run itself",
    )
