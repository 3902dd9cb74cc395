# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""For each lookup of a batch, in the batch's order: its row's slot, where its result stands, and its factor.

Places are int32 and counted in the shape's `unit`, so that a place costs the backward pass four bytes. A lookup's
factor is what its row is multiplied by on the way into the result: its weight, divided by the bag's total where the
pooling is a mean; batches with neither have no factors. Slots are made here only if keys are row numbers within
their tables; where keys are arbitrary, who finds the rows gives the slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import jit, kernel, tl
from hotrow.kernels.pooling import bag_lookups, feature_of
from hotrow.kernels.shape import (
    CELLS,
    FEATURE_COLUMNS,
    LOOKUPS,
    MEAN,
    OFFSETS,
    POOLING,
    SEQUENCE,
    STRIDE,
    TABLE_SLOT,
    UNIQUE_OUT,
)

WIDE = 8  # lookups of a cell that are written side by side


@jit
def _cell_lookups(at, offsets, cell, live):
    """The first lookup of each cell and the one behind its last; dead cells have none."""
    offsets += tl.load(at + OFFSETS)
    shift = tl.load(at + LOOKUPS)
    if tl.load(at + POOLING) == SEQUENCE:
        begin = (tl.load(offsets) + shift + cell).to(tl.int32)
        end = begin + live.to(tl.int32)
    else:
        begin, end = bag_lookups(offsets, shift, cell, live)
    return begin, end


@kernel("even")
def places_kernel(
    places, slots, factors, numbers, offsets, weights, features, units, even,
    FEATURES: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr,
    FACTORS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    feature, block = feature_of(tl.program_id(0), units, even, FEATURES)
    at = features + feature * FEATURE_COLUMNS
    cell = block * TILE + tl.arange(0, TILE)
    live = cell < tl.load(at + CELLS)
    begin, end = _cell_lookups(at, offsets, cell, live)
    length = end - begin
    longest = tl.max(length, 0)
    wide = tl.arange(0, WIDE)
    place = ((tl.load(at + UNIQUE_OUT) + cell.to(tl.int64) * tl.load(at + STRIDE)) // UNIT).to(tl.int32)
    first = tl.load(at + TABLE_SLOT).to(tl.int32)
    pooling = tl.load(at + POOLING)
    share = tl.full([TILE], 1.0, tl.float32)
    if FACTORS and pooling == MEAN:
        if WEIGHTED:
            total = tl.zeros([TILE], tl.float32)
            for k in range(longest):
                total += tl.load(weights + begin + k, mask=k < length, other=0.0)
        else:
            total = tl.maximum(length, 1).to(tl.float32)
        share = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    if longest == 1:
        has = length == 1
        tl.store(places + begin, place, mask=has)
        if NUMBERS:
            tl.store(slots + begin, first + tl.load(numbers + begin, mask=has, other=0).to(tl.int32), mask=has)
        if FACTORS:
            factor = share
            if WEIGHTED:
                weight = tl.load(weights + begin, mask=has, other=0.0)
                factor = tl.where(pooling == SEQUENCE, 1.0, share * weight)
            tl.store(factors + begin, factor, mask=has)
    else:
        for k in range(0, longest, WIDE):
            lookup = begin[:, None] + (k + wide)[None, :]
            has = (k + wide)[None, :] < length[:, None]
            tl.store(places + lookup, tl.broadcast_to(place[:, None], [TILE, WIDE]), mask=has)
            if NUMBERS:
                number = tl.load(numbers + lookup, mask=has, other=0).to(tl.int32)
                tl.store(slots + lookup, first + number, mask=has)
            if FACTORS:
                factor = tl.broadcast_to(share[:, None], [TILE, WIDE])
                if WEIGHTED:
                    weight = tl.load(weights + lookup, mask=has, other=0.0)
                    factor = tl.where(pooling == SEQUENCE, 1.0, factor * weight)
                tl.store(factors + lookup, factor, mask=has)


def places_twin(
    numbers: Tensor | None, offsets: Tensor, weights: Tensor | None, features: Tensor, lookups: int, unit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `places_kernel` computes: places, slots and factors, each `[lookups]`."""
    device = offsets.device
    places = torch.zeros(lookups, dtype=torch.int32, device=device)
    slots = torch.zeros(lookups, dtype=torch.int32, device=device)
    factors = torch.ones(lookups, device=device)
    for row in features.tolist():
        offset, shift, cells, _, stride, pooling, _, out, _, _, first, *_ = row
        if pooling == 2:
            start = int(offsets[offset]) + shift
            ends = torch.arange(start, start + cells + 1, device=device)
        else:
            ends = offsets[offset : offset + cells + 1] + shift
        span = slice(int(ends[0]), int(ends[-1]))
        cell = torch.repeat_interleave(torch.arange(cells, device=device), ends[1:] - ends[:-1])
        places[span] = ((out + cell * stride) // unit).to(torch.int32)
        if numbers is not None:
            slots[span] = (first + numbers[span]).to(torch.int32)
        if pooling != 2:
            weight = torch.ones(len(cell), device=device) if weights is None else weights[span]
            total = torch.zeros(cells, device=device).index_add_(0, cell, weight)
            share = torch.where(total == 0, 0.0, 1 / torch.where(total == 0, 1.0, total))
            factors[span] = weight * share[cell] if pooling == 1 else weight
    return places, slots, factors
