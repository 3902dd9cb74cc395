"""Two tasks of one log: a bottom that they share, and a tower for each, which gives the logit of its label.

`multi_task` trains it: the loss is the sum of the tasks' own, by their weights. `forward` gives a tensor `[B]` for each
task by its label. Few views end with a purchase; what clicks teach the bottom and the rows helps to tell which.
"""

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from hotrow import Embedded, ModelInputs


class SharedBottom(nn.Module):
    """Logits of click and buy. `Settings` is what [model] of the run file may say besides the name."""

    class Settings(BaseModel):
        bottom: int = Field(64, ge=1)
        tower: int = Field(32, ge=1)

    def __init__(self, settings: Settings, inputs: ModelInputs) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(inputs.width + inputs.dense, settings.bottom), nn.ReLU())
        self.click = tower(settings.bottom, settings.tower)
        self.buy = tower(settings.bottom, settings.tower)

    def forward(self, rows: Embedded, dense: Tensor | None) -> dict[str, Tensor]:
        """`rows.vectors()` are all features side by side; `dense` is the price."""
        vectors = rows.vectors()
        shared = self.bottom(vectors if dense is None else torch.cat([vectors, dense], dim=1))
        return {"click": self.click(shared).squeeze(1), "buy": self.buy(shared).squeeze(1)}


def tower(inputs: int, hidden: int) -> nn.Sequential:
    """A small MLP that gives one logit."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
