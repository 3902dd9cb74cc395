"""`Due`: what hooks, signals and settings want done after a step. Ranks say it with the step, so that all do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotrow.policy import Hybrid
from hotrow.train.hooks import Flags

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


class Due:
    """What this rank wants: `asked` by hooks since the last step, and a `checkpoint` until one is cut."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.asked = Flags()
        self.checkpoint = False

    def ask(self, flags: Flags | None) -> None:
        """Adds what a hook asks for."""
        self.asked = self.asked | (flags or Flags())

    def to_say(self, step: int) -> tuple[bool, ...]:
        """What this rank says with a step, in the order of `FLAGS`."""
        t, every, asked = self._trainer, self._trainer.run.train.checkpoint_every, self.asked
        due = every is not None and step % every == 0
        self.checkpoint |= due or asked.checkpoint or t.feed.checkpoint_due
        t.checkpoints.check()
        if t.checkpoints.missed:
            t.progress.say(f"{t.checkpoints.missed} It is taken again.")
            t.checkpoints.missed, self.checkpoint = "", True
        self.asked = Flags()
        caught, cut_now = t.signals.caught, t.ranks.first and self.checkpoint and self._may_cut()
        return caught == "SIGINT", caught == "SIGTERM", cut_now, asked.evaluate, asked.stop, False

    def _may_cut(self) -> bool:
        """Whether a checkpoint may begin: beside another one only where a pause at a later step would change bits."""
        policy = self._trainer.run.policy
        return not self._trainer.checkpoints.busy or (isinstance(policy, Hybrid) and policy.worst)
