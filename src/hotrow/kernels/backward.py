# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Backward and optimizer in one: each touched row's gradient is summed over its lookups, and used where the sum ends.

`update_kernel` takes the lists of `chunks.py`, a tile of entries side by side, and asks for their rows and state before
it begins to sum, so that all of it travels together. A row that is one entry is updated at once. Sums of the chunks
of longer rows go to `partials`, two places for each span of sorted lookups, and `join_kernel` adds them up in their
order. No atomics and one order of summation: the same bits on every run, whatever tiles were tuned. Rows that are
only staged here have their gradient written to `handed`, laid out as the staged rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import jit, kernel, tl
from hotrow.kernels.chunks import FROM_BEFORE, SPAN, segment_of
from hotrow.kernels.pooling import whole_vectors, within
from hotrow.kernels.rounding import random_bits_twin, rounded_twin
from hotrow.kernels.rules import decayed, finish, state_of, step_twin
from hotrow.kernels.tables import CLASS, DIM, FIRST, HOT, LAYOUT_COLUMNS, STATE, VALUES


@jit
def _segment(layout, segment, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr):
    """Dim, first slot, and where values and state of a segment begin."""
    at = layout + segment * LAYOUT_COLUMNS
    dim = whole_vectors(tl.load(at + DIM), BLOCK, VECTOR, FULL)
    first = tl.load(at + FIRST).to(tl.int32)
    return dim, first, tl.load(at + VALUES) // VECTOR * VECTOR, tl.load(at + STATE) // VECTOR * VECTOR


@jit
def _here(layout, segment, local, whole, STAGED: tl.constexpr):
    """Which of the rows live here."""
    hot = whole
    if STAGED:
        hot = whole & (local < tl.load(layout + segment * LAYOUT_COLUMNS + HOT).to(tl.int32))
    return hot


@jit
def _first(
    grads, factors, begin, place, mine, columns, dim, FULL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr
):
    """The gradient of each entry's first lookup."""
    at = grads + (place.to(tl.int64) * UNIT)[:, None] + columns[None, :]
    grad = tl.load(at, mask=within(mine, columns, dim, FULL), other=0.0).to(tl.float32)
    if FACTORS:
        grad *= tl.load(factors + begin, mask=mine, other=0.0)[:, None]
    return grad


@jit
def _rest(
    total, grads, places, factors, begin, length, mine, columns, dim,
    FULL: tl.constexpr, UNROLL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of each chunk's further lookups, in their order."""
    longest = tl.max(tl.where(mine, length, 0), 0)
    for k in range(1, longest, UNROLL):
        for j in tl.static_range(UNROLL):
            has = mine & (k + j < length)
            place = tl.load(places + begin + k + j, mask=has, other=0)
            at = grads + (place.to(tl.int64) * UNIT)[:, None] + columns[None, :]
            grad = tl.load(at, mask=within(has, columns, dim, FULL), other=0.0).to(tl.float32)
            if FACTORS:
                grad *= tl.load(factors + begin + k + j, mask=has, other=0.0)[:, None]
            total += grad
    return total


@jit
def _rows(
    grads, places, factors, begin, place, info, slot, mine, segment, partials, values, state, handed, staged_at,
    layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    UNROLL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
    ONLY: tl.constexpr,
):  # fmt: skip
    """Some chunks of one segment, side by side; `ONLY` if each is a row of one lookup."""
    columns = tl.arange(0, BLOCK)
    dim, first, base, state_base = _segment(layout, segment, BLOCK, VECTOR, FULL)
    state += state_base
    local = slot - first
    whole = mine
    if not ONLY:
        whole = mine & (info < FROM_BEFORE)
    hot = _here(layout, segment, local, whole, STAGED)
    at = values + (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    row = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0).to(tl.float32)
    one, two = state_of(state, local, hot, columns, dim, KIND, FULL)
    grad = _first(grads, factors, begin, place, mine, columns, dim, FULL, UNIT, FACTORS)
    grad = decayed(grad, row, hyper, segment, PLAIN)
    if not ONLY:
        grad = _rest(grad, grads, places, factors, begin, info & 255, mine, columns, dim, FULL, UNROLL, UNIT, FACTORS)
        if tl.max(info, 0) >= FROM_BEFORE:
            part = 2 * (begin // SPAN) + tl.where((info & FROM_BEFORE) != 0, 0, 1)
            to = partials + (part.to(tl.int64) * WIDTH)[:, None] + columns[None, :]
            tl.store(to, grad, mask=within(mine & (info >= FROM_BEFORE), columns, dim, FULL))
    finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
        hyper, seed, BLOCK, KIND, VECTOR, FULL, PLAIN, STAGED,
    )  # fmt: skip


@jit
def _entries(begins, infos, slots, firsts, entry, last, FACTORS: tl.constexpr, ONLY: tl.constexpr):
    """What a list says of some entries; single lookups need less of it."""
    live = entry < last
    place = tl.load(firsts + entry, mask=live, other=0)
    slot = tl.load(slots + entry, mask=live, other=0)
    begin = place
    info = place
    if FACTORS or not ONLY:
        begin = tl.load(begins + entry, mask=live, other=0)
    if not ONLY:
        info = tl.load(infos + entry, mask=live, other=0)
    return begin, place, info, slot


@jit
def _span(
    grads, places, factors, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout, hyper,
    seed, entry, last,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    FULL: tl.constexpr, FIRST_SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, ALL: tl.constexpr, UNROLL: tl.constexpr,
    UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """The entries of one class in one span, tile after tile.

    In the usual case, tables that are alike, the next tile's entries are asked for before this one's work. A tile of
    several segments asks for its own: carried from tile to tile, Triton 3.6 takes those of the first for the search of
    segments, and later tiles are lost.
    """
    tiles = tl.cdiv(last - entry, TILE)
    if SEGMENTS == 1:
        entry += tl.arange(0, TILE)
        begin, place, info, slot = _entries(begins, infos, slots, firsts, entry, last, FACTORS, ONLY)
        for _ in range(tiles):
            live = entry < last
            ahead = entry + TILE
            begin_ahead, place_ahead, info_ahead, slot_ahead = _entries(
                begins, infos, slots, firsts, ahead, last, FACTORS, ONLY
            )
            _rows(
                grads, places, factors, begin, place, info, slot, live, FIRST_SEGMENT, partials, values, state,
                handed, staged_at, layout, hyper, seed, WIDTH, BLOCK, KIND, VECTOR, FULL, UNROLL, UNIT, FACTORS,
                PLAIN, STAGED, ONLY,
            )  # fmt: skip
            entry, begin, place, info, slot = ahead, begin_ahead, place_ahead, info_ahead, slot_ahead
    else:
        for tile in range(tiles):
            mine = entry + tile * TILE + tl.arange(0, TILE)
            live = mine < last
            begin, place, info, slot = _entries(begins, infos, slots, firsts, mine, last, FACTORS, ONLY)
            segment = segment_of(layout, slot, ALL)
            lowest = tl.min(tl.where(live, segment, 2147483647), 0)
            highest = tl.max(tl.where(live, segment, -1), 0)
            for s in range(lowest, highest + 1):
                _rows(
                    grads, places, factors, begin, place, info, slot, live & (segment == s), s, partials, values,
                    state, handed, staged_at, layout, hyper, seed, WIDTH, BLOCK, KIND, VECTOR, FULL, UNROLL, UNIT,
                    FACTORS, PLAIN, STAGED, ONLY,
                )  # fmt: skip


@kernel("spans", "each")
def update_kernel(
    grads, places, factors, counts, begins, infos, slots, firsts, single_factors, single_counts, single_at,
    single_slots, single_firsts, partials, values, state, handed, staged_at, layout, hyper, seed, spans, each,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr,
    VECTORS: tl.constexpr, FULL: tl.constexpr, FIRSTS: tl.constexpr, COUNTS: tl.constexpr, ALL: tl.constexpr,
    UNROLL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """`each` spans of one of the lists. Programs alternate between them: sums wait for the cache, single lookups for
    memory, and side by side they fill each other's pauses."""
    program = tl.program_id(0) // 2
    for span in range(program * each, tl.minimum(program * each + each, spans)):
        entry = span * SPAN
        if tl.program_id(0) % 2 == 0:
            for c in tl.static_range(len(BLOCKS)):
                last = entry + tl.load(counts + c * spans + span)
                _span(
                    grads, places, factors, begins, infos, slots, firsts, partials, values, state, handed, staged_at,
                    layout, hyper, seed, entry, last, WIDTH, BLOCKS[c], KINDS[c], LONG[c], VECTORS[c], FULL[c],
                    FIRSTS[c], COUNTS[c], ALL, UNROLL, UNIT, FACTORS, PLAIN, STAGED, False,
                )  # fmt: skip
                entry = last
        else:
            for c in tl.static_range(len(BLOCKS)):
                last = entry + tl.load(single_counts + c * spans + span)
                _span(
                    grads, places, single_factors, single_at, infos, single_slots, single_firsts, partials, values,
                    state, handed, staged_at, layout, hyper, seed, entry, last, WIDTH, BLOCKS[c], KINDS[c], SHORT[c],
                    VECTORS[c], FULL[c], FIRSTS[c], COUNTS[c], ALL, UNROLL, UNIT, FACTORS, PLAIN, STAGED, True,
                )  # fmt: skip
                entry = last


@jit
def _join(
    rows, lookups, block, slot, segment, partials, values, state, handed, staged_at, layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    UNROLL: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of a row that goes on from its block to the next ones, and uses the sum."""
    columns = tl.arange(0, BLOCK)
    whole = tl.full([1], 1, tl.int1)
    dim, first, base, state_base = _segment(layout, segment, BLOCK, VECTOR, FULL)
    state += state_base
    slot = tl.full([1], 0, tl.int32) + slot
    local = slot - first
    hot = _here(layout, segment, local, whole, STAGED)
    at = values + (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    row = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0).to(tl.float32)
    one, two = state_of(state, local, hot, columns, dim, KIND, FULL)
    far = tl.zeros([1], tl.int64)  # counts in int64
    parts = partials + ((far + block) * (2 * WIDTH))[:, None] + columns[None, :]
    grad = tl.load(parts + WIDTH, mask=within(whole, columns, dim, FULL), other=0.0)
    grad = decayed(grad, row, hyper, segment, PLAIN)
    # Rows are sorted, so a block that begins with the slot is one more part.
    wide = tl.arange(0, 64)
    going = 1
    while going > 0:
        start = SPAN * (block + going + wide)
        count = tl.sum((tl.load(rows + start, mask=start < lookups, other=-1) == slot).to(tl.int32), 0)
        for k in range(0, count, UNROLL):
            for j in tl.static_range(UNROLL):
                part = parts + ((far + going + k + j) * (2 * WIDTH))[:, None]
                has = whole & (k + j < count)
                grad += tl.load(part, mask=within(has, columns, dim, FULL), other=0.0)
        going = tl.where(count == 64, going + 64, 0)
    finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
        hyper, seed, BLOCK, KIND, VECTOR, FULL, PLAIN, STAGED,
    )  # fmt: skip


@kernel("lookups", "borders")
def join_kernel(
    rows, lookups, borders, partials, values, state, handed, staged_at, layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, VECTORS: tl.constexpr, FULL: tl.constexpr,
    EACH: tl.constexpr, UNROLL: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Some borders between spans, each of which gives work if a row begins right before it and goes on behind it."""
    first = tl.program_id(0) * EACH
    for block in range(first, tl.minimum(first + EACH, borders)):
        slot = tl.load(rows + SPAN * (block + 1) - 1)
        behind = tl.load(rows + SPAN * (block + 1))
        before = tl.load(rows + SPAN * block - 1, mask=block > 0, other=-1)
        if (slot == behind) & (before != slot):
            if SEGMENTS == 1:
                _join(
                    rows, lookups, block, slot, 0, partials, values, state, handed, staged_at, layout, hyper, seed,
                    WIDTH, BLOCKS[0], KINDS[0], VECTORS[0], FULL[0], UNROLL, PLAIN, STAGED,
                )  # fmt: skip
            else:
                segment = segment_of(layout, slot, SEGMENTS)
                kind = tl.load(layout + segment * LAYOUT_COLUMNS + CLASS)
                for c in tl.static_range(len(BLOCKS)):
                    if kind == c:
                        _join(
                            rows, lookups, block, slot, segment, partials, values, state, handed, staged_at, layout,
                            hyper, seed, WIDTH, BLOCKS[c], KINDS[c], VECTORS[c], FULL[c], UNROLL, PLAIN, STAGED,
                        )  # fmt: skip


def update_twin(
    grads: Tensor,
    rows: Tensor,
    places: Tensor,
    factors: Tensor | None,
    values: Tensor,
    state: Tensor,
    handed: Tensor,
    staged_at: Tensor,
    layout: Tensor,
    hyper: Tensor,
    seed: Tensor,
    kinds: list[int],
    unit: int,
    compute: torch.dtype = torch.float32,
) -> None:
    """What the two kernels do, table by table; `compute` is the precision of sums and of the optimizer."""
    bounds = [*layout[:, 0].tolist(), 2**31 - 1]
    for t, (first, here, dim, base, state_base, kind, *_) in enumerate(layout.tolist()):
        mine = torch.nonzero((rows >= first) & (rows < bounds[t + 1])).squeeze(1)
        if len(mine) == 0:
            continue
        columns = torch.arange(dim, device=values.device)
        slots, inverse = torch.unique(rows[mine], return_inverse=True)
        each = grads[(places[mine].long() * unit)[:, None] + columns].to(compute)
        if factors is not None:
            each = each * factors[mine].to(compute)[:, None]
        grad = torch.zeros(len(slots), dim, dtype=compute, device=values.device).index_add_(0, inverse, each)
        local = slots.long() - first
        cold = local >= here
        if cold.any():
            handed[(int(staged_at[t]) + (local[cold] - here) * dim)[:, None] + columns] = grad[cold].float()
        local, grad, slots = local[~cold], grad[~cold], slots[~cold]
        place = (base + local * dim)[:, None] + columns
        moved = step_twin(values[place].to(compute), grad, state, state_base, local, hyper[t].tolist(), kinds[kind])
        values[place] = rounded_twin(moved, random_bits_twin(int(seed), slots, dim), values.dtype)
