"""`Hook`: code of your own at the places of a run where something happens: loggers, stopping rules, schedules.

    class Alarm(Hook):
        def evaluated(self, trainer, split, metrics):
            return Flags(stop=metrics["auc"] < 0.6)

    Trainer(run, hooks=[Alarm()]).fit()

Every rank calls its hooks in their order. What one of them asks for is done when all ranks know of it: after the same
step in one process, after the next one with several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hotrow.train.state import Result
    from hotrow.train.trainer import Trainer


@dataclass(frozen=True)
class Flags:
    """What a hook asks for."""

    checkpoint: bool = False
    evaluate: bool = False
    stop: bool = False

    def __or__(self, other: Flags) -> Flags:
        return Flags(self.checkpoint or other.checkpoint, self.evaluate or other.evaluate, self.stop or other.stop)


@dataclass(frozen=True)
class StepEvent:
    """A step that was made. `loss` lies on the device, and reading it waits for the step; None in a loop without it."""

    step: int
    samples: int
    loss: Tensor | None


class Hook:
    """Does nothing at any of these places; override those that you need."""

    def begin(self, trainer: Trainer) -> None:
        """Before the first step of this process."""

    def step(self, trainer: Trainer, event: StepEvent) -> Flags | None:
        """After each step."""

    def idle(self, trainer: Trainer) -> None:
        """Nothing has arrived in a log that is followed; every update is applied."""

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> Flags | None:
        """After an evaluation in the course of training."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps for this hook, as JSON has it. Of the first rank's."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` gave, when a run goes on."""

    def end(self, trainer: Trainer, result: Result) -> None:
        """What the run came to."""
