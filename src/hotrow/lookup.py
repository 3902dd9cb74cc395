"""`Lookup`: one batch on its way through the tables, from unique keys to pooled rows and back to gradients.

The rows of all tables lie in one flat leaf tensor, table after table, so that autograd, a copy to an accelerator and
an exchange each see one tensor. The grouping says which lookups share a row; it is made once, here, and used by
the fetch, by pooling and by its gradient, which therefore needs no sort and no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow import _native
from hotrow.data.batch import Batch
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError
from hotrow.table import Feature, Table
from hotrow.tiers.router import Routed

_POOLINGS = ("sum", "mean", "sequence")


class Layout:
    """Which features of a kind of batch look up which tables; the same for every batch with the same groups."""

    def __init__(
        self, groups: tuple[tuple[str, ...], ...], tables: dict[str, Table], features: dict[str, Feature]
    ) -> None:
        order = {name: t for t, name in enumerate(tables)}
        missing = set(features) - {name for group in groups for name in group}
        if missing:
            have = ", ".join(name for group in groups for name in group)
            raise BatchError(f'The batch has no feature "{min(missing)}"; it has {have}.')

        def spec(name: str) -> tuple[int, int]:
            if name not in features:
                return -1, 0
            return order[features[name].table], _POOLINGS.index(features[name].pooling)

        self.native = _native.Layout([t.dim for t in tables.values()], [[spec(n) for n in g] for g in groups])
        self.pooled: list[tuple[tuple[str, ...], tuple[int, ...], int]] = []
        self.sequences: list[tuple[str, int, int, int]] = []  # feature, group, place in the group, dim
        for g, group in enumerate(groups):
            pooled = [n for n in group if n in features and features[n].pooling != "sequence"]
            dims = tuple(tables[features[n].table].dim for n in pooled)
            self.pooled.append((tuple(pooled), dims, sum(dims)))
            self.sequences += [
                (n, g, k, tables[features[n].table].dim)
                for k, n in enumerate(group)
                if n in features and features[n].pooling == "sequence"
            ]


@dataclass
class Lookup:
    """A batch, its grouping, and once fetched its rows."""

    batch: Batch
    layout: Layout
    grouping: Any
    routed: Routed
    training: bool
    rows: Tensor | None = None
    tickets: list[Any] | None = None
    starts: list[int] = field(default_factory=list)

    @property
    def keys(self) -> list[np.ndarray[Any, Any]]:
        """The unique keys of each table, in the order of its rows."""
        return [self.grouping.keys(t) for t in range(len(self.starts) - 1)]

    def embed(self) -> Embedded:
        """What a model sees; autograd leads from here to `rows.grad`."""
        if self.rows is None:
            raise BatchError("This lookup has no rows yet: fetch it before it is embedded.")
        results = _Pool.apply(self.rows, self)  # type: ignore[no-untyped-call]
        groups = self.batch.groups
        pooled = [
            PooledGroup(names, dims, rows, group.inverse)
            for (names, dims, width), rows, group in zip(self.layout.pooled, results, groups, strict=False)
            if width
        ]
        sequences = {}
        for (name, g, k, _), rows in zip(self.layout.sequences, results[len(groups) :], strict=True):
            s = groups[g].unique_size
            offsets = groups[g].offsets[k * s : (k + 1) * s + 1]
            sequences[name] = JaggedRows(rows, offsets - offsets[0], groups[g].inverse)
        return Embedded(pooled, sequences)

    def result_shapes(self) -> list[tuple[int, int] | None]:
        """One matrix for each group's pooled features, None if it has none; then one for each sequence."""
        groups = self.batch.groups
        shapes: list[tuple[int, int] | None] = [
            (group.unique_size, width) if width else None
            for group, (_, _, width) in zip(groups, self.layout.pooled, strict=True)
        ]
        for _, g, k, dim in self.layout.sequences:
            s, offsets = groups[g].unique_size, groups[g].offsets
            shapes.append((int(offsets[(k + 1) * s] - offsets[k * s]), dim))
        return shapes


class _Pool(torch.autograd.Function):
    """All features of a batch in one step of autograd: flat rows to result matrices, and gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lookup: Lookup) -> tuple[Tensor | None, ...]:
        results = [None if shape is None else torch.empty(shape) for shape in lookup.result_shapes()]
        lookup.grouping.forward(rows.detach().numpy(), [None if r is None else r.numpy() for r in results])
        ctx.lookup = lookup
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        lookup: Lookup = ctx.lookup
        given: list[Any] = []
        for grad, shape in zip(grads, lookup.result_shapes(), strict=True):
            if shape is None:
                given.append(None)
            elif grad is None:
                given.append(np.zeros(shape, np.float32))
            else:
                given.append(grad.float().contiguous().numpy())
        row_grads = torch.empty(lookup.starts[-1])
        lookup.grouping.backward(given, row_grads.numpy())
        return row_grads, None
