"""Wide & Deep (Cheng et al., 2016): a linear model and an MLP, trained together.

A row is a vector and, as its last value, the linear weight of the wide part. A row of one value is a weight
alone: a feature for the wide part only, such as a cross of two columns. Features may differ in dim.
"""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hotrow.embedded import Embedded
from hotrow.errors import SettingsError
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, joined, linear, mlp


class WideDeepSettings(ModelSettings):
    """`deep` are the hidden layers of the MLP."""

    wide: ClassVar[bool] = True

    name: Literal["wide_deep"] = "wide_deep"
    deep: Widths = (128, 64)
    dropout: float = Field(0.0, ge=0, lt=1)

    def build(self, inputs: ModelInputs) -> WideDeep:
        return WideDeep(self, inputs)


class WideDeep(RankingModel):
    """Linear terms and an MLP, added up."""

    def __init__(self, settings: WideDeepSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        ends = list(accumulate(inputs.dims[name] for name in inputs.names))
        is_weight = torch.zeros(inputs.width, dtype=torch.bool)
        is_weight[torch.tensor(ends) - 1] = True
        self.register_buffer("weight_columns", is_weight.nonzero().squeeze(1), persistent=False)
        self.register_buffer("vector_columns", (~is_weight).nonzero().squeeze(1), persistent=False)
        self.weight_columns: Tensor
        self.vector_columns: Tensor
        if len(self.vector_columns) + inputs.dense == 0:
            raise SettingsError(
                "wide_deep has nothing for its deep part: each row is one linear weight, and there are no "
                "dense inputs. Give a table rows of at least 2 values."
            )
        if inputs.dense:
            self.dense_weights = linear(inputs.dense, 1, bias=False)
        self.deep = mlp(len(self.vector_columns) + inputs.dense, settings.deep, 1, settings.dropout)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        rows = self.side_by_side(embedded)
        dense = self.dense_inputs(dense)
        logits: Tensor = self.deep(joined(rows.index_select(1, self.vector_columns), dense)).squeeze(1)
        logits = logits + rows.index_select(1, self.weight_columns).sum(dim=1)
        return logits if dense is None else logits + self.dense_weights(dense).squeeze(1)
