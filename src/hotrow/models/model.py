"""`RankingModel`: rows and dense inputs in, one logit a sample out, or several. Plain PyTorch, no tables of its own.

A model's settings build it: `settings.build(inputs)`. `extra_row_values = 1` says that every row has one value
more than its vector: the last is the feature's linear weight, so Wide&Deep and DeepFM need no second lookup. The
price is that a vector and its weight share an optimizer, and under row-wise Adagrad one accumulator, which the weight's
far larger gradient fills: it would take steps of sqrt(dim) times the rate. `weight_scales` takes that back.

A model computes on unique samples as far as samples do not differ: its first linear layer too (`Joint`). A sequence
that it has no other use for is averaged, on unique samples. All linear layers start from Xavier-normal weights and
zero biases, drawn from torch's own generator; linear weights of dense inputs start at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data.batch import ranges
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError, SettingsError
from hotrow.models.joint import Joint
from hotrow.settings import Settings
from hotrow.table import Feature

Widths = tuple[Annotated[int, Field(ge=1)], ...]
"""The sizes of an MLP's hidden layers, first to last."""


@dataclass(frozen=True)
class ModelInputs:
    """What a model is given: features, the dim of each one's rows, and how many dense inputs there are.

    `outputs` is how many numbers a sample the objective reads, where a model is not made for an objective of its own.
    """

    features: Sequence[Feature]
    dims: Mapping[str, int]
    dense: int = 0
    outputs: int = 1

    def __post_init__(self) -> None:
        if not self.features:
            raise SettingsError("A model needs at least one feature.")
        for feature in self.features:
            if feature.name not in self.dims:
                raise SettingsError(f"Feature {feature.name} has no dim; give the dim of its table's rows.")

    @cached_property
    def pooled(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features if f.pooling != "sequence")

    @cached_property
    def sequences(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features if f.pooling == "sequence")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All features in the order models see them: pooled ones, then sequences."""
        return self.pooled + self.sequences

    @property
    def width(self) -> int:
        """How many values all features have side by side."""
        return sum(self.dims[name] for name in self.names)

    def common_dim(self, model: str) -> int:
        """The dim all features share; refuses inputs that have several."""
        first = self.names[0]
        for name in self.names:
            if self.dims[name] != self.dims[first]:
                raise SettingsError(
                    f"{model} takes dot products between features, so their rows need one dim: {first} has "
                    f"{self.dims[first]}, {name} has {self.dims[name]}. Give their tables the same dim, or "
                    f"choose dcnv2 or wide_deep."
                )
        return self.dims[first]


class ModelSettings(Settings):
    """The base of every model's settings."""

    extra_row_values: ClassVar[int] = 0
    """Values behind each row's dim: 1 where a row ends with a linear weight."""

    def build(self, inputs: ModelInputs) -> RankingModel:
        """The model, with fresh weights."""
        raise NotImplementedError


class RankingModel(nn.Module):
    """Scores samples. A subclass says how in `forward` and finds its inputs by the methods below."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.inputs = inputs

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        """Logits `[B]`, or `[B, outputs]` where there are to be several."""
        raise NotImplementedError

    def given(self, out_BO: Tensor) -> Tensor:
        """What the last layer gives, as the model gives it."""
        return out_BO.squeeze(1) if self.inputs.outputs == 1 else out_BO

    def joint(self, embedded: Embedded, dense: Tensor | None) -> Joint:
        """All features, pooled ones and then sequences, and the dense inputs."""
        return Joint(self.inputs.names, self.unique_groups(embedded), self.dense_inputs(dense))

    def unique_groups(self, embedded: Embedded, features: Sequence[str] | None = None) -> list[PooledGroup]:
        """Vectors on unique samples, group by group, of pooled features and of averaged sequences; all by default.

        A sequence may come averaged already, as a pooled feature.
        """
        names = set(self.inputs.names if features is None else features)
        groups = [part for group in embedded.groups if (part := _of_group(group, names)) is not None]
        averaged = (name for name in self.inputs.sequences if name in names.difference(embedded.pooled_features))
        groups += [mean_of(name, embedded.sequence(name)) for name in averaged]
        missing = names - {name for group in groups for name in group.features}
        if missing:
            raise BatchError(f'The batch has no rows for feature "{min(missing)}".')
        return groups

    def dense_inputs(self, dense: Tensor | None) -> Tensor | None:
        """The dense inputs `[B, n]`, or None for a model without; refuses another number of them."""
        given = 0 if dense is None else dense.shape[1]
        if given != self.inputs.dense:
            raise BatchError(f"The model takes {self.inputs.dense} dense inputs, the batch has {given}.")
        return dense if given else None


def mean_of(name: str, sequence: JaggedRows) -> PooledGroup:
    """The mean row of each unique sample, zeros where there is none, under the sequence's name."""
    dim = sequence.values.shape[1]
    if len(sequence.values):
        at, offsets = ranges(sequence.starts, sequence.lengths)
        means = F.embedding_bag(at, sequence.values, offsets, mode="mean", include_last_offset=True)
    else:
        means = sequence.values.new_zeros(len(sequence.lengths), dim)
    return PooledGroup((name,), (dim,), means, sequence.inverse)


def _of_group(group: PooledGroup, names: Collection[str]) -> PooledGroup | None:
    """Those of a group's features; None if it has none of them."""
    kept = [i for i, name in enumerate(group.features) if name in names]
    if len(kept) == len(group.features):
        return group
    if not kept:
        return None
    parts = torch.split(group.rows, list(group.dims), dim=1)
    rows = torch.cat([parts[i] for i in kept], dim=1)
    return PooledGroup(tuple(group.features[i] for i in kept), tuple(group.dims[i] for i in kept), rows, group.inverse)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer with Xavier-normal weights and zero bias."""
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def weight_scales(dims: Sequence[int]) -> Tensor:
    """What the linear weights at the end of rows of these dims count: 1 / sqrt(dim).

    Row-wise Adagrad then moves a weight by its rate, as in a table of its own; Adam and Adagrad by 1 / sqrt(dim) of it,
    SGD by 1 / dim. Undivided, a table rate of 0.05 costs Wide & Deep 0.02 of AUC on a Criteo sample.
    """
    return torch.tensor(dims, dtype=torch.get_default_dtype()).rsqrt()


class Shared(nn.Module):
    """What a model adds to its last layer, `[B]`: with several outputs each has a factor for it, which starts at 1.

    A row has one linear weight, so all outputs share it.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        if outputs > 1:
            self.factors = nn.Parameter(torch.ones(outputs))
        self._outputs = outputs

    def forward(self, out: Tensor, terms_B: Tensor) -> Tensor:
        return out + terms_B if self._outputs == 1 else out + terms_B[:, None] * self.factors


def dense_weights(inputs: int) -> nn.Linear:
    """The linear weights of dense inputs, which start at 0 as the inputs may be of any size."""
    layer = nn.Linear(inputs, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def mlp(inputs: int, widths: Sequence[int], outputs: int | None = None, dropout: float = 0.0) -> nn.Sequential:
    """Hidden layers with ReLU (and dropout), then, if `outputs` is given, a linear layer to them."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [linear(inputs, width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        inputs = width
    if outputs is not None:
        layers.append(linear(inputs, outputs))
    return nn.Sequential(*layers)
