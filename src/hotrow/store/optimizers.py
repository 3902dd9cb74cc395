"""The optimizers a table can have, each applied in place by the native store where the row lives.

Each equals its PyTorch counterpart on the rows a step touches and leaves the others alone: no decay, no
moving average for a row that was not used (the meaning of `torch.optim.SparseAdam`). State is float32
whatever the rows are. Every class has exactly the arguments it uses.

| optimizer | equal to | state, floats a row |
| --- | --- | --- |
| SGD | torch.optim.SGD | 0 |
| Momentum | torch.optim.SGD(momentum=...) | dim |
| Adagrad | torch.optim.Adagrad | dim |
| RowWiseAdagrad | FBGEMM's EXACT_ROWWISE_ADAGRAD, torchrec.optim.RowWiseAdagrad | 1 |
| Adam | torch.optim.SparseAdam (bias correction by the table's step count, which is saved) | 2 dim |
"""

from typing import Annotated, Literal

from pydantic import Field

from hotrow.schedule import Constant, Schedule
from hotrow.settings import Settings


class _Optimizer(Settings):
    lr: float = Field(0.01, gt=0, description="learning rate")
    schedule: Schedule = Field(Constant(), description="how the learning rate changes over the steps")
    weight_decay: float = Field(0.0, ge=0, description="added to the gradient times the row, as PyTorch does")
    clip_value: float | None = Field(None, gt=0, description="each gradient value is held within plus and minus this")
    clip_norm: float | None = Field(None, gt=0, description="a row's gradient is scaled down to this norm")
    bound: float | None = Field(
        None, gt=0, description="after an update each value of the row is within plus and minus this"
    )

    def state_dim(self, dim: int) -> int:
        """How many floats of state one row of `dim` values has."""
        return 0

    def lr_at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        return self.lr * self.schedule.factor(step)


class SGD(_Optimizer):
    """Plain stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"


class Momentum(_Optimizer):
    """SGD with a running sum of gradients."""

    name: Literal["momentum"] = "momentum"
    momentum: float = Field(0.9, gt=0, lt=1)
    dampening: float = Field(0.0, ge=0, le=1)
    nesterov: bool = False

    def state_dim(self, dim: int) -> int:
        return dim


class Adagrad(_Optimizer):
    """One accumulator of squared gradients for each value."""

    name: Literal["adagrad"] = "adagrad"
    eps: float = Field(1e-10, gt=0)
    initial: float = Field(0.0, ge=0, description="what the accumulators start from")

    def state_dim(self, dim: int) -> int:
        return dim


class RowWiseAdagrad(_Optimizer):
    """One accumulator for each row, of the mean squared gradient: nearly no memory, the field's default."""

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    eps: float = Field(1e-8, gt=0)
    initial: float = Field(0.0, ge=0, description="what the accumulator starts from")

    def state_dim(self, dim: int) -> int:
        return 1


class Adam(_Optimizer):
    """Lazy Adam: moments of a row move only when the row is used."""

    name: Literal["adam"] = "adam"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)

    def state_dim(self, dim: int) -> int:
        return 2 * dim


Optimizer = Annotated[SGD | Momentum | Adagrad | RowWiseAdagrad | Adam, Field(discriminator="name")]
