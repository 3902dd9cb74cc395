"""`RayCluster`: the same shards and trainers on the hosts of a Ray cluster; Ray places them and starts them again.

A placement group for each role: shards are spread over hosts that have the memory they ask for, trainers are packed on
hosts that have the CPUs and GPUs. Each place is an actor (`Host`) that Ray starts again whenever it or its host dies;
the supervisor is the one of `--cluster local` and then starts the process in it. A shard that is back on its host opens
its files and has what it had applied; on another host its files are not there, so trainers go on from the last
checkpoint, which brings the rows.

The run folder and the data set must be on a file system that all hosts share under one path: logs, metrics and
checkpoints are there. On one host everything talks over loopback; on several, shards listen at their host's address
with keys that are made for this run and reach the actors through Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from hotrow.cluster.local import LocalCluster, environments
from hotrow.cluster.process import Command, Listen
from hotrow.cluster.ray_host import KEY, Host
from hotrow.cluster.ray_room import Needs, Room, connect
from hotrow.errors import HotrowError, ServiceError, SettingsError
from hotrow.run import Run
from hotrow.service.curve import make_keys

_BACK_S = 300.0
"""Seconds that Ray has to start an actor again, on another host if need be."""
_BEAT_S = 10.0


class Seat:
    """A place that Ray keeps for one process: the actor in it is another one after a failure."""

    def __init__(self, ray: Any, name: str, actor: Any) -> None:
        self.ray, self.name, self.actor = ray, name, actor
        self.where: dict[str, Any] = {}

    def ask(self, method: str, *arguments: Any, timeout: float = _BACK_S) -> Any:
        """Calls a method of the actor, as soon as there is one again."""
        errors = self.ray.exceptions
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                return self.ray.get(getattr(self.actor, method).remote(*arguments), timeout=left)
            except errors.RayTaskError as error:
                if isinstance(error.cause, HotrowError):
                    raise error.cause from None
                raise
            except (errors.GetTimeoutError, errors.RayActorError):
                if time.monotonic() >= deadline:
                    raise ServiceError(
                        f"{self.name.capitalize()} has had no actor for {timeout:.0f} s: Ray found no host with room "
                        f"for it. `ray status` shows what there is."
                    ) from None
                time.sleep(0.2)

    def find(self) -> dict[str, Any]:
        """Where the actor is now."""
        self.where = self.ask("where")
        return self.where


class RayProcess(Command):
    """A command that runs in a seat."""

    def __init__(
        self,
        name: str,
        seat: Seat,
        start: Sequence[Any],
        log: Path,
        *,
        listen: Listen,
        ended: queue.SimpleQueue[Any],
    ) -> None:
        super().__init__(name, log, listen, ended)
        self._seat, self._lost, self._over = seat, False, threading.Event()
        self._code: int | None = None
        self._pid: int = seat.ask("start", name, *start)
        threading.Thread(target=self._watch, name=f"hotrow-up-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def code(self) -> int | None:
        return self._code

    @property
    def end(self) -> str:
        return f"was lost with its actor on {self._seat.where['address']}" if self._lost else super().end

    def about(self) -> dict[str, Any]:
        where = self._seat.where
        return {**super().about(), "host": where["address"], "actor": where["pid"], "alive": self._code is None}

    def first_line(self, timeout: float) -> dict[str, Any] | None:
        said: dict[str, Any] | None = self._seat.ask("first_line", timeout)
        if said is None:
            self._over.wait(timeout)
        return said

    def send(self, number: signal.Signals) -> None:
        if not self._over.is_set():
            self._seat.actor.send.remote(int(number))

    def wait(self, timeout: float) -> bool:
        return self._over.wait(timeout)

    def _watch(self) -> None:
        """Passes on what it says, until its end or its actor's."""
        ray = self._seat.ray
        try:
            while self._code is None:
                heard = ray.get(self._seat.actor.hear.remote())
                for line in heard["lines"]:
                    self._listen(self.name, line)
                self.said, self._code = heard["said"], heard["code"]
        except ray.exceptions.RayError:  # the actor is gone, or one that knows nothing has taken its place
            self._lost, self._code = True, -signal.SIGKILL
        self._over.set()
        self._ended.put(self)


class RayCluster(LocalCluster):
    """A run's processes on the hosts of a Ray cluster, supervised until its end."""

    elsewhere = True

    def __init__(
        self,
        run: Run,
        *,
        address: str = "ray",
        shard_needs: Needs | None = None,
        trainer_needs: Needs | None = None,
        shard_folder: Path | None = None,
        wait: float = 60.0,
        **settings: Any,
    ) -> None:
        """`shard_folder` is where each shard's host keeps its rows; in the run folder if not given.

        `wait` is how long hosts with room are waited for, as an autoscaler needs time to start some.
        """
        if shard_folder is not None and not shard_folder.is_absolute():
            raise SettingsError(f"--shard-folder {shard_folder}: give a path from the root, as hosts have their own.")
        super().__init__(run, **settings)
        self._address, self._wait, self._shard_folder = address, wait, shard_folder
        self._needs = {
            "shard": shard_needs or Needs(),
            "trainer": trainer_needs or Needs(gpus=1.0 if run.train.device == "cuda" else 0.0),
        }
        self._seats: dict[str, list[Seat]] = {"shard": [], "trainer": []}
        self._homes: list[tuple[str, Path]] = []  # of each shard the node, and the folder of its rows
        self._keys: dict[str, str] = {}

    @contextlib.contextmanager
    def _hosts(self) -> Iterator[None]:
        """Takes the places from Ray, and gives them back."""
        counts = {"trainer": self._trainers, "shard": self._shards}  # trainers first: GPUs are rarer than memory
        with contextlib.ExitStack() as closing:
            ray = closing.enter_context(connect(self._address, self._needs, counts))
            room = closing.enter_context(Room(ray))
            for role, count in counts.items():
                actors = room.take(role, self._needs[role], count, Host, self._wait)
                self._seats[role] = [Seat(ray, f"{role} {number}", actor) for number, actor in enumerate(actors)]
            if not self._on_one_host(ray):
                self._keys = _new_keys()
            self._check_folders()
            closing.callback(self._remove_rows)
            with _beating(self.folder / "state.json"):
                yield

    def _on_one_host(self, ray: Any) -> bool:
        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1

    def _check_folders(self) -> None:
        """Refuses hosts that do not see the run folder, the data set or the modules of own classes."""
        read = [self.run.data.path, *self.run.sources]
        token, text = self.folder / ".seen", uuid4().hex
        token.write_text(text)
        try:
            for role, seats in self._seats.items():
                for seat in seats:
                    missing = seat.ask("sees", token, text, read if role == "trainer" else [])
                    if missing:
                        raise SettingsError(
                            f"{seat.name.capitalize()} on host {seat.find()['address']} does not see {missing[0]}. Run "
                            f"folder, data set and your own modules must be on a file system that all hosts share "
                            f"under one path."
                        )
        finally:
            token.unlink()

    def _start(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> Command:
        role, _, number = name.partition(" ")
        key = self._keys.get(role)
        if key is not None and role == "shard":
            arguments = [*arguments, "--key", KEY]
        elif key is not None and self.addresses:
            arguments = [*arguments, "--set", f'cluster.key="{KEY}"']
        log = self._log(name)
        start = (arguments, log, environment or {}, key)
        return RayProcess(name, self._seats[role][int(number)], start, log, listen=self._heard, ended=self._ended)

    def _shard_place(self, number: int) -> list[str]:
        seat = self._seats["shard"][number]
        where = seat.find()
        host = where["address"] if self._keys else "127.0.0.1"
        again = number < len(self._homes)
        if again and self._homes[number][0] == where["node"] and number < len(self.addresses):
            bind = self.addresses[number]
        else:
            bind = f"tcp://{host}:*"
            folder = self._rows_folder(number, again)
            seat.ask("remove", folder)
            self._homes[number : number + 1] = [(where["node"], folder)]
        return ["--bind", bind, "--folder", str(self._homes[number][1]), "--metrics", f"{host}:0"]

    def _rows_folder(self, number: int, moved: bool) -> Path:
        """A new one after each move: what another host left half written is never opened."""
        name = f"shard-{number}"
        if moved:
            name = f"{name}-{len(self.deaths)}"
        if self._shard_folder is None:
            return self.folder / name
        return self._shard_folder / f"hotrow-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}-{name}"

    def _shard_died(self, shard: Command) -> None:
        number = self.shards.index(shard)
        before = self._homes[number][0]
        super()._shard_died(shard)
        if self._homes[number][0] != before:
            self._say(
                f"Shard {number} is on another host now, {self.addresses[number]}; its rows were lost with the one "
                f"before, so trainers go on from the last checkpoint."
            )
            for trainer in self.trainers:
                trainer.stop(0.0)
            self._how = ["--resume"]
            self._write_run()
            if not self._stopping:
                self._start_trainers()

    def _trainer_places(self) -> list[dict[str, str]]:
        seats = self._seats["trainer"]
        nodes = [seat.find()["node"] for seat in seats]
        seats.sort(key=lambda seat: nodes.index(seat.where["node"]))  # ranks of a host stand side by side
        for rank, seat in enumerate(seats):
            seat.name = f"trainer {rank}"
        address = seats[0].where["address"] if self._keys else "127.0.0.1"
        port = seats[0].ask("free_port", address)
        return environments(address, port, [seat.where["node"] for seat in seats])

    def _about(self) -> dict[str, Any]:
        return {"cluster": self._address, "host": socket.gethostname()}

    def _remove_rows(self) -> None:
        """Rows outside the run folder, which may be memory of the hosts: the checkpoint has them."""
        if self._shard_folder is not None:
            for seat, (_, folder) in zip(self._seats["shard"], self._homes, strict=False):
                with contextlib.suppress(HotrowError):
                    seat.ask("remove", folder, timeout=10.0)


def _new_keys() -> dict[str, str]:
    """Keys for the shards and trainers of one run, as text for the actors."""
    with tempfile.TemporaryDirectory() as folder:
        shard, trainer = make_keys(Path(folder))
        return {"shard": shard.read_text(), "trainer": trainer.read_text()}


@contextlib.contextmanager
def _beating(state: Path) -> Iterator[None]:
    """Touches the state now and then, so that `hotrow status` on any host knows that somebody supervises."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(state)

    thread = threading.Thread(target=beat, name="hotrow-up-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
