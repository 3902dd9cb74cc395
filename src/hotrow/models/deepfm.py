"""DeepFM (Guo et al., 2017): a factorization machine and an MLP on the same vectors.

A row is a vector and, as its last value, a linear weight. All pairwise products are had from two sums,
(|sum of v|^2 - sum of |v|^2) / 2, in time linear in the features. Each dense input has a vector of its own
that it scales, so it takes part in the products; the MLP sees it as it is.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hotrow.embedded import Embedded
from hotrow.errors import SettingsError
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, joined, linear, mlp


class DeepFMSettings(ModelSettings):
    """`deep` are the hidden layers of the MLP."""

    wide: ClassVar[bool] = True

    name: Literal["deepfm"] = "deepfm"
    deep: Widths = (128, 64)
    dropout: float = Field(0.0, ge=0, lt=1)

    def build(self, inputs: ModelInputs) -> DeepFM:
        return DeepFM(self, inputs)


class DeepFM(RankingModel):
    """Linear terms, pairwise products and an MLP, added up."""

    def __init__(self, settings: DeepFMSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self.dim = inputs.common_dim("deepfm") - 1
        if self.dim < 1:
            raise SettingsError("deepfm needs rows of at least 2 values: a vector and the linear weight behind it.")
        self.fields = len(inputs.names)
        if inputs.dense:
            self.dense_weights = linear(inputs.dense, 1, bias=False)
            self.dense_vectors = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs.dense, self.dim)))
        self.deep = mlp(self.fields * self.dim + inputs.dense, settings.deep, 1, settings.dropout)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        rows_BFD = self.side_by_side(embedded).reshape(-1, self.fields, self.dim + 1)
        dense = self.dense_inputs(dense)
        vectors_BFD = rows_BFD[..., : self.dim]
        logits: Tensor = self.deep(joined(vectors_BFD.flatten(1), dense)).squeeze(1)
        logits = logits + rows_BFD[..., self.dim].sum(dim=1)

        total, squares = vectors_BFD.sum(dim=1), vectors_BFD.square().sum(dim=1)
        if dense is not None:
            logits = logits + self.dense_weights(dense).squeeze(1)
            total = total + dense @ self.dense_vectors
            squares = squares + dense.square() @ self.dense_vectors.square()
        pairs: Tensor = 0.5 * (total.square() - squares).sum(dim=1)
        return logits + pairs
