"""DCN v2 (Wang et al., 2021): explicit feature crosses of growing degree, and an MLP.

A cross layer is x0 * (W x + b) + x. With `rank` r, W is the product of a [d, r] and an [r, d] matrix, which
costs 2 d r instead of d^2 products a sample; the paper finds d / 4 nearly as good. The MLP stands beside the
cross layers ("parallel") or on top of them ("stacked"). Products of features need every sample; on unique samples
there are the first product with W and the first layer of an MLP that stands beside.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hotrow.embedded import Embedded
from hotrow.models.joint import Joint
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, linear, mlp


class DCNv2Settings(ModelSettings):
    """`layers` crosses, of full or low `rank`; `deep` are the hidden layers of the MLP, none if empty."""

    name: Literal["dcnv2"] = "dcnv2"
    layers: int = Field(3, ge=1)
    rank: int | None = Field(None, ge=1, description="rank of each cross layer's matrix; full if not given")
    deep: Widths = (128, 64)
    structure: Literal["parallel", "stacked"] = "parallel"
    dropout: float = Field(0.0, ge=0, lt=1)

    def build(self, inputs: ModelInputs) -> DCNv2:
        return DCNv2(self, inputs)


class Cross(nn.Module):
    """One cross layer."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.project = nn.Sequential(
            *([linear(width, width)] if rank is None else [linear(width, rank, bias=False), linear(rank, width)])
        )

    def forward(self, first: Tensor, x: Tensor | Joint) -> Tensor:
        """`first` is x0; x may be given as the inputs it is made of, as the first layer has it."""
        if isinstance(x, Joint):
            return torch.addcmul(first, first, x.through(self.project))
        return torch.addcmul(x, first, self.project(x))


class DCNv2(RankingModel):
    """Cross layers and an MLP on all features and dense inputs side by side."""

    def __init__(self, settings: DCNv2Settings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        width = inputs.width + inputs.dense
        self.crosses = nn.ModuleList(Cross(width, settings.rank) for _ in range(settings.layers))
        self.deep = mlp(width, settings.deep, dropout=settings.dropout)
        self.stacked = settings.structure == "stacked" or not settings.deep
        deep_width = settings.deep[-1] if settings.deep else width
        self.out = linear(deep_width if self.stacked else width + deep_width, inputs.outputs)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        inputs = self.joint(embedded, dense)
        first = inputs.expanded()
        x = first
        for number, cross in enumerate(self.crosses):
            x = cross(first, x if number else inputs)
        last = self.deep(x) if self.stacked else torch.cat([x, inputs.through(self.deep)], dim=1)
        logits: Tensor = self.out(last)
        return self.given(logits)
