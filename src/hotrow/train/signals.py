"""Catches the first SIGINT or SIGTERM, so that a run can finish its step and write a checkpoint.

The second one does what it always did: somebody does not want to wait.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """While open, `caught` becomes the name of the signal that came. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self.caught = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in _CAUGHT}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number).name
        self._put_back()
        print(
            f"{self.caught}: finishing the step and writing a checkpoint; again stops at once.",
            file=sys.stderr,
            flush=True,
        )

    def _put_back(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
