"""A model and an objective as a user writes them, for tests of runs that name them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import BaseModel
from torch import nn

from hotrow.objectives import Objective, ObjectiveInputs, one_output


class Tower(nn.Module):
    """An MLP on everything there is."""

    class Settings(BaseModel):
        width: int = 8

    def __init__(self, settings, inputs):
        super().__init__()
        self.top = nn.Sequential(
            nn.Linear(inputs.width + inputs.dense, settings.width), nn.ReLU(), nn.Linear(settings.width, 1)
        )

    def forward(self, rows, dense):
        return self.top(torch.cat([rows.vectors(), dense], dim=1)).squeeze(1)


class Plain(nn.Module):
    """A model without settings, that has rows of a linear weight more."""

    extra_row_values = 1

    def __init__(self, inputs):
        super().__init__()
        self.top = nn.Linear(inputs.width + inputs.dense, 1)

    def forward(self, rows, dense):
        return self.top(torch.cat([rows.vectors(), dense], dim=1)).squeeze(1)


class Mean:
    """The mean squared error of all samples."""

    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.float64)

    def state(self):
        return {"total": self.total}

    def merge(self, state):
        self.total += state["total"]

    def compute(self):
        return {"squared": float(self.total[0] / self.total[1])}


class Squared(Objective):
    """Squared distance from the label, as a user's own objective."""

    watched: ClassVar = {"squared": "smaller"}

    @dataclass
    class Settings:
        scale: float = 1.0

    def __init__(self, settings, inputs: ObjectiveInputs):
        super().__init__(inputs)
        self.scale = settings.scale

    def loss(self, outputs, inputs):
        return self.scale * ((one_output(outputs, "squared") - inputs.labels) ** 2).mean()

    def predict(self, outputs):
        return {"click": outputs}

    def metrics(self):
        return Mean()

    def measure(self, metrics, outputs, batch):
        metrics.total += torch.tensor([float(((outputs - batch.labels) ** 2).sum()), len(batch)], dtype=torch.float64)


class NoModule:
    """Not a model."""


class Broken(nn.Module):
    """Cannot be made from what a run gives."""

    def __init__(self, settings, inputs, more):
        super().__init__()


class Fails(nn.Module):
    """Raises when it is made."""

    def __init__(self, inputs):
        super().__init__()
        raise ValueError("no such width")


class Drifting(torch.optim.Optimizer):
    """An optimizer whose state is of all kinds: tensors and numbers of a parameter, a number of a group."""

    def __init__(self, params, lr=0.01, pull=0.5):
        super().__init__(params, {"lr": lr, "pull": pull, "seen": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)) * group["pull"] + p.grad
                state["norm"] = state.get("norm", 0.1) * group["pull"] + float(p.grad.norm())
                state["even"] = not state.get("even", True)
                state["made"] = state.get("made", 0) + 1
                scale = group["lr"] / (1 + state["norm"] + 0.01 * state["made"] + 0.01 * group["seen"])
                p -= scale * state["mean"] * (2 if state["even"] else 1)


class Hoarding(torch.optim.SGD):
    """Keeps what a checkpoint cannot hold."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["past"] = [p.clone()]


class Log(nn.Module):
    """Minus infinity for every sample."""

    def forward(self, x):
        return torch.log(torch.relu(-x.abs()))


class Narrow(Plain):
    """A model with a layer that gives what is not finite."""

    def __init__(self, inputs):
        super().__init__(inputs)
        self.log = Log()

    def forward(self, rows, dense):
        return self.log(super().forward(rows, dense)) + 1.0


class Rooted(Plain):
    """A model whose outputs are finite and whose gradients below a root are not."""

    def __init__(self, inputs):
        super().__init__(inputs)
        self.below = nn.Linear(inputs.width, 1, bias=False)

    def forward(self, rows, dense):
        none = torch.sqrt(self.below(rows.vectors()).squeeze(1) * 0.0)
        return super().forward(rows, dense) + none


class Sequence(nn.Module):
    """What came before, summed up to each position, and the item's own rows."""

    def __init__(self, inputs):
        super().__init__()
        self.item = nn.Linear(inputs.dims["item"], 4, bias=False)

    def position_vectors(self, rows, dense):
        padded, _ = rows.sequence("history").expand().padded(3)
        return padded.cumsum(1) + rows.vector("user")[:, None]

    def user_vectors(self, rows, dense):
        padded, _ = rows.sequence("history").expand().padded(3)
        return padded.sum(1) + rows.vector("user")

    def item_vectors(self, rows, dense):
        return self.item(rows.vector("item"))


class TwoTower(nn.Module):
    """User and history on one side, the item on the other."""

    class Settings(BaseModel):
        width: int = 4

    def __init__(self, settings, inputs):
        super().__init__()
        self.user = nn.Linear(inputs.dims["user"] + inputs.dims["history"], settings.width)
        self.item = nn.Linear(inputs.dims["item"], settings.width, bias=False)

    def user_vectors(self, rows, dense):
        return self.user(rows.vectors(["user", "history"]))

    def item_vectors(self, rows, dense):
        return self.item(rows.vector("item"))
