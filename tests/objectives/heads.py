"""Models of several heads and metrics, as a user writes them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hotrow.objectives import Metric


class OneHead(nn.Module):
    """A hidden layer and a logit."""

    def __init__(self, inputs):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(inputs.width + inputs.dense, 8), nn.ReLU())
        self.click = nn.Linear(8, 1)

    def forward(self, rows, dense):
        return self.click(self.hidden(torch.cat([rows.vectors(), dense], dim=1))).squeeze(1)


class Heads(OneHead):
    """Another head beside it, which draws its weights last."""

    def __init__(self, inputs):
        super().__init__(inputs)
        self.buy = nn.Linear(8, 1)

    def forward(self, rows, dense):
        hidden = self.hidden(torch.cat([rows.vectors(), dense], dim=1))
        return {"click": self.click(hidden).squeeze(1), "buy": self.buy(hidden).squeeze(1)}


class Stubborn(OneHead):
    """Takes no fewer than 8 samples."""

    def forward(self, rows, dense):
        assert len(dense) >= 8
        return super().forward(rows, dense)


class Accuracy(Metric):
    """The share of samples that a threshold tells right."""

    watched: ClassVar = {"accuracy": "larger"}

    @dataclass
    class Settings:
        threshold: float = 0.5

    def __init__(self, settings, inputs):
        super().__init__(inputs)
        self.logit = math.log(settings.threshold / (1 - settings.threshold))
        self.sums = torch.zeros(1, 2, dtype=torch.float64)

    def update(self, outputs, batch):
        right = (outputs > self.logit) == (batch.labels > 0.5)
        self.sums += torch.tensor([[float(right.sum()), len(batch)]], dtype=torch.float64)

    def state(self):
        return {"sums": self.sums}

    def merge(self, state):
        self.sums += state["sums"]

    def compute(self):
        return {"accuracy": float(self.sums[0, 0] / self.sums[0, 1])}


class Copied(Accuracy):
    """Takes a name that is taken."""

    watched: ClassVar = {}

    def compute(self):
        return {"auc": 1.0}


class OfALine(Accuracy):
    """Takes the name of what every line of metrics says."""

    watched: ClassVar = {}

    def compute(self):
        return {"step": 1.0}


class Late(Copied):
    """Says its name when it has samples."""

    def compute(self):
        return {"auc": 1 / float(self.sums[0, 1])} if self.sums.sum() else {}


class Towers(nn.Module):
    """A user and an item as they are."""

    def __init__(self, inputs):
        super().__init__()

    def user_vectors(self, rows, dense):
        return rows.vectors(["user"])

    def item_vectors(self, rows, dense):
        return rows.vectors(["item"])
