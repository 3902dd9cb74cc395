"""DLRM (Naumov et al., 2019): dot products between all features, and an MLP on them.

The bottom MLP turns the dense inputs into one more vector of the features' dim. Without dense inputs that
vector is a learned constant, which gives every feature a linear term. The top MLP sees that vector and the
dot products of every two of the V vectors. They come from one batched product `[B, V, V]`, of which a good
half is thrown away. They need every sample's vectors: unique samples save the lookups and the pooling, no more.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hotrow.embedded import Embedded
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, mlp


class DLRMSettings(ModelSettings):
    """`bottom` and `top` are hidden layers; behind them come the features' dim and the logit."""

    name: Literal["dlrm"] = "dlrm"
    bottom: Widths = (64,)
    top: Widths = (128, 64)

    def build(self, inputs: ModelInputs) -> DLRM:
        return DLRM(self, inputs)


class DLRM(RankingModel):
    """Bottom MLP, pairwise dot products, top MLP."""

    def __init__(self, settings: DLRMSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self.dim = inputs.common_dim("dlrm")
        self.vectors = len(inputs.names) + 1
        if inputs.dense:
            self.bottom: nn.Module = nn.Sequential(*mlp(inputs.dense, settings.bottom, self.dim), nn.ReLU())
        else:
            self.constant = nn.Parameter(torch.randn(self.dim) * self.dim**-0.5)
        i, j = torch.triu_indices(self.vectors, self.vectors, offset=1)
        self.register_buffer("pairs", i * self.vectors + j, persistent=False)
        self.pairs: Tensor
        self.top = mlp(self.dim + len(self.pairs), settings.top, inputs.outputs)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        rows = self.joint(embedded, dense).features()
        dense = self.dense_inputs(dense)
        first = self.constant.expand(len(rows), -1) if dense is None else self.bottom(dense)
        logits: Tensor = self.top(torch.cat([first, self.interact(torch.cat([first, rows], dim=1))], dim=1))
        return self.given(logits)

    def interact(self, rows: Tensor) -> Tensor:
        """The dot product of every two of the vectors that stand side by side in `rows[B, vectors * dim]`."""
        rows_BVD = rows.view(-1, self.vectors, self.dim)
        products_BVV = torch.bmm(rows_BVD, rows_BVD.transpose(1, 2))
        return products_BVV.flatten(1).index_select(1, self.pairs)
