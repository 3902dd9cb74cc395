"""`Process`: one shard or trainer of a cluster on this machine, its log, and its end as an event.

Each runs in a session of its own, so that Ctrl-C reaches whoever supervises and nobody else. What it says goes to its
log file, and line by line to whoever listens.
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
Listen = Callable[[str, str], None]


class Process:
    """A running command of Hotrow. `ended` gets it when it has ended; `name` is as in "shard 1"."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        listen: Listen,
        ended: queue.SimpleQueue[Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log, self.since = name, log, time.time()
        self.said: list[str] = []  # to standard output
        self._listen, self._ended = listen, ended
        self._process = subprocess.Popen(
            [*COMMAND, *arguments],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._first = threading.Event()
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
        """The exit code, minus a signal's number if one ended it; None while it runs."""
        return self._process.poll()

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.code
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    def first_line(self, timeout: float) -> dict[str, Any]:
        """The JSON that it says first; raises if it ends before."""
        self._first.wait(timeout)
        if not self.said:
            raise ServiceError(f"{self.name.capitalize()} did not start: it {self.end}. Its log is {self.log}.")
        return dict(json.loads(self.said[0]))

    def send(self, number: signal.Signals) -> None:
        """A signal, if it is still running."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within so many seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout: float) -> None:
        """Asks it to end, and ends it after so many seconds."""
        self.send(signal.SIGTERM)
        if not self.wait(timeout):
            self.send(signal.SIGKILL)
            self._process.wait()

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
        self._ended.put(self)
