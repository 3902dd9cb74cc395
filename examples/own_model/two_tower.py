"""Two towers: a user's films before, and the user, on one side; the film on the other. Their product is the score.

`in_batch_softmax` trains it: the film that was liked is to be told from the other films of its batch. What it needs
are two methods; the towers themselves are plain PyTorch. Both give vectors of length 1, so scores are cosines, and
`objective.temperature` says how sharply they are told apart.
"""

from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow import Embedded, ModelInputs


class TwoTower(nn.Module):
    """Vectors of users and of items. `Settings` is what [model] of the run file may say besides the name."""

    class Settings(BaseModel):
        width: int = Field(32, ge=1)  # values of a vector
        hidden: int = Field(64, ge=1)

    def __init__(self, settings: Settings, inputs: ModelInputs) -> None:
        super().__init__()
        user = inputs.dims["user"] + inputs.dims["history"]
        self.user = tower(user, settings.hidden, settings.width)
        self.item = tower(inputs.dims["item"], settings.hidden, settings.width)

    def user_vectors(self, rows: Embedded, dense: Tensor | None) -> Tensor:
        """Reads no row of the item, so that a user is encoded once for all of them."""
        return F.normalize(self.user(rows.vectors(["user", "history"])), dim=1)

    def item_vectors(self, rows: Embedded, dense: Tensor | None) -> Tensor:
        """Reads rows of the item alone, so that all items can be encoded without a user."""
        return F.normalize(self.item(rows.vector("item")), dim=1)


def tower(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """A small MLP."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
