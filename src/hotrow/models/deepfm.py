"""DeepFM (Guo et al., 2017): a factorization machine and an MLP on the same vectors.

A row is a vector and, as its last value, a linear weight. All pairwise products are had from two sums,
(|sum of v|^2 - sum of |v|^2) / 2, in time linear in the features. Each dense input has a vector of its own
that it scales, so it takes part in the products; the MLP sees it as it is. The sums over a group's features, and its
share in the MLP's first layer, are computed on unique samples.

What is added up starts near 0 and moves at a like pace. Dense inputs are often well above 1, and products grow with the
square of that: their vectors start small, their linear weights at 0. Linear weights are scaled: `weight_scales`. So are
products, by `pair_scale`: with 39 vectors of a Criteo sample and a table rate of 0.05, unscaled ones cost 0.015 of AUC,
while a scale as small as that costs 0.002 with the 12 vectors of a planted log. Several outputs share linear terms and
products: `Shared`.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hotrow.embedded import Embedded, PooledGroup, expand
from hotrow.errors import SettingsError
from hotrow.models.joint import Joint
from hotrow.models.model import (
    ModelInputs,
    ModelSettings,
    RankingModel,
    Shared,
    Widths,
    dense_weights,
    mlp,
    weight_scales,
)


class DeepFMSettings(ModelSettings):
    """`deep` are the hidden layers of the MLP."""

    extra_row_values: ClassVar[int] = 1

    name: Literal["deepfm"] = "deepfm"
    deep: Widths = (128, 64)
    dropout: float = Field(0.0, ge=0, lt=1)

    def build(self, inputs: ModelInputs) -> DeepFM:
        return DeepFM(self, inputs)


def pair_scale(dim: int, vectors: int) -> float:
    """What a product of two vectors counts: sqrt(32 / (dim vectors)), and 1 at most.

    An update of a row moves each of its values by about the rate, so all its products together by as much as the sum of
    the other vectors is long: sqrt(dim vectors). At 32 vectors products are divided by sqrt(dim), as attention does it.
    """
    return min(1.0, math.sqrt(32 / (dim * vectors)))


class DeepFM(RankingModel):
    """Linear terms, pairwise products and an MLP, added up."""

    def __init__(self, settings: DeepFMSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self.dim = inputs.common_dim("deepfm") - 1
        if self.dim < 1:
            raise SettingsError("deepfm needs rows of at least 2 values: a vector and the linear weight behind it.")
        self.fields = len(inputs.names)
        self.register_buffer("weight_scale", weight_scales([self.dim + 1]))
        self.register_buffer("pair_scale", torch.tensor(pair_scale(self.dim, self.fields + inputs.dense)))
        self.weight_scale: Tensor
        self.pair_scale: Tensor
        if inputs.dense:
            self.dense_weights = dense_weights(inputs.dense)
            self.dense_vectors = nn.Parameter(torch.randn(inputs.dense, self.dim) * 0.01)
        self.deep = mlp(self.fields * self.dim + inputs.dense, settings.deep, inputs.outputs, settings.dropout)
        self.shared = Shared(inputs.outputs)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        dense = self.dense_inputs(dense)
        vectors, sums = [], []
        for group in self.unique_groups(embedded):
            rows_SFD = group.rows.reshape(-1, len(group.features), self.dim + 1)
            vectors_SFD = rows_SFD[..., : self.dim]
            dims = tuple(self.dim for _ in group.features)
            vectors.append(PooledGroup(group.features, dims, vectors_SFD.flatten(1), group.inverse))
            of_group = [rows_SFD.sum(dim=1), vectors_SFD.square().sum(dim=1)]
            sums.append(expand(torch.cat(of_group, dim=1), group.inverse))
        total, weights, squares = torch.split(sum(sums[1:], sums[0]), [self.dim, 1, self.dim], dim=1)
        logits = self.given(Joint(self.inputs.names, vectors, dense).through(self.deep))
        logits = self.shared(logits, (self.weight_scale * weights).squeeze(1))
        if dense is not None:
            logits = self.shared(logits, self.dense_weights(dense).squeeze(1))
            total = total + dense @ self.dense_vectors
            squares = squares + dense.square() @ self.dense_vectors.square()
        pairs = 0.5 * (total.square() - squares).sum(dim=1)
        found: Tensor = self.shared(logits, self.pair_scale * pairs)
        return found
