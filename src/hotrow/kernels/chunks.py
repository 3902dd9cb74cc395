# mypy: allow-untyped-defs, allow-untyped-calls
"""Lookups sorted by row, cut into chunks: the work list of the backward pass.

A chunk is the lookups of one row within an aligned block of 64 sorted lookups. A row of many lookups is thus many
chunks, which run side by side and are joined afterwards; and whether a row goes on in the next block is seen from the
two lookups at the border, so nothing here waits for anything but a count per tile. Chunks stand class after class
and tile after tile, longest first within a tile: rows that one program handles together are about equally
long, and lie in one table, whose gradients stay in the cache meanwhile. No atomics: the list is the same each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import constant, jit, tl
from hotrow.kernels.tables import CLASS, FIRST, LAYOUT_COLUMNS

CHUNK_SIZE = int(__import__("os").environ.get("X_CHUNK", "64"))
CHUNK = constant(CHUNK_SIZE)
FROM_BEFORE = constant(1 << 8)  # bits of a chunk's `info` beside its length: the row began in an earlier block
GOES_ON = constant(1 << 9)  # the row goes on in the next block


@jit
def _later(a, b):
    return tl.maximum(a, b)


@jit
def segment_of(layout, slot, SEGMENTS: tl.constexpr):
    """The segment of each slot, by bisection over first slots. SEGMENTS is a power of two: `layout` is padded."""
    segment = tl.zeros_like(slot)
    step: tl.constexpr = SEGMENTS // 2
    for i in tl.static_range(20):
        if (step >> i) > 0:
            further = segment + (step >> i)
            segment = tl.where(tl.load(layout + further * LAYOUT_COLUMNS + FIRST) <= slot, further, segment)
    return segment


@jit
def _heads(rows, layout, lookup, lookups, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr):
    """Whether each lookup is the first of a chunk, its slot and its class."""
    live = lookup < lookups
    slot = tl.load(rows + lookup, mask=live, other=0)
    before = tl.load(rows + lookup - 1, mask=live & (lookup > 0), other=-1)
    head = live & ((lookup % CHUNK == 0) | (slot != before))
    if CLASSES > 1:
        kind = tl.load(layout + segment_of(layout, slot, SEGMENTS) * LAYOUT_COLUMNS + CLASS).to(tl.int32)
    else:
        kind = tl.zeros_like(slot)
    return head, slot, kind


@jit
def count_kernel(
    rows, counts, layout, lookups, tiles, TILE: tl.constexpr, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr
):
    """How many chunks of each class begin in each tile of sorted lookups."""
    tile = tl.program_id(0)
    lookup = tile * TILE + tl.arange(0, TILE)
    head, _, kind = _heads(rows, layout, lookup, lookups, SEGMENTS, CLASSES)
    for c in tl.static_range(CLASSES):
        tl.store(counts + c * tiles + tile, tl.sum((head & (kind == c)).to(tl.int32), 0))


@jit
def chunk_kernel(
    rows, order, places, factors, sorted_places, sorted_factors, counts, ends, begins, infos, slots, segments, firsts,
    layout, lookups, tiles,
    TILE: tl.constexpr, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Brings places and factors into sorted order, and writes the chunks of one tile where `ends` has room for them.

    The tile is read from its end to its beginning: so the next head behind a lookup is a running maximum.
    """
    tile = tl.program_id(0)
    lookup = tile * TILE + (TILE - 1) - tl.arange(0, TILE)
    live = lookup < lookups
    source = tl.load(order + lookup, mask=live, other=0)
    place = tl.load(places + source, mask=live, other=0)
    tl.store(sorted_places + lookup, place, mask=live)
    if FACTORS:
        tl.store(sorted_factors + lookup, tl.load(factors + source, mask=live, other=0.0), mask=live)
    head, slot, kind = _heads(rows, layout, lookup, lookups, SEGMENTS, CLASSES)
    after = tl.load(rows + lookup + 1, mask=lookup + 1 < lookups, other=-1)
    last = ((lookup + 1) % CHUNK == 0) | (after != slot)
    length = -tl.associative_scan(tl.where(last, -(lookup + 1), -2147483647), 0, _later) - lookup
    before = tl.load(rows + lookup - 1, mask=head & (lookup > 0), other=-1)
    behind = tl.load(rows + lookup + length, mask=head & (lookup + length < lookups), other=-1)
    info = length + tl.where(before == slot, FROM_BEFORE, 0) + tl.where(behind == slot, GOES_ON, 0)
    # Five buckets by length, longest first, counted by one sum: twelve bits each.
    bucket = (length <= 16).to(tl.int64) + (length <= 4).to(tl.int64) + (length <= 2).to(tl.int64)
    shift = (bucket + (length <= 1).to(tl.int64)) * 12
    one = tl.full([TILE], 1, tl.int64) << shift
    to = tl.zeros_like(slot)
    for c in tl.static_range(CLASSES):
        mine = head & (kind == c)
        counted = tl.cumsum(tl.where(mine, one, 0), 0)
        total = tl.sum(tl.where(mine, one, 0), 0)
        longer = (total << 12) + (total << 24) + (total << 36) + (total << 48)  # of each bucket: those before it
        rank = ((counted + longer) >> shift) & 4095
        start = tl.load(ends + c * tiles + tile) - tl.load(counts + c * tiles + tile)
        to = tl.where(mine, start + rank.to(tl.int32) - 1, to)
    tl.store(begins + to, lookup, mask=head)
    tl.store(infos + to, info, mask=head)
    tl.store(slots + to, slot, mask=head)
    tl.store(firsts + to, place, mask=head)
    if SEGMENTS > 1:
        tl.store(segments + to, segment_of(layout, slot, SEGMENTS), mask=head)


def count_twin(rows: Tensor, layout: Tensor, tile: int, classes: int) -> Tensor:
    """What `count_kernel` computes, `[classes * tiles]`."""
    tiles = -(-len(rows) // tile)
    at = torch.nonzero(_head_mask(rows)).squeeze(1)
    kind = layout[_segments(rows[at], layout), 5]
    counts = torch.bincount(kind * tiles + at // tile, minlength=classes * tiles)
    return counts.to(torch.int32)


def chunk_twin(rows: Tensor, places: Tensor, layout: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The chunks that `chunk_kernel` writes: begins, infos, slots, segments and first places.

    `places` are sorted already. Each list is as long as there are chunks.
    """
    at = torch.nonzero(_head_mask(rows)).squeeze(1)
    ends = torch.cat([at[1:], torch.tensor([len(rows)], device=rows.device)])
    lengths, slots = ends - at, rows[at]
    segment = _segments(slots, layout)
    padded = torch.cat([rows, rows.new_full((1,), -1)])
    before = torch.where(at > 0, padded[at - 1], -1)
    infos = lengths + (before == slots) * (1 << 8) + (padded[ends] == slots) * (1 << 9)
    bucket = sum((lengths <= most).long() for most in (16, 4, 2, 1))
    kind, tiles = layout[segment, 5], at // tile
    key = ((kind * (int(tiles.max()) + 1) + tiles) * 5 + bucket) * tile + (tile - 1 - at % tile)
    by = torch.argsort(key)
    narrow = [t[by].to(torch.int32) for t in (at, infos, slots, segment, places[at])]
    return narrow[0], narrow[1], narrow[2], narrow[3], narrow[4]


def _head_mask(rows: Tensor) -> Tensor:
    head = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    head[1:] = rows[1:] != rows[:-1]
    head[::CHUNK_SIZE] = True
    return head


def _segments(slots: Tensor, layout: Tensor) -> Tensor:
    return torch.searchsorted(layout[:, 0].contiguous(), slots.long(), right=True) - 1
