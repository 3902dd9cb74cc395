"""`Joint`: features and dense inputs side by side, as a model's first layer sees them, on unique samples.

A linear layer on inputs that stand side by side is the sum of its shares for each group of them. `linear` computes
a group's share on its unique samples and expands the result, so that the widest layer of most models costs what
the unique samples cost; only products between groups need `expanded`. The shares are added in another order than one
product over all inputs would: the last bits of a float may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.embedded import PooledGroup, expand

Span = tuple[int, int]


class Joint:
    """Features in a given order, whichever groups they stand in, then dense inputs."""

    def __init__(self, order: Sequence[str], groups: Sequence[PooledGroup], dense: Tensor | None) -> None:
        self.dense = dense
        self.groups = groups
        dim_of = {name: dim for group in groups for name, dim in zip(group.features, group.dims, strict=True)}
        self.width = sum(dim_of[name] for name in order)
        ends = accumulate(dim_of[name] for name in order)
        self._spans = {name: (end - dim_of[name], end) for name, end in zip(order, ends, strict=True)}

    def expanded(self) -> Tensor:
        """Every sample's inputs, `[B, inputs]`."""
        return self.features() if self.dense is None else torch.cat([self.features(), self.dense], dim=1)

    def features(self) -> Tensor:
        """Every sample's features, `[B, width]`."""
        rows = torch.cat([expand(group.rows, group.inverse) for group in self.groups], dim=1)
        spans = [self._spans[name] for group in self.groups for name in group.features]
        if spans != sorted(spans):
            # Where in `rows` each column of the right order stands.
            rows = rows.index_select(1, torch.argsort(_columns(tuple(spans), str(rows.device))))
        return rows

    def linear(self, layer: nn.Linear) -> Tensor:
        """The layer on every sample's inputs, `[B, outputs]`."""
        total: Tensor | None = layer.bias
        whole = [group for group in self.groups if group.inverse is None]
        if whole or self.dense is not None:
            total = F.linear(*self._inputs(layer, whole, self.dense), layer.bias)
        for inverse, groups in _by_inverse(self.groups):
            share = F.linear(*self._inputs(layer, groups, None)).index_select(0, inverse)
            total = share if total is None else total + share
        assert total is not None
        return total

    def through(self, layers: nn.Sequential) -> Tensor:
        """An MLP, its first layer on unique samples."""
        first, *others = layers
        assert isinstance(first, nn.Linear)
        x = self.linear(first)
        for layer in others:
            x = layer(x)
        return x

    def _inputs(self, layer: nn.Linear, groups: Sequence[PooledGroup], dense: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows of these groups, and dense inputs, side by side, and the columns of the layer that are theirs."""
        rows = [group.rows for group in groups]
        spans = [self._spans[name] for group in groups for name in group.features]
        if dense is not None:
            rows.append(dense)
            spans.append((self.width, self.width + dense.shape[1]))
        weight = layer.weight
        if spans != sorted(spans) or sum(last - first for first, last in spans) != layer.in_features:
            weight = weight.index_select(1, _columns(tuple(spans), str(weight.device)))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1), weight


def _by_inverse(groups: Sequence[PooledGroup]) -> list[tuple[Tensor, list[PooledGroup]]]:
    """Groups with an inverse, those that share one together."""
    found: dict[int, tuple[Tensor, list[PooledGroup]]] = {}
    for group in groups:
        if group.inverse is not None:
            found.setdefault(id(group.inverse), (group.inverse, []))[1].append(group)
    return list(found.values())


@lru_cache(maxsize=1024)
def _columns(spans: tuple[Span, ...], device: str) -> Tensor:
    """The columns of these spans, one span after another."""
    with torch.inference_mode(False):  # they are kept, and may be needed in training
        return torch.cat([torch.arange(first, last, device=device) for first, last in spans])
