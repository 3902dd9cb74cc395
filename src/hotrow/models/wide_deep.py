"""Wide & Deep (Cheng et al., 2016): a linear model and an MLP, trained together.

A row is a vector and, as its last value, the linear weight of the wide part. A row of one value is a weight
alone: a feature for the wide part only, such as a cross of two columns. Features may differ in dim. The sum of a
group's weights, and its share in the MLP's first layer, are computed on unique samples. Weights of dense inputs start
at 0, those of rows are scaled: `weight_scales`. Several outputs share the wide part: `Shared`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

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


class WideDeepSettings(ModelSettings):
    """`deep` are the hidden layers of the MLP."""

    extra_row_values: ClassVar[int] = 1

    name: Literal["wide_deep"] = "wide_deep"
    deep: Widths = (128, 64)
    dropout: float = Field(0.0, ge=0, lt=1)

    def build(self, inputs: ModelInputs) -> WideDeep:
        return WideDeep(self, inputs)


class WideDeep(RankingModel):
    """Linear terms and an MLP, added up."""

    def __init__(self, settings: WideDeepSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        width = inputs.width - len(inputs.names) + inputs.dense
        if width == 0:
            raise SettingsError(
                "wide_deep has nothing for its deep part: each row is one linear weight, and there are no "
                "dense inputs. Give a table rows of at least 2 values."
            )
        self.places = {name: place for place, name in enumerate(inputs.names)}
        self.register_buffer("weight_scales", weight_scales([inputs.dims[name] for name in inputs.names]))
        self.weight_scales: Tensor
        if inputs.dense:
            self.dense_weights = dense_weights(inputs.dense)
        self.deep = mlp(width, settings.deep, inputs.outputs, settings.dropout)
        self.shared = Shared(inputs.outputs)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        dense = self.dense_inputs(dense)
        vectors, terms = zip(*(self._split(group) for group in self.unique_groups(embedded)), strict=True)
        logits = self.given(Joint(self.inputs.names, vectors, dense).through(self.deep))
        for group, terms_S in zip(vectors, terms, strict=True):
            logits = self.shared(logits, expand(terms_S, group.inverse))
        return logits if dense is None else self.shared(logits, self.dense_weights(dense).squeeze(1))

    def _split(self, group: PooledGroup) -> tuple[PooledGroup, Tensor]:
        """The vectors of a group without their last values, and for each unique sample the scaled sum of those."""
        parts = torch.split(group.rows, list(group.dims), dim=1)
        vectors = torch.cat([part[:, :-1] for part in parts], dim=1)
        weights_SF = torch.stack([part[:, -1] for part in parts], dim=1)
        scales_F = torch.stack([self.weight_scales[self.places[name]] for name in group.features])
        dims = tuple(dim - 1 for dim in group.dims)
        return PooledGroup(group.features, dims, vectors, group.inverse), (weights_SF * scales_F).sum(dim=1)
