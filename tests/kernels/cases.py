"""Random tables and batches for the tests of kernels, and their results by the twins in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.kernels import (
    BatchShape,
    FeatureSpec,
    Grouping,
    GroupSpec,
    Members,
    Staged,
    Tables,
    TableSpec,
    group,
    lookup,
    update,
)
from hotrow.kernels.backward import update_twin
from hotrow.kernels.expand import contract_twin
from hotrow.kernels.pooling import lookup_twin


@dataclass
class Case:
    """Tables, a batch's shape, and the batch."""

    tables: Tables
    shape: BatchShape
    slots: Tensor
    offsets: Tensor
    weights: Tensor | None
    members: Members | None
    staged: Staged | None
    handed: Tensor | None

    @property
    def grouping(self) -> Grouping:
        return group(self.tables, self.shape, self.slots, self.offsets, self.weights)

    def step(self) -> None:
        """Group, look up and update, by all kernels that a batch like this takes."""
        results = lookup(
            self.tables, self.shape, self.slots, self.offsets, self.weights, members=self.members, staged=self.staged
        )
        grads = torch.randn(self.shape.size, device=results.device)
        update(
            self.tables,
            self.shape,
            self.grouping,
            grads,
            members=self.members,
            staged=self.staged,
            handed=self.handed,
            seed=torch.ones(1, dtype=torch.int64, device=results.device),
        )

    def expected_results(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """By the twin, added up in float64."""
        nothing = torch.empty(0, dtype=torch.int64)
        rows, begins = (self.staged.rows, self.staged.begins) if self.staged else (nothing.float(), self._zeros())
        members = self.members or Members(nothing, nothing)
        return lookup_twin(
            *_host(self.tables.values, rows, begins, self.slots, self.offsets, self.weights, *members),
            self.shape.features.cpu(),
            self.shape.size,
            dtype,
            torch.float64,
        )

    def expected_update(
        self, grads: Tensor, seed: int = 0, compute: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, state and handed gradients after an update, by the twin."""
        tables, g = self.tables, self.grouping
        grads = grads.cpu()
        if self.members is not None:
            assert self.shape.expanded
            grads = contract_twin(grads, *_host(*self.members, self.shape.segments), self.shape.unique_size)
        values, state = tables.values.cpu().clone(), tables.state.cpu().clone()
        handed = torch.zeros(0) if self.handed is None else torch.zeros(self.handed.shape)
        begins = self.staged.begins if self.staged else self._zeros()
        update_twin(
            *_host(grads, g.rows, g.places, g.factors),
            values,
            state,
            handed,
            *_host(begins, tables.layout, tables.hyper, torch.tensor([seed])),
            [c.kind for c in tables.classes],
            self.shape.unit,
            compute,
        )
        return values, state, handed

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.tables.layout), dtype=torch.int64)


def make(
    device: str,
    specs: Sequence[TableSpec],
    groups: Sequence[tuple[Sequence[tuple[int, str]], int, int | None]],
    *,
    longest: int = 5,
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
    hot: float = 0.3,
    seed: int = 0,
) -> Case:
    """A batch of `groups`: features as (table, pooling), unique samples, and what to expand to.

    A share `hot` of the lookups is of one row of the table, so that some rows are long.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = Tables(specs, device, dtype)
    tables.values.copy_(torch.randn(len(tables.values), generator=generator))
    tables.state.copy_(torch.rand(len(tables.state), generator=generator))
    slots, offsets, weights, members, shapes = [], [], [], [], []
    for features, samples, expanded in groups:
        lengths = torch.randint(0, longest + 1, (len(features), samples), generator=generator)
        counts = lengths.sum(1).tolist()
        named = []
        for (table, pooling), count in zip(features, counts, strict=True):
            spec = specs[table]
            number = torch.randint(0, spec.rows + spec.staged, (count,), generator=generator)
            number[torch.rand(count, generator=generator) < hot] = min(1, spec.rows + spec.staged - 1)
            staged = number - spec.rows + tables.staged_first[table]
            slots.append(torch.where(number < spec.rows, number + tables.first[table], staged))
            named.append(FeatureSpec(table, pooling, count if pooling == "sequence" else 0))
        offsets.append(torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths.reshape(-1), 0)]))
        weight = torch.randn(sum(counts), generator=generator)
        spans = torch.cat([torch.full((c,), f[1] != "sequence") for f, c in zip(features, counts, strict=True)])
        weights.append(torch.where(spans, weight, 1.0))
        shapes.append(GroupSpec(named, samples, sum(counts), expanded))
        if expanded is not None:
            inverse = torch.randint(0, samples, (expanded,), generator=generator)
            members.append(Members.of(inverse, samples))
    most = tables.staged_size
    return Case(
        tables,
        BatchShape(tables, shapes),
        torch.cat(slots).to(torch.int32).to(device),
        torch.cat(offsets).to(device),
        torch.cat(weights).to(device) if weighted else None,
        _joined(members, device),
        Staged(torch.randn(most, generator=generator).to(device), tables.staged_begins) if most else None,
        torch.zeros(most, device=device) if most else None,
    )


def _joined(members: list[Members], device: str) -> Members | None:
    if not members:
        return None
    starts, shift = [], 0
    for each in members:
        starts.append(each.starts + shift)
        shift += len(each.samples)
    return Members(torch.cat([m.samples for m in members]).to(device), torch.cat(starts).to(device))


def _host(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.cpu() for t in tensors)
