"""Models of several heads, as a user writes them."""

import torch
from torch import nn


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
