"""Real processes for tests of several ranks: started once and kept, since importing torch takes seconds.

    with Ranks(4) as ranks:
        results = ranks.run(3, "rank_work:train", arguments, node_size=3)     # one a rank

A function is named, not sent, and gets its `World` first. The first `n` processes are the ranks; they join a process
group of their own whenever the number changes, or the run before failed. An exception in one is raised here, with its
trace.

With backend "nccl" they share one device, which NCCL refuses to ranks of one host: so each says that it is another, and
bytes go over sockets.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hotrow.world import World

_CONSEQUENCES = ("TimeoutError", "RankError", "gone")


class RankFailed(AssertionError):
    """What a rank raised: its class and message in `kind` and `said`."""

    def __init__(self, rank: int, kind: str, said: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {said}\n{trace}")
        self.rank, self.kind, self.said = rank, kind, said


class Ranks:
    """A pool of `most` processes, which exchange over `backend`."""

    def __init__(self, most: int, backend: str = "gloo") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self._most, self._backend, self._group, self._size = most, backend, 0, 0
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with _one_thread():
            for number in range(self._most):
                here, there = context.Pipe()
                given = (there, self._port, sys.path, self._backend, number)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                there.close()
                self._pipes.append(here)
                self.processes.append(process)

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self.processes = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        size: int,
        function: str,
        *arguments: Any,
        each: Sequence[Any] = (),
        node_size: int = 0,
        timeout: float = 60,
    ) -> list[Any]:
        """What `function(world, *arguments, each[rank])` gives on each of `size` ranks."""
        answers = self.answers(size, function, *arguments, each=each, node_size=node_size, timeout=timeout)
        failed = [(rank, *answer) for rank, answer in enumerate(answers) if answer[0] != "ok"]
        if failed:  # the first cause is no rank's that only waited for another
            raise RankFailed(*min(failed, key=lambda f: (f[1] in _CONSEQUENCES, f[0])))
        return [value for _, value, *_ in answers]

    def answers(
        self,
        size: int,
        function: str,
        *arguments: Any,
        each: Sequence[Any] = (),
        node_size: int = 0,
        timeout: float = 60,
    ) -> list[tuple[str, Any, str]]:
        """For each rank ("ok", what it gave, ""), or class, message and trace of what it raised, or "gone"."""
        if not self.processes:
            self._start()
        if size != self._size:
            self._group, self._size = self._group + 1, size
        for rank in range(size):
            world = World(rank, size, node_size or size)
            given = (*arguments, each[rank]) if each else arguments
            self._pipes[rank].send_bytes(pickle.dumps((self._group, world, function, given)))
        deadline = time.monotonic() + timeout
        answers = [self._answer(rank, deadline) for rank in range(size)]
        if any(kind != "ok" for kind, *_ in answers):
            self._size = 0  # the next run starts with fresh connections
        if any(kind in ("gone", "TimeoutError") for kind, *_ in answers):
            self.close()  # who did not answer now might do so later; the next run has others
        return answers

    def _answer(self, rank: int, deadline: float) -> tuple[str, Any, str]:
        try:
            if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                return "TimeoutError", "no answer in time", ""
            found: tuple[str, Any, str] = pickle.loads(self._pipes[rank].recv_bytes())
            return found
        except (EOFError, ConnectionResetError):
            return "gone", "", ""


def _serve(pipe: Connection, port: int, path: list[str], backend: str, number: int) -> None:
    """A rank's life: joins a group when asked to, runs a function, sends what it gives."""
    sys.path[:] = path
    os.environ |= {"NCCL_HOSTID": f"rank{number}", "NCCL_SOCKET_IFNAME": "lo"}
    import torch

    from hotrow import _native

    torch.set_num_threads(1)
    _native.set_threads(1)
    joined = 0
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            group, world, function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if world.size > 1 and group != joined:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore(f"group{group}", store.clone()),
                    rank=world.rank,
                    world_size=world.size,
                    timeout=timedelta(seconds=30),
                )
                joined = group
            module, name = function.split(":")
            answer = ("ok", getattr(importlib.import_module(module), name)(world, *arguments), "")
        except Exception as error:
            answer = (type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def _one_thread() -> Any:
    """Each process with one thread: there are more of them than cores."""
    names = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
