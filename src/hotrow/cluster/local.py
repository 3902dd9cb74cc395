"""`up`: shards and trainers of one run as plain processes of this machine, started, wired and started again.

    RUN/cluster/
      run.toml         the run file that trainers are given, with the shards' addresses
      state.json       who runs, where and since when, and what died: what `hotrow status` reads
      shard-0.log, trainer-0.log, ...
      shard-0/, ...    the rows of each shard, in files that outlive it

A shard that dies is started at the same address and opens its files again: what it had applied is there, and trainers
only wait. Trainers compute each step together, so when one dies all of them start again, from the last checkpoint.
Only a process that a signal ended is started again, also a shard that SIGTERM ended without an error; one that ends
with an error of its own would do so again. All are tied to the supervisor: if it is killed they end too, so that a run
that is resumed finds nobody at its files. The supervisor keeps the run folder locked, and its trainers share that
lock: a second one, or a `hotrow train` in the folder, is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hotrow.cluster.process import Command, Process
from hotrow.errors import HotrowError, SettingsError
from hotrow.run import Run
from hotrow.train.compatibility import refuse_problems
from hotrow.train.logs import RunFolder

Say = Callable[[str], None]
_START_S = 120.0
_STOP_S = 60.0
_GRACE_S = 10.0
"""Seconds until it is known who else died, when one stops with an error: others may be the reason."""


@dataclass
class Death:
    """A process that died, and how long it took until it was back."""

    who: str
    how: str
    when: float
    back_after: float | None = None


class LocalCluster:
    """A run's processes, supervised until its end."""

    elsewhere = False
    """Whether trainers may run on hosts that see other files than this one."""

    def __init__(
        self,
        run: Run,
        *,
        shards: int,
        trainers: int,
        resume: bool = False,
        overwrite: bool = False,
        deaths: int = 20,
        say: Say | None = None,
    ) -> None:
        """`deaths` is how many processes may die before the run is given up."""
        folder = RunFolder(run.output.folder)
        if folder.exists and not (resume or overwrite):
            raise SettingsError(
                f"{folder.path} already holds a run. Use --resume to go on with it, --overwrite to start afresh, or "
                f"another output.folder."
            )
        refuse_problems(run, ranks=trainers, shards=shards, elsewhere=self.elsewhere)
        self._lock = folder.lock()
        self.folder = folder.path / "cluster"
        self.run, self._shards, self._trainers, self._most = run, shards, trainers, deaths
        self._how = ["--resume"] if resume else ["--overwrite"] if overwrite else []
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._settings = folder.settings
        self._earlier = None if resume else _stamp(self._settings)
        self._ended: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._failed = False  # a trainer ended with an error, which a new start would only repeat
        self._stopping = ""
        self.shards: list[Command] = []
        self.addresses: list[str] = []
        self.metrics: list[int] = []
        self.trainers: list[Command] = []
        self.deaths: list[Death] = []
        if self.folder.is_dir():  # trainers that go on bring the checkpoint's rows, to however many shards there are
            for path in self.folder.glob("shard-*[0-9]") if resume else [self.folder]:
                shutil.rmtree(path)

    def up(self) -> dict[str, Any]:
        """Starts everything, sees the run to its end and stops everything; what the first trainer says it came to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.run.train.checkpoint_every is None:
            self._say("train.checkpoint_every is not set: if a trainer dies, the run starts from its beginning.")
        with contextlib.ExitStack() as closing:
            closing.callback(self._lock.release)
            closing.callback(self._write_state, "ended")
            closing.enter_context(self._hosts())
            closing.enter_context(self._signals())
            closing.callback(self._stop_all)
            for number in range(self._shards):
                if not self._stopping:
                    self._start_shard(number)
            self._write_run()
            if not self._stopping:
                self._start_trainers()
            while self._going_on():
                self._handle(self._ended.get())
            return self._result()

    def _going_on(self) -> bool:
        """Whether a trainer runs, or was killed and is still to be started again, however soon it was killed."""
        codes = [trainer.code for trainer in self.trainers]
        killed = any(code is not None and code < 0 for code in codes)
        return None in codes or (killed and not self._stopping and not self._failed)

    def stop(self, name: str = "SIGTERM") -> None:
        """Has the trainers write a checkpoint and end; `up` returns then. A second time they end at once."""
        number = signal.SIGKILL if self._stopping else signal.SIGTERM
        self._stopping = name
        self._send(number)
        self._ended.put(None)

    def _send(self, number: signal.Signals) -> None:
        for trainer in self.trainers:
            trainer.send(number)

    def _handle(self, process: Command | None) -> None:
        """Someone has ended."""
        if process is None or self._stopping:
            return
        if process in self.shards:
            self._shard_died(process)
        elif process in self.trainers and process.code != 0:
            self._trainer_died(process)

    def _shard_died(self, shard: Command) -> None:
        number = self.shards.index(shard)
        self._shard_ended(shard)
        self._start_shard(number)

    def _trainer_died(self, trainer: Command) -> None:
        """Ends the others too and starts all again, if one of them was ended by a signal."""
        killed_first = trainer.code is not None and trainer.code < 0
        deadline = time.monotonic() + (0.0 if killed_first else _GRACE_S)
        for other in self.trainers:
            other.wait(max(0.0, deadline - time.monotonic()))
        killed = [t for t in self.trainers if t.code is not None and t.code < 0]
        for other in self.trainers:
            other.stop(0.0)
        self._failed = not killed
        if self._failed or self._stopping:
            return
        self._count_death(killed[0])
        if self._begun():
            self._how = ["--resume"]
        self._start_trainers()
        self._back(killed[0])

    def _begun(self) -> bool:
        """Whether the trainers have made the run folder theirs: until then an earlier run may be in it."""
        return _stamp(self._settings) not in (None, self._earlier)

    def _count_death(self, process: Command) -> None:
        self.deaths.append(Death(process.name, process.end, time.time()))
        self._say(f"{process.name.capitalize()} (process {process.pid}) {process.end}; it is started again.")
        if len(self.deaths) > self._most:
            raise HotrowError(
                f"{len(self.deaths)} processes died, more than --deaths {self._most}; the run is given up. "
                f"Their logs are in {self.folder}. Go on with: hotrow up RUN.toml --resume"
            )

    def _back(self, process: Command) -> None:
        after = 0.0
        for death in self.deaths:
            if death.who == process.name and death.back_after is None:
                death.back_after = time.time() - death.when
                after = max(after, death.back_after)
        self._say(f"{process.name.capitalize()} is back after {after:.1f} s.")
        self._write_state("running")

    def _start_shard(self, number: int) -> None:
        """Starts a shard, at its address if it had one; again if it is killed before it serves."""
        while True:
            process = self._start(f"shard {number}", ["shard", "--json", *self._shard_place(number)])
            self.shards[number : number + 1] = [process]
            said = process.first_line(_START_S)
            if said is not None:
                break
            if self._stopping:
                return
            self._shard_ended(process)
        self.addresses[number : number + 1] = [said["address"]]
        self.metrics[number : number + 1] = [said["metrics"]]
        if any(death.back_after is None for death in self.deaths):
            self._back(process)

    def _shard_ended(self, shard: Command) -> None:
        """Counts its death, if it may be started again."""
        if shard.code is None or shard.code > 0:
            raise _failed(shard)
        self._count_death(shard)

    def _start_trainers(self) -> None:
        arguments = ["train", str(self.folder / "run.toml"), "--json", *self._how]
        places = self._trainer_places()
        self.trainers = [
            self._start(f"trainer {rank}", arguments, {**place, **self._lock.shared})
            for rank, place in enumerate(places)
        ]
        if self._stopping:  # said meanwhile, when there was none of them to tell
            self._send(signal.SIGTERM)
        self._write_state("running")

    def _hosts(self) -> contextlib.AbstractContextManager[None]:
        """Holds where processes run, from before the first starts until after the last has ended."""
        return contextlib.nullcontext()

    def _shard_place(self, number: int) -> list[str]:
        """Where a shard listens and keeps its rows, as options."""
        bind = self.addresses[number] if number < len(self.addresses) else "tcp://127.0.0.1:*"
        return ["--bind", bind, "--folder", str(self.folder / f"shard-{number}"), "--metrics", "0"]

    def _trainer_places(self) -> list[dict[str, str]]:
        """Each rank's environment, as `torchrun` would set it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return environments("127.0.0.1", port, [""] * self._trainers)

    def _start(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> Command:
        threads = max(1, (os.cpu_count() or 1) // max(1, self._shards + self._trainers))
        return Process(
            name,
            arguments,
            self._log(name),
            listen=self._heard,
            ended=self._ended,
            environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **(environment or {})},
            tied=True,
        )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def _heard(self, who: str, line: str) -> None:
        self._say(f"[{who}] {line}")

    def _write_run(self) -> None:
        cluster = self.run.cluster
        if self.addresses:
            cluster = cluster.model_copy(update={"shards": tuple(self.addresses)})
        _write(self.folder / "run.toml", self.run.model_copy(update={"cluster": cluster}).to_toml())

    def _write_state(self, phase: str) -> None:
        """What `hotrow status` reads."""
        shards = [
            {**shard.about(), "address": address, "metrics": port}
            for shard, address, port in zip(self.shards, self.addresses, self.metrics, strict=False)
        ]
        state = {
            "phase": phase,
            "pid": os.getpid(),
            **self._about(),
            "shards": shards,
            "trainers": [trainer.about() for trainer in self.trainers],
            "deaths": [asdict(death) for death in self.deaths],
        }
        _write(self.folder / "state.json", json.dumps(state, indent=1))

    def _about(self) -> dict[str, Any]:
        """What else the state says of the cluster."""
        return {}

    def _stop_all(self) -> None:
        """Trainers first, which still have changes to write back to shards."""
        for processes in (self.trainers, self.shards):
            for process in processes:
                process.send(signal.SIGTERM)
            for process in processes:
                process.stop(_STOP_S)

    def _result(self) -> dict[str, Any]:
        failed = [trainer for trainer in self.trainers if trainer.code != 0]
        if failed and not self._stopping:
            raise _failed(failed[0])
        text = "".join(self.trainers[0].said) if self.trainers else ""
        result = dict(json.loads(text)) if text.strip() else {}
        return {**result, "deaths": [asdict(death) for death in self.deaths], "stopped_by": self._stopping or None}

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run with a checkpoint, the second at once."""

        def caught(number: int, frame: FrameType | None) -> None:
            name = signal.Signals(number).name
            self._say(f"{name}: trainers finish their step and write a checkpoint; again stops at once.")
            self.stop(name)

        before = {number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _failed(process: Command) -> HotrowError:
    last = process.log.read_text().strip().splitlines()[-1:] or ["nothing"]
    return HotrowError(f"{process.name.capitalize()} {process.end}; it said last: {last[0]} Its log is {process.log}.")


def environments(address: str, port: int, hosts: Sequence[str]) -> list[dict[str, str]]:
    """The environment of each rank, given the host of each; ranks of a host stand side by side.

    Where hosts have different numbers of ranks, each rank is a node of its own.
    """
    counts = Counter(hosts)
    node_size = counts[hosts[0]] if len(set(counts.values())) == 1 else 1
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(hosts))}
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % node_size), "LOCAL_WORLD_SIZE": str(node_size)}
        for rank in range(len(hosts))
    ]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from the one that replaces it; None if there is none."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_ino, about.st_mtime_ns


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
