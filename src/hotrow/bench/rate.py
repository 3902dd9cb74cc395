"""Samples a second of a run: `Rate` reads them off a Trainer, `rate_of` off a loop that is none.

Both leave out the first steps, in which threads start, memory is mapped and rows are made. A run's evaluations do not
count, as `hotrow train` does not count them; its checkpoints, its log and its metrics do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hotrow.train.hooks import Hook, StepEvent
from hotrow.train.state import Result
from hotrow.train.trainer import Trainer


class Measured(NamedTuple):
    """Samples and the seconds they took."""

    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples a second; 0 where nothing was measured."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class Rate(Hook):
    """What a run does after its first `warm` steps."""

    def __init__(self, warm: int) -> None:
        self.measured = Measured(0, 0.0)
        self._warm = warm
        self._begun: Measured | None = None

    def step(self, trainer: Trainer, event: StepEvent) -> None:
        if event.step > self._warm and self._begun is None:  # the state's seconds are those before this step
            self._begun = Measured(trainer.state.samples - event.samples, trainer.state.seconds)

    def end(self, trainer: Trainer, result: Result) -> None:
        if self._begun is not None:
            samples, seconds = self._begun
            self.measured = Measured(trainer.state.samples - samples, trainer.state.seconds - seconds)


def rate_of(steps: Iterable[int], warm: int, limit_s: float = 60.0) -> Measured:
    """The same for a loop that yields the samples of every step when it is made; ends after `limit_s`.

    On a machine with other work a peer's two threads wait for each other at every operation, for hours.
    """
    samples, begun = 0, time.perf_counter()
    for number, size in enumerate(steps, start=1):
        samples += size
        if number == warm:
            samples, begun = 0, time.perf_counter()
        elif number > warm and time.perf_counter() - begun > limit_s:
            break
    return Measured(samples, time.perf_counter() - begun)


def elsewhere(module: str, *arguments: object) -> Measured:
    """What `python -m module` measures in a process of its own and prints as its last line, as JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Measured(*json.loads(said.strip().splitlines()[-1]))


def speeds(measured: Sequence[Measured]) -> dict[str, Any]:
    """The median of samples a second, the least and the most."""
    rates = sorted(m.rate for m in measured)
    return {
        "samples_a_second": round(statistics.median(rates)),
        "least": round(rates[0]),
        "most": round(rates[-1]),
        "count": len(rates),
    }
