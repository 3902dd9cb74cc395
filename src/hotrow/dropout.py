"""Dropout of what a feature looks up, while training: whole fields of a sample, or rows of a sequence.

A pooled feature's vector is zeros for a share of the samples, each drawn by itself; a sequence has zeros in place of a
share of its rows. What is kept is divided by the share that is kept, so the mean stays. Draws are of torch's generator.

Unique samples stay unique: a feature that drops is a group of its own, with a row of zeros more, which the inverse of
dropped samples leads to. Rows of a sequence are drawn once for all samples that share them, as dropout within a
model's encoder is: to spell them out would undo what deduplication saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from hotrow.embedded import Embedded, JaggedRows, PooledGroup


def with_dropout(embedded: Embedded, shares: Mapping[str, float]) -> Embedded:
    """The same with shares of some features dropped; draws come in the order of `shares`, whatever the groups are."""
    sizes = {name: _samples(group) for group in embedded.groups for name in group.features}
    device = {name: group.rows.device for group in embedded.groups for name in group.features}
    sequences = {name: embedded.sequence(name) for name in embedded.sequence_features}
    kept: dict[str, Tensor] = {}
    for name, share in shares.items():
        if name in sizes:
            kept[name] = _drawn(sizes[name], share, device[name])
        elif name in sequences:
            sequences[name] = _rows_dropped(sequences[name], share)
    pooled = [part for group in embedded.groups for part in _parts(group, kept, shares)]
    return Embedded(pooled, sequences)


def _samples(group: PooledGroup) -> int:
    return len(group.rows if group.inverse is None else group.inverse)


def _drawn(count: int, share: float, device: torch.device) -> Tensor:
    """True for what is kept."""
    return torch.rand(count, device=device) >= share


def _rows_dropped(sequence: JaggedRows, share: float) -> JaggedRows:
    kept = _drawn(len(sequence.values), share, sequence.values.device).to(sequence.values.dtype)
    return replace(sequence, values=sequence.values * (kept / (1 - share))[:, None])


def _parts(group: PooledGroup, kept: Mapping[str, Tensor], shares: Mapping[str, float]) -> Iterator[PooledGroup]:
    """The group in pieces: features that drop each by itself, and those between them together."""
    if not any(name in kept for name in group.features):
        yield group
        return
    ends = list(accumulate(group.dims))
    first = 0
    for i, name in enumerate(group.features):
        if name in kept:
            if first < i:
                yield _piece(group, ends, first, i)
            yield _fields_dropped(_piece(group, ends, i, i + 1), kept[name], shares[name])
            first = i + 1
    if first < len(group.features):
        yield _piece(group, ends, first, len(group.features))


def _piece(group: PooledGroup, ends: list[int], first: int, last: int) -> PooledGroup:
    begin = ends[first - 1] if first else 0
    rows = group.rows[:, begin : ends[last - 1]]
    return PooledGroup(group.features[first:last], group.dims[first:last], rows, group.inverse)


def _fields_dropped(group: PooledGroup, kept: Tensor, share: float) -> PooledGroup:
    rows = group.rows / (1 - share)
    if group.inverse is None:
        return replace(group, rows=rows * kept.to(rows.dtype)[:, None])
    zeros = rows.new_zeros(1, rows.shape[1])
    inverse = torch.where(kept, group.inverse, torch.full_like(group.inverse, len(rows)))
    return replace(group, rows=torch.cat([rows, zeros]), inverse=inverse)
