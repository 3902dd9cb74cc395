"""`Host`: the Ray actor that runs one shard or trainer where Ray has placed it.

The shard or trainer is the same process as with `--cluster local`, tied to the actor: when the actor is killed, it is
gone too, and Ray starts the actor again. What to run it learns from the supervisor each time, so a new actor and one
whose process died are the same case. A key comes through Ray and lies in a file that only this user can read, for as
long as the process runs.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrow.cluster.process import Process
from hotrow.errors import ServiceError

KEY = "@key@"
"""Stands for the path of the key file in arguments."""
_LISTEN_S = 2.0
_STOP_S = 5.0


class Host:
    """Runs one command at a time; `hear` tells how it goes."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._news: queue.SimpleQueue[str | Process] = queue.SimpleQueue()
        self._secret = ""

    def where(self) -> dict[str, Any]:
        """The Ray node, its address, and this process."""
        import ray

        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"node": ray.get_runtime_context().get_node_id(), "address": address, "pid": os.getpid()}

    def free_port(self, address: str) -> int:
        with socket.socket() as free:
            free.bind((address, 0))
            return int(free.getsockname()[1])

    def sees(self, token: Path, text: str, paths: Sequence[Path]) -> list[str]:
        """Which of `paths` are not there; the folder of the token too if it does not hold what the supervisor wrote."""
        try:
            same = token.read_text() == text
        except OSError:
            same = False
        unseen = [path for path in paths if not path.exists()]
        return [str(path) for path in (unseen if same else [token.parent, *unseen])]

    def remove(self, folder: Path) -> None:
        """Rows of a run that is over, or of one before."""
        shutil.rmtree(folder, ignore_errors=True)

    def start(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], key: str | None
    ) -> int:
        """Starts a command in place of the one before; its process number."""
        self.stop()
        if key is not None:
            handle, self._secret = tempfile.mkstemp(prefix="hotrow-", suffix=".key")
            with os.fdopen(handle, "w") as file:
                file.write(key)
        news = self._news = queue.SimpleQueue[str | Process]()
        self._process = Process(
            name,
            [argument.replace(KEY, self._secret) for argument in arguments],
            log,
            listen=lambda _, line: news.put(line),
            ended=news,
            environment=environment,
            tied=True,
        )
        return self._process.pid

    def first_line(self, timeout: float) -> dict[str, Any] | None:
        """See `Process.first_line`; None too if the process went with the actor before this one."""
        return None if self._process is None else self._process.first_line(timeout)

    def hear(self) -> dict[str, Any]:
        """Lines said since the last call, and how it ended if it has; waits a little for something new."""
        process, news = self._running(), self._news
        lines: list[str] = []
        ended, wait = False, _LISTEN_S
        while not ended:
            try:
                said = news.get(timeout=wait)
            except queue.Empty:
                break
            ended, wait = isinstance(said, Process), 0.001
            if isinstance(said, str):
                lines.append(said)
        return {"lines": lines, "said": process.said if ended else [], "code": process.code if ended else None}

    def send(self, number: int) -> None:
        """A signal for the process."""
        if self._process is not None:
            self._process.send(signal.Signals(number))

    def stop(self) -> None:
        """Ends what runs, and forgets its key."""
        if self._process is not None:
            self._process.stop(_STOP_S)
        if self._secret:
            Path(self._secret).unlink(missing_ok=True)
            self._secret = ""

    def _running(self) -> Process:
        if self._process is None:  # the actor was started again, and the process went with the one before
            raise ServiceError("Nothing was started here yet.")
        return self._process
