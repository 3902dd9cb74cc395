"""Learning-rate schedules, for tables and the dense part alike: a factor for each step, from 0.

Every schedule can warm up: over the first `warmup` steps the factor rises linearly from 1/warmup to 1,
and the decay is counted from the end of the warm-up.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from hotrow.settings import Settings


class _Schedule(Settings):
    warmup: int = Field(0, ge=0, description="steps over which the rate rises to its full value")

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self._decay(step - self.warmup)

    def _decay(self, step: int) -> float:
        return 1.0


class Constant(_Schedule):
    """No decay."""

    name: Literal["constant"] = "constant"


class Linear(_Schedule):
    """A straight line from 1 to `final` over `steps`."""

    name: Literal["linear"] = "linear"
    steps: int = Field(gt=0)
    final: float = Field(0.0, ge=0)

    def _decay(self, step: int) -> float:
        return 1 + (self.final - 1) * min(step / self.steps, 1.0)


class Cosine(_Schedule):
    """Half a cosine from 1 to `final` over `steps`."""

    name: Literal["cosine"] = "cosine"
    steps: int = Field(gt=0)
    final: float = Field(0.0, ge=0)

    def _decay(self, step: int) -> float:
        progress = min(step / self.steps, 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


class StepDecay(_Schedule):
    """Multiplied by `gamma` after every `every` steps."""

    name: Literal["step"] = "step"
    every: int = Field(gt=0)
    gamma: float = Field(0.1, gt=0)

    def _decay(self, step: int) -> float:
        return self.gamma ** (step // self.every)


class InverseSqrt(_Schedule):
    """Falls with the square root of the steps since the warm-up, over a scale of `steps`."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    steps: int = Field(1, gt=0)

    def _decay(self, step: int) -> float:
        return 1 / math.sqrt(1 + step / self.steps)


Schedule = Annotated[Constant | Linear | Cosine | StepDecay | InverseSqrt, Field(discriminator="name")]
