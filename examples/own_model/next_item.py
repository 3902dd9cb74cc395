"""A causal transformer over a user's films: at every position it says which film comes next.

`next_item` trains it, from every position of a history at once (`position_vectors`); what finds films for a user is the
last one (`user_vectors`). A film's vector is its row: the table learns it, the model has none of its own for it.
"""

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from hotrow import Embedded, ModelInputs, expand


class NextItem(nn.Module):
    """What a user wants next, from the films before."""

    class Settings(BaseModel):
        layers: int = Field(1, ge=1)
        heads: int = Field(2, ge=1)
        length: int = Field(20, ge=1)  # films that are looked at, the last ones

    def __init__(self, settings: Settings, inputs: ModelInputs) -> None:
        super().__init__()
        dim = inputs.common_dim("next_item")
        self.length = settings.length
        self.places = nn.Parameter(torch.randn(settings.length, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, settings.heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, settings.layers, enable_nested_tensor=False)
        self.nobody = nn.Parameter(torch.zeros(dim))  # for a user without films

    def position_vectors(self, rows: Embedded, dense: Tensor | None) -> Tensor:
        """`[B, T, D]`: the position of a film has seen that film and those before it."""
        history = rows.sequence("history")
        films, _ = history.padded(self.length)  # each history once, however many samples share it
        later = torch.ones(self.length, self.length, dtype=torch.bool, device=films.device).triu(1)
        return expand(self.layers(films + self.places, mask=later, is_causal=True), history.inverse)

    def user_vectors(self, rows: Embedded, dense: Tensor | None) -> Tensor:
        """The position of the last film."""
        history = rows.sequence("history")
        last = expand(history.lengths, history.inverse).clamp(max=self.length) - 1
        positions = self.position_vectors(rows, dense)
        found = positions[torch.arange(positions.shape[0]), last.clamp(min=0)]
        return torch.where((last >= 0)[:, None], found, self.nobody)

    def item_vectors(self, rows: Embedded, dense: Tensor | None) -> Tensor:
        return rows.vector("item")
