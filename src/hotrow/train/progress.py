"""What a run tells the person watching: a bar on a terminal, a plain line now and then anywhere else.

Everything goes to standard error, so that standard output stays free for results.
"""

from __future__ import annotations

import sys
import time
from typing import Any

_LINE_EVERY = 5.0


class Progress:
    """Says nothing. The base of those that do."""

    def start(self, total: int, done: int, what: str) -> None:
        """`total` steps are ahead, of which `done` are made; `what` is what one is called."""

    def step(self, done: int, samples: int, loss: float | None) -> None:
        """`samples` more were trained on; `loss` is the mean of the last lines' worth of steps, if known."""

    def say(self, text: str) -> None:
        """A sentence on a line of its own."""

    def stop(self) -> None:
        """The steps are over."""


class Lines(Progress):
    """A plain line every few seconds, for logs and pipes."""

    def __init__(self) -> None:
        self._total = self._done = self._first = self._samples = 0
        self._what = ""
        self._began = self._said = 0.0

    def start(self, total: int, done: int, what: str) -> None:
        self._total, self._done, self._first, self._samples, self._what = total, done, done, 0, what
        self._began = self._said = time.monotonic()

    def step(self, done: int, samples: int, loss: float | None) -> None:
        self._done = done
        self._samples += samples
        now = time.monotonic()
        if now - self._said >= _LINE_EVERY or done == self._total:
            self._said = now
            self.say(self._line(now - self._began, loss))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _line(self, seconds: float, loss: float | None) -> str:
        speed = self._samples / max(seconds, 1e-9)
        parts = [f"{self._what} {self._done:,}", f"{speed:,.0f} samples/s"]
        if self._total:
            left = seconds / max(self._done - self._first, 1) * (self._total - self._done)
            parts = [f"{parts[0]} of {self._total:,}", parts[1], f"{duration(left)} left"]
        if loss is not None:
            parts.insert(1, f"loss {loss:.4f}")
        return ", ".join(parts)


class Bar(Progress):
    """A live bar on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar: Any = None
        self._task: Any = None
        self._samples = 0
        self._began = 0.0

    def start(self, total: int, done: int, what: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[progress.percentage]{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[loss]}"),
            console=self._console,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(what, total=total or None, completed=done, speed="", loss="")
        self._samples, self._began = 0, time.monotonic()

    def step(self, done: int, samples: int, loss: float | None) -> None:
        self._samples += samples
        speed = self._samples / max(time.monotonic() - self._began, 1e-9)
        fields = {} if loss is None else {"loss": f"loss {loss:.4f}"}
        self._bar.update(self._task, completed=done, speed=f"{speed:,.0f} samples/s", **fields)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def watching() -> Progress:
    """A bar if somebody is looking at a terminal, lines if not."""
    return Bar() if sys.stderr.isatty() else Lines()


def duration(seconds: float) -> str:
    """ "7s", "3m 20s" or "2h 05m"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
