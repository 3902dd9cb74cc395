"""Shards as processes of this machine: for `hotrow up`, benchmarks and tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hotrow.errors import ServiceError

_COMMAND = (sys.executable, "-c", "from hotrow.cli import main; main()", "shard", "--json")
_STOP_S = 30.0


class ShardProcess:
    """One `hotrow shard`. It serves when this is made; `address` says where."""

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        *,
        folder: Path | None = None,
        key: Path | None = None,
        metrics: int | None = None,
        prefix: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        """`prefix` goes before the command, as `ip netns exec NAME`; what the shard writes to stderr goes to `log`."""
        options = ["--bind", bind]
        options += [] if folder is None else ["--folder", str(folder)]
        options += [] if key is None else ["--key", str(key)]
        options += [] if metrics is None else ["--metrics", str(metrics)]
        with (Path(os.devnull) if log is None else log).open("a") as errors:
            self.process = subprocess.Popen(
                [*prefix, *_COMMAND, *options],
                stdout=subprocess.PIPE,
                stderr=errors if log is not None else None,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ServiceError(f"A shard at {bind} did not start: it ended with code {self.process.wait()}.")
        said = json.loads(line)
        self.address: str = said["address"]
        self.metrics_port: int | None = said["metrics"]

    def stop(self) -> int:
        """Asks it to end, waits until it has answered what is under way, and gives its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(
                f"The shard at {self.address} did not end within {_STOP_S:g} s and was killed."
            ) from None
        finally:
            self._close()

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> ShardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
