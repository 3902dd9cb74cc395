"""`Embedded`: what looking a batch up gives a model. Rows are on unique samples until someone asks otherwise.

Pooled features of one group stand side by side in one tensor `[S, sum of dims]`, in the group's order, so
that taking all of them together costs nothing. A sequence feature has one row for each key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotrow.errors import BatchError, nearest


@dataclass(frozen=True)
class JaggedRows:
    """A sequence feature: `values[L, D]` split at `offsets[S+1]` over unique samples; `inverse[B]` or None."""

    values: Tensor
    offsets: Tensor
    inverse: Tensor | None

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def padded(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """`rows[S, T, D]` with zeros behind the end and `mask[S, T]`, True where there is a row.

        T is the longest sequence, or `length`, which keeps the *last* `length` rows of each.
        """
        lengths = self.lengths
        longest = int(lengths.max()) if len(lengths) else 0
        t = longest if length is None else length
        kept = lengths.clamp(max=t)
        mask = torch.arange(t, device=lengths.device)[None, :] < kept[:, None]
        if len(self.values) == 0:
            return self.values.new_zeros(len(lengths), t, self.values.shape[1]), mask
        at = (self.offsets[1:] - kept)[:, None] + torch.arange(t, device=lengths.device)[None, :]
        rows = self.values[at.clamp(max=len(self.values) - 1)]
        return rows * mask[..., None].to(rows.dtype), mask


@dataclass(frozen=True)
class PooledGroup:
    """The pooled features of one group: `rows[S, sum of dims]`, side by side, and the group's inverse."""

    features: tuple[str, ...]
    dims: tuple[int, ...]
    rows: Tensor
    inverse: Tensor | None


class Embedded:
    """The rows a batch asked for. `e[name]` is `[B, D]` for a pooled feature, `JaggedRows` for a sequence."""

    def __init__(self, pooled: Sequence[PooledGroup], sequences: Mapping[str, JaggedRows]) -> None:
        self._groups = tuple(pooled)
        self._sequences = dict(sequences)
        self._columns: dict[str, tuple[int, int, int]] = {}
        for g, group in enumerate(self._groups):
            start = 0
            for name, dim in zip(group.features, group.dims, strict=True):
                self._columns[name] = (g, start, start + dim)
                start += dim
        self._expanded: dict[int, Tensor] = {}

    @property
    def pooled_features(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def sequence_features(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def __getitem__(self, feature: str) -> Tensor | JaggedRows:
        return self._sequences[feature] if feature in self._sequences else self.vector(feature)

    def vector(self, feature: str) -> Tensor:
        """A pooled feature for every sample of the batch: `[B, D]`."""
        g, first, last = self._column(feature)
        return self._expand(g)[:, first:last]

    def unique(self, feature: str) -> tuple[Tensor, Tensor | None]:
        """A pooled feature on unique samples, `[S, D]`, and the inverse that expands it (None: nothing to expand)."""
        g, first, last = self._column(feature)
        return self._groups[g].rows[:, first:last], self._groups[g].inverse

    def sequence(self, feature: str) -> JaggedRows:
        """A sequence feature, on unique samples."""
        if feature not in self._sequences:
            raise BatchError(f'There is no sequence feature "{feature}".{nearest(feature, self._sequences)}')
        return self._sequences[feature]

    def vectors(self, features: Sequence[str] | None = None) -> Tensor:
        """Pooled features of every sample side by side: `[B, sum of dims]`; all of them if none are named."""
        names = self.pooled_features if features is None else tuple(features)
        if names == self.pooled_features:
            groups = [self._expand(g) for g in range(len(self._groups))]
            return groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)
        return torch.cat([self.vector(name) for name in names], dim=1)

    def to(self, device: torch.device | str) -> Embedded:
        """The same on `device`; gradients find their way back. One inverse that several share stays one."""
        moved: dict[int, Tensor] = {}

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else moved.setdefault(id(t), t.to(device))

        pooled = [replace(g, rows=g.rows.to(device), inverse=move(g.inverse)) for g in self._groups]
        sequences = {
            name: JaggedRows(s.values.to(device), s.offsets.to(device), move(s.inverse))
            for name, s in self._sequences.items()
        }
        return Embedded(pooled, sequences)

    def _column(self, feature: str) -> tuple[int, int, int]:
        if feature not in self._columns:
            raise BatchError(f'There is no pooled feature "{feature}".{nearest(feature, self._columns)}')
        return self._columns[feature]

    def _expand(self, g: int) -> Tensor:
        if g not in self._expanded:
            group = self._groups[g]
            self._expanded[g] = group.rows if group.inverse is None else group.rows.index_select(0, group.inverse)
        return self._expanded[g]
