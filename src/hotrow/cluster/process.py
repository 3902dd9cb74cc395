"""`Process`: one shard or trainer of a cluster on this machine, its log, and its end as an event.

Each runs in a session of its own, so that Ctrl-C reaches whoever supervises and nobody else. What it says goes to its
log file, and line by line to whoever listens. A process that is `tied` ends with the one that started it, however that
ended. `Command` is what a supervisor knows of a process, wherever it runs.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrow.errors import ServiceError

COMMAND = (sys.executable, "-m", "hotrow")
TIED = (sys.executable, "-m", "hotrow.cluster.tied")
_KILLED_S = 60.0
Listen = Callable[[str, str], None]


class Command:
    """A running command of Hotrow. `ended` gets it when it has ended; `name` is as in "shard 1"."""

    def __init__(self, name: str, log: Path, listen: Listen, ended: queue.SimpleQueue[Any]) -> None:
        self.name, self.log, self.since = name, log, time.time()
        self.said: list[str] = []  # to standard output
        self._listen, self._ended = listen, ended

    @property
    def pid(self) -> int:
        raise NotImplementedError

    @property
    def code(self) -> int | None:
        """The exit code, minus a signal's number if one ended it; None while it runs."""
        raise NotImplementedError

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.code
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    def about(self) -> dict[str, Any]:
        """What `hotrow status` is told of it."""
        return {"name": self.name, "pid": self.pid, "since": self.since, "log": str(self.log)}

    def first_line(self, timeout: float) -> dict[str, Any] | None:
        """The JSON that it says first; None if it ended before, and then `code` says how. Raises if it says nothing."""
        raise NotImplementedError

    def send(self, number: signal.Signals) -> None:
        """A signal, if it is still running."""
        raise NotImplementedError

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within so many seconds."""
        raise NotImplementedError

    def stop(self, timeout: float) -> None:
        """Asks it to end, and ends it after so many seconds."""
        self.send(signal.SIGTERM)
        if not self.wait(timeout):
            self.send(signal.SIGKILL)
            self.wait(_KILLED_S)


class Process(Command):
    """A command that runs on this machine."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        listen: Listen,
        ended: queue.SimpleQueue[Any],
        environment: Mapping[str, str] | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__(name, log, listen, ended)
        self._process = subprocess.Popen(
            [*(TIED if tied else COMMAND), *arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE if tied else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._first, self._over = threading.Event(), threading.Event()
        threads = [
            threading.Thread(target=self._read_output, name=f"hotrow-up-{name}", daemon=True),
            threading.Thread(target=self._read_errors, name=f"hotrow-up-{name}", daemon=True),
        ]
        for thread in threads:
            thread.start()
        threading.Thread(target=self._wait, args=(threads,), name=f"hotrow-up-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def first_line(self, timeout: float) -> dict[str, Any] | None:
        if not self._first.wait(timeout):
            raise ServiceError(f"{self.name.capitalize()} said nothing for {timeout:.0f} s. Its log is {self.log}.")
        if self.said:
            return dict(json.loads(self.said[0]))
        self._over.wait(_KILLED_S)  # its output has ended, so it does: then its code and its log are whole
        return None

    def send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line)
            self._first.set()
        self._process.stdout.close()
        self._first.set()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self.log.open("a") as log:
            for line in self._process.stderr:
                log.write(line)
                log.flush()
                self._listen(self.name, line.rstrip("\n"))
        self._process.stderr.close()

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._over.set()
        self._ended.put(self)
