"""`Embedded`: what looking a batch up gives a model. Rows are on unique samples until someone asks otherwise.

Pooled features of one group stand side by side in one tensor `[S, sum of dims]`, in the group's order, so
that taking all of them together costs nothing. A sequence feature has one row for each stored key, and windows
into them where sequences overlap. A module asks for the form it wants:

    embedded.unique("user")         rows[S, D] and the inverse that expands them: compute on S samples, then
    expand(rows, inverse)           [B, D]
    embedded.sequence("clicks")     `JaggedRows`, on unique samples; .apart() without overlaps, .padded() as a tensor
    embedded.vector("user")         [B, D], every sample
    embedded.expand()               everything so, for modules that know nothing of unique samples
    pairs(history, target)          what needs two groups is computed once for each distinct pair of their samples

Samples that share a row add their gradients up where they are expanded, in the order of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.data.batch import ranges
from hotrow.errors import BatchError, nearest


@dataclass(frozen=True)
class JaggedRows:
    """A sequence feature: `values[L, D]` split at `offsets[S+1]` over unique samples; `inverse[B]` or None.

    With `begins[S]` a sequence begins there instead, sequences may overlap, and `offsets` only say how long they are.
    """

    values: Tensor
    offsets: Tensor
    inverse: Tensor | None
    begins: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def starts(self) -> Tensor:
        """Where in `values` each unique sample's rows begin."""
        return self.offsets[:-1] if self.begins is None else self.begins

    @property
    def longest(self) -> int:
        """The rows of the longest sequence."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def apart(self) -> JaggedRows:
        """The same with sequences one after another: those that overlap are spelled out, samples are not."""
        if self.begins is None:
            return self
        at, offsets = ranges(self.begins, self.lengths)
        return JaggedRows(self.values.index_select(0, at), offsets, self.inverse)

    def expand(self) -> JaggedRows:
        """The same with every sample spelled out: no inverse and no overlap."""
        if self.inverse is None:
            return self.apart()
        at, offsets = ranges(self.starts.index_select(0, self.inverse), self.lengths.index_select(0, self.inverse))
        return JaggedRows(self.values.index_select(0, at), offsets, None)

    def padded(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """`rows[S, T, D]` with zeros behind the end and `mask[S, T]`, True where there is a row.

        T is the longest sequence, or `length`, which keeps the *last* `length` rows of each.
        """
        lengths = self.lengths  # shapes, not len(): torch.export takes them for symbols
        t = self.longest if length is None else length
        kept = lengths.clamp(max=t)
        mask = torch.arange(t, device=lengths.device)[None, :] < kept[:, None]
        if self.values.shape[0] == 0:
            return self.values.new_zeros(lengths.shape[0], t, self.values.shape[1]), mask
        at = (self.starts + lengths - kept)[:, None] + torch.arange(t, device=lengths.device)[None, :]
        rows = self.values[at.clamp(max=self.values.shape[0] - 1)]
        return rows * mask[..., None].to(rows.dtype), mask


@dataclass(frozen=True)
class PooledGroup:
    """Vectors of features that repeat together: `rows[S, sum of dims]`, side by side, and the group's inverse."""

    features: tuple[str, ...]
    dims: tuple[int, ...]
    rows: Tensor
    inverse: Tensor | None

    def expand(self) -> PooledGroup:
        """The same with a row for every sample."""
        return replace(self, rows=expand(self.rows, self.inverse), inverse=None)


class Embedded:
    """The rows a batch asked for. `e[name]` is `[B, D]` for a pooled feature, `JaggedRows` for a sequence."""

    def __init__(self, pooled: Sequence[PooledGroup], sequences: Mapping[str, JaggedRows]) -> None:
        self._groups = tuple(pooled)
        self._sequences = dict(sequences)
        self._expanded: dict[int, Tensor] = {}

    @cached_property
    def _columns(self) -> dict[str, tuple[int, int, int]]:
        """For each pooled feature its group, and where in the group's rows it begins and ends."""
        columns = {}
        for g, group in enumerate(self._groups):
            ends = list(accumulate(group.dims))
            for name, dim, end in zip(group.features, group.dims, ends, strict=True):
                columns[name] = (g, end - dim, end)
        return columns

    @property
    def pooled_features(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def sequence_features(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    @property
    def groups(self) -> tuple[PooledGroup, ...]:
        """The pooled features, group by group, on unique samples."""
        return self._groups

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
        names = None if features is None else tuple(features)
        if not names and not self._groups:
            raise BatchError("No feature is pooled here, so there are no vectors; `sequence(feature)` gives sequences.")
        if names is None or names == self.pooled_features:
            groups = [self._expand(g) for g in range(len(self._groups))]
            return groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)
        return torch.cat([self.vector(name) for name in names], dim=1)

    def expand(self) -> Embedded:
        """The same with every sample spelled out: no inverse anywhere, and no overlapping sequences."""
        return Embedded([g.expand() for g in self._groups], {n: s.expand() for n, s in self._sequences.items()})

    def to(self, device: torch.device | str) -> Embedded:
        """The same on `device`; gradients find their way back. One inverse that several share stays one."""
        moved: dict[int, Tensor] = {}

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else moved.setdefault(id(t), t.to(device))

        pooled = [replace(g, rows=g.rows.to(device), inverse=move(g.inverse)) for g in self._groups]
        sequences = {
            name: JaggedRows(s.values.to(device), s.offsets.to(device), move(s.inverse), move(s.begins))
            for name, s in self._sequences.items()
        }
        return Embedded(pooled, sequences)

    def _column(self, feature: str) -> tuple[int, int, int]:
        if feature not in self._columns:
            raise BatchError(f'There is no pooled feature "{feature}".{nearest(feature, self._columns)}')
        return self._columns[feature]

    def _expand(self, g: int) -> Tensor:
        if g not in self._expanded:
            self._expanded[g] = expand(self._groups[g].rows, self._groups[g].inverse)
        return self._expanded[g]


def expand(rows: Tensor, inverse: Tensor | None) -> Tensor:
    """From unique samples to all of them."""
    return rows if inverse is None else rows.index_select(0, inverse)


class Pairs(NamedTuple):
    """Distinct pairs of two groups' unique samples: the first's and the second's of each, and each sample's pair."""

    first: Tensor
    second: Tensor
    inverse: Tensor | None


def pairs(first: tuple[int, Tensor | None], second: tuple[int, Tensor | None], device: torch.device) -> Pairs:
    """The pairs there are in the batch, for two groups given by their number of unique samples and their inverse."""
    (count, inverse), (others, other) = first, second
    if inverse is other and count == others:  # one group: a unique sample is a pair
        each = torch.arange(count, device=device)
        return Pairs(each, each, inverse)
    if inverse is None:
        assert other is not None
        return Pairs(torch.arange(count, device=device), other, None)
    if other is None:
        return Pairs(inverse, torch.arange(others, device=device), None)
    found, which = torch.unique(inverse * others + other, return_inverse=True)
    return Pairs(found // others, found % others, which)
