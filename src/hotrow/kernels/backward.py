# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Backward and optimizer in one: each touched row's gradient is summed over its lookups, and used where the sum ends.

`update_kernel` goes through the list of `chunks.py`: each program has a share of the long chunks, one of the short ones
and one of the single lookups, all about the same rows. So programs are equally long, and sums, which wait for the
cache, run beside single lookups, which wait for memory. A row that is one entry is updated at once. Sums of the
parts of longer rows go to `partials`, two places for each span of sorted lookups, and `join_kernel` adds them up in
their order. No atomics and one order of summation: the same bits on every run, whatever tiles were tuned. Rows that
are only staged here have their gradient written to `handed`, laid out as the staged rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import jit, kernel, tl
from hotrow.kernels.chunks import FROM_BEFORE, LIST_KINDS, LONG, SHORT, SINGLE, SPAN, list_end, segment_of
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
def _gradients(
    grads, factors, lookup, place, mine, columns, dim, FULL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr
):
    """The gradient that each of some lookups has: its result's, times its factor."""
    at = grads + (place.to(tl.int64) * UNIT)[:, None] + columns[None, :]
    grad = tl.load(at, mask=within(mine, columns, dim, FULL), other=0.0).to(tl.float32)
    if FACTORS:
        grad *= tl.load(factors + lookup, mask=mine, other=0.0)[:, None]
    return grad


@jit
def _rest(
    total, grads, places, factors, begin, length, columns, dim, FULL: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of each chunk's lookups behind the first, in their order; `MOST` of them if that is known."""
    if MOST > 0:
        for j in tl.static_range(1, MOST):
            place = tl.load(places + begin + j, mask=j < length, other=0)
            total += _gradients(grads, factors, begin + j, place, j < length, columns, dim, FULL, UNIT, FACTORS)
    else:
        for k in tl.range(1, tl.max(length, 0), UNROLL, num_stages=STAGES):
            for j in tl.static_range(UNROLL):
                has = k + j < length
                place = tl.load(places + begin + k + j, mask=has, other=0)
                total += _gradients(grads, factors, begin + k + j, place, has, columns, dim, FULL, UNIT, FACTORS)
    return total


@jit
def _rows(
    grads, places, factors, begin, place, info, slot, mine, segment, partials, values, state, handed, staged_at,
    layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr,
    STAGED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Some entries of one segment, side by side, of `MOST` lookups; 0 if of any number, and parts of rows too."""
    columns = tl.arange(0, BLOCK)
    dim, first, base, state_base = _segment(layout, segment, BLOCK, VECTOR, FULL)
    state += state_base
    local = slot - first
    whole = mine
    if MOST == 0:
        whole = mine & (info < FROM_BEFORE)
    hot = _here(layout, segment, local, whole, STAGED)
    at = values + (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    row = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0).to(tl.float32)
    one, two = state_of(state, local, hot, columns, dim, KIND, FULL)
    grad = _gradients(grads, factors, begin, place, mine, columns, dim, FULL, UNIT, FACTORS)
    grad = decayed(grad, row, hyper, segment, PLAIN)
    if MOST != 1:
        length = tl.where(mine, info & 255, 0)
        grad = _rest(
            grad, grads, places, factors, begin, length, columns, dim, FULL, UNROLL, STAGES, UNIT, FACTORS, MOST
        )
    if MOST == 0:
        if tl.max(info, 0) >= FROM_BEFORE:
            part = 2 * (begin // SPAN) + tl.where((info & FROM_BEFORE) != 0, 0, 1)
            to = partials + (part.to(tl.int64) * WIDTH)[:, None] + columns[None, :]
            tl.store(to, grad, mask=within(mine & (info >= FROM_BEFORE), columns, dim, FULL))
    finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
        hyper, seed, BLOCK, KIND, VECTOR, FULL, PLAIN, STAGED,
    )  # fmt: skip


@jit
def _share(tiles):
    """Which of so many tiles are this program's: every program has about as many, in their order."""
    each = tiles.to(tl.float64) / tl.num_programs(0)
    begin = (tl.program_id(0) * each).to(tl.int32)
    end = ((tl.program_id(0) + 1) * each).to(tl.int32)
    return begin, tl.where(tl.program_id(0) + 1 == tl.num_programs(0), tiles, end)


@jit
def _entries(
    grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout,
    hyper, seed, kind, spans,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    FULL: tl.constexpr, FIRST_SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, ALL: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """This program's share of one kind of entries, tile after tile."""
    first = list_end(ends, kind - 1, spans)
    last = list_end(ends, kind, spans)
    begin_tile, end_tile = _share(tl.cdiv(last - first, TILE))
    for tile in range(begin_tile, end_tile):
        entry = first + tile * TILE + tl.arange(0, TILE)
        live = entry < last
        place = tl.load(firsts + entry, mask=live, other=0)
        slot = tl.load(slots + entry, mask=live, other=0)
        begin = place
        info = place
        if FACTORS or MOST != 1:
            begin = tl.load(begins + entry, mask=live, other=0)
        if MOST != 1:
            info = tl.load(infos + entry, mask=live, other=0)
        if SEGMENTS == 1:
            _rows(
                grads, places, factors, begin, place, info, slot, live, FIRST_SEGMENT, partials, values, state, handed,
                staged_at, layout, hyper, seed, WIDTH, BLOCK, KIND, VECTOR, FULL, UNROLL, STAGES, UNIT, FACTORS,
                PLAIN, STAGED, MOST,
            )  # fmt: skip
        else:
            segment = segment_of(layout, slot, ALL)
            lowest = tl.min(tl.where(live, segment, 2147483647), 0)
            highest = tl.max(tl.where(live, segment, -1), 0)
            for s in range(lowest, highest + 1):
                _rows(
                    grads, places, factors, begin, place, info, slot, live & (segment == s), s, partials, values,
                    state, handed, staged_at, layout, hyper, seed, WIDTH, BLOCK, KIND, VECTOR, FULL, UNROLL, STAGES,
                    UNIT, FACTORS, PLAIN, STAGED, MOST,
                )  # fmt: skip


@kernel("spans")
def update_kernel(
    grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout,
    hyper, seed, spans,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, TILES: tl.constexpr, VECTORS: tl.constexpr,
    FULL: tl.constexpr, FIRSTS: tl.constexpr, COUNTS: tl.constexpr, ALL: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Each program's share of the list; `TILES` of a class are those of long, of short and of single entries."""
    for c in tl.static_range(len(BLOCKS)):
        _entries(
            grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at,
            layout, hyper, seed, c * LIST_KINDS + LONG, spans, WIDTH, BLOCKS[c], KINDS[c], TILES[c][0], VECTORS[c],
            FULL[c], FIRSTS[c], COUNTS[c], ALL, UNROLL, STAGES, UNIT, FACTORS, PLAIN, STAGED, 0,
        )  # fmt: skip
        _entries(
            grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at,
            layout, hyper, seed, c * LIST_KINDS + SHORT, spans, WIDTH, BLOCKS[c], KINDS[c], TILES[c][1], VECTORS[c],
            FULL[c], FIRSTS[c], COUNTS[c], ALL, UNROLL, STAGES, UNIT, FACTORS, PLAIN, STAGED, 4,
        )  # fmt: skip
        _entries(
            grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at,
            layout, hyper, seed, c * LIST_KINDS + SINGLE, spans, WIDTH, BLOCKS[c], KINDS[c], TILES[c][2], VECTORS[c],
            FULL[c], FIRSTS[c], COUNTS[c], ALL, UNROLL, STAGES, UNIT, FACTORS, PLAIN, STAGED, 1,
        )  # fmt: skip


@jit
def _parts(rows, lookups, block, slot, PARTS: tl.constexpr):
    """Which of the spans from `block` on have a part of the row: rows are sorted, so those that begin with it."""
    start = SPAN * (block + tl.arange(0, PARTS))
    return tl.load(rows + start, mask=start < lookups, other=-1) == slot


@jit
def _join(
    rows, lookups, block, slot, segment, partials, values, state, handed, staged_at, layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of a row that goes on from its block to the next ones, and uses the sum."""
    PARTS: tl.constexpr = 8192 // BLOCK if BLOCK >= 128 else 64  # that are asked for at once
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
    has = _parts(rows, lookups, block + 1, slot, PARTS)
    far = tl.zeros([1], tl.int64)  # counts in int64
    at = partials + ((far + block) * (2 * WIDTH) + WIDTH)[:, None] + columns[None, :]
    grad = tl.load(at, mask=within(whole, columns, dim, FULL), other=0.0)
    grad = decayed(grad, row, hyper, segment, PLAIN)
    going = 1
    while going > 0:
        has_ahead = _parts(rows, lookups, block + going + PARTS, slot, PARTS)
        part = (far + block + going + tl.arange(0, PARTS)) * (2 * WIDTH)
        each = tl.load(partials + part[:, None] + columns[None, :], mask=within(has, columns, dim, FULL), other=0.0)
        grad += tl.sum(each, 0)[None, :]
        going = tl.where(tl.sum(has_ahead.to(tl.int32), 0) > 0, going + PARTS, 0)
        has = has_ahead
    finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
        hyper, seed, BLOCK, KIND, VECTOR, FULL, PLAIN, STAGED,
    )  # fmt: skip


@kernel("lookups", "spans")
def join_kernel(
    rows, ends, begins, slots, lookups, spans, partials, values, state, handed, staged_at, layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, VECTORS: tl.constexpr, FULL: tl.constexpr,
    PLAIN: tl.constexpr, STAGED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The rows that were summed in parts, each program every so many of them."""
    first = list_end(ends, len(BLOCKS) * LIST_KINDS - 1, spans)
    last = list_end(ends, len(BLOCKS) * LIST_KINDS, spans)
    for entry in range(first + tl.program_id(0), last, tl.num_programs(0)):
        block = tl.load(begins + entry) // SPAN
        slot = tl.load(slots + entry)
        if SEGMENTS == 1:
            _join(
                rows, lookups, block, slot, 0, partials, values, state, handed, staged_at, layout, hyper, seed,
                WIDTH, BLOCKS[0], KINDS[0], VECTORS[0], FULL[0], PLAIN, STAGED,
            )  # fmt: skip
        else:
            segment = segment_of(layout, slot, SEGMENTS)
            kind = tl.load(layout + segment * LAYOUT_COLUMNS + CLASS)
            for c in tl.static_range(len(BLOCKS)):
                if kind == c:
                    _join(
                        rows, lookups, block, slot, segment, partials, values, state, handed, staged_at, layout,
                        hyper, seed, WIDTH, BLOCKS[c], KINDS[c], VECTORS[c], FULL[c], PLAIN, STAGED,
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
