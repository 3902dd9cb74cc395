"""`Phases`: where the time of steps goes, by name, added up from any thread.

Two clock readings a phase and step, so it is always on. In the thread that trains follow each other `wait`, `fetch`,
`read_again` (rows of a batch fetched ahead that have changed since), `model`, `reduce` (dense gradients over ranks),
`update` and `drain` (updates that a checkpoint waits for). `read`, `group`, `fetch_ahead`, `read_behind` and
`update_behind` run beside it, and cost a step only what shows up as `wait`; `held_back` is how long fetching waited for
room within the policy's bound, so that a slow part shows: whoever waits for it does. On a GPU `model` is the time to
hand the work over; what it takes beyond that is waited for by whoever needs a result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

IN_TURN = ("wait", "fetch", "read_again", "model", "reduce", "update", "drain")
"""Phases of the thread that trains."""
BESIDE = ("read", "group", "fetch_ahead", "read_behind", "update_behind", "held_back")
"""Phases of other threads."""


class Phases:
    """Seconds by phase, since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._adding = threading.Lock()

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Counts the time inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        with self._adding:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def each(self, phase: str, items: Iterable[T]) -> Generator[T]:
        """The same items; counts the time that making them takes."""
        made = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(made)
            except StopIteration:
                return
            self.add(phase, time.perf_counter() - began)
            yield item

    def take(self) -> dict[str, float]:
        """What was counted, and begins anew."""
        with self._adding:
            taken, self._seconds = self._seconds, {}
        return taken
