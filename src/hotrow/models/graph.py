"""GraphSAGE (Hamilton et al., 2017) on sampled neighbours of a user and an item, to say whether they belong together.

A node's vector is its own row and the mean of its neighbours' vectors, each through a linear layer of its own, added:

    h = relu(W own + V mean(neighbours))        and in the last layer without relu, brought to length 1

With two hops, the first layer runs on both ends and on each of their neighbours, the second on the ends. Users and
items have layers of their own. Both ends' vectors, their product and all other features go through an MLP.

Neighbours come as sequence features, `user_hop1` and so on, from the step `neighbours`; rows of all hops come from the
same two tables, so a node learns from every sample that draws it. An end without neighbours has the mean of nothing, 0.
Each sample draws its own neighbours, so unique samples save the lookups of the ends and their first product, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data.neighbours import hop
from hotrow.embedded import Embedded, JaggedRows, PooledGroup, expand
from hotrow.errors import BatchError, SettingsError
from hotrow.models.joint import Joint
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, linear, mlp


class GraphSettings(ModelSettings):
    """`between` are the two ends of a sample, `width` is a node's vector's, `deep` are hidden layers of the MLP."""

    name: Literal["graph"] = "graph"
    between: tuple[str, str] = ("user", "item")
    width: int = Field(64, ge=1)
    deep: Widths = (64,)
    dropout: float = Field(0.0, ge=0, lt=1)

    def build(self, inputs: ModelInputs) -> GraphModel:
        return GraphModel(self, inputs)


class Sage(nn.Module):
    """One layer: from a node's own vector and the mean of its neighbours' to its next vector."""

    def __init__(self, own: int, neighbours: int, width: int, last: bool) -> None:
        super().__init__()
        self.own = linear(own, width)
        self.neighbours = linear(neighbours, width, bias=False)
        self._last = last

    def forward(self, own: Tensor, mean: Tensor, inverse: Tensor | None = None) -> Tensor:
        """`[n, width]`, from `mean[n, *]` and `own[n, *]`, or the distinct ones of nodes that repeat and `inverse`."""
        h = expand(self.own(own), inverse) + self.neighbours(mean)
        return F.normalize(h, dim=1) if self._last else F.relu(h)


class End(nn.Module):
    """One end of a sample and its hops; layer l runs on all hops but the last l."""

    def __init__(self, dims: Sequence[int], width: int) -> None:
        super().__init__()
        hops = len(dims) - 1
        # What stands at each hop before each layer: rows first, then vectors of `width`.
        widths = [list(dims), *([width] * len(dims) for _ in range(hops))]
        self.layers = nn.ModuleList(
            nn.ModuleList(Sage(widths[at][h], widths[at][h + 1], width, at == hops - 1) for h in range(hops - at))
            for at in range(hops)
        )

    def forward(self, target: tuple[Tensor, Tensor | None], hops: Sequence[JaggedRows]) -> Tensor:
        """The end's vector for every sample, `[B, width]`; `target` is its rows on unique samples and their inverse."""
        first, *further = (sequence.expand() for sequence in hops)
        rows = [first.values, *(sequence.values for sequence in further)]
        own, inverse = target
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            means = [_mean(rows[0], first.offsets), *(_means(rows[h], rows[h - 1]) for h in range(1, len(layer)))]
            own, inverse = layer[0](own, means[0], inverse), None
            rows = [layer[h](rows[h - 1], means[h]) for h in range(1, len(layer))]
        return own


class GraphModel(RankingModel):
    """Both ends as GraphSAGE has them, beside all other features and dense inputs, and an MLP on them."""

    static_shapes = False

    def __init__(self, settings: GraphSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self.between = settings.between
        self.hops = {end: _hops(end, inputs) for end in self.between}
        used = {*self.between, *(name for names in self.hops.values() for name in names)}
        self.others = tuple(name for name in inputs.names if name not in used)
        self.ends = nn.ModuleList(
            End([inputs.dims[name] for name in (end, *self.hops[end])], settings.width) for end in self.between
        )
        width = 3 * settings.width + sum(inputs.dims[name] for name in self.others) + inputs.dense
        self.deep = mlp(width, settings.deep, inputs.outputs, settings.dropout)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        first, second = (
            layers(embedded.unique(end), [embedded.sequence(name) for name in self.hops[end]])
            for layers, end in zip(self.ends, self.between, strict=True)
        )
        pair = torch.cat([first, second, first * second], dim=1)
        groups = [PooledGroup(("pair",), (pair.shape[1],), pair, None), *self.unique_groups(embedded, self.others)]
        joint = Joint(("pair", *self.others), groups, self.dense_inputs(dense))
        return self.given(joint.through(self.deep))


def _hops(end: str, inputs: ModelInputs) -> tuple[str, ...]:
    if end not in inputs.pooled:
        raise SettingsError(
            f'graph: there is no pooled feature "{end}"; name both ends in the model\'s settings, '
            f'between = ["user", "item"].'
        )
    found: list[str] = []
    while (name := hop(end, len(found) + 1)) in inputs.sequences:
        found.append(name)
    if not found:
        raise SettingsError(
            f'graph: there is no sequence feature "{hop(end, 1)}" with the neighbours of {end}. Add the step: '
            f'[[data.steps]] name = "neighbours", graph = FILE, made by: hotrow graph DATA --out FILE'
        )
    return tuple(found)


def _mean(rows: Tensor, offsets: Tensor) -> Tensor:
    """The mean of each sample's rows, 0 where it has none."""
    lengths = offsets[1:] - offsets[:-1]
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    total = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, owner, rows)
    return total / lengths.clamp(min=1)[:, None].to(rows.dtype)


def _means(rows: Tensor, parents: Tensor) -> Tensor:
    """The mean of each parent's rows, which all have as many."""
    if len(parents) == 0:
        return rows.new_zeros(0, rows.shape[1])
    if len(rows) % len(parents):
        raise BatchError(
            f"{len(parents)} neighbours have {len(rows)} neighbours of their own; each must have as many as the others."
        )
    return rows.view(len(parents), -1, rows.shape[1]).mean(dim=1)
