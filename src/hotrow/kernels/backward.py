# mypy: allow-untyped-defs, allow-untyped-calls
"""Backward and optimizer in one: each touched row's gradient is summed over its lookups, and used where the sum ends.

`update_kernel` takes chunks (see `chunks.py`), a tile of them side by side, and asks for their rows and state before it
begins to sum, so that all of it travels together. A row that is one chunk is updated at once. Sums of the chunks of
longer rows go to `partials`, two places for each block of sorted lookups, and `join_kernel` adds them up in their
order. No atomics and one order of summation: the same bits on every run, whatever tiles were tuned. Rows that are
only staged here have their gradient written to `handed`, laid out as the staged rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import jit, tl
from hotrow.kernels.chunks import CHUNK, FROM_BEFORE, segment_of
from hotrow.kernels.pooling import whole_vectors, within
from hotrow.kernels.rounding import random_bits, random_bits_twin, rounded, rounded_twin
from hotrow.kernels.tables import (
    ADAGRAD,
    ADAM,
    BETA1,
    BETA2,
    BOUND,
    CLASS,
    CLIP_NORM,
    CLIP_VALUE,
    DECAY,
    DIM,
    EPS,
    FIRST,
    HOT,
    HYPER_COLUMNS,
    LAYOUT_COLUMNS,
    RATE,
    REST1,
    REST2,
    ROWWISE,
    SGD,
    STATE,
    VALUES,
)


import os
from hotrow.kernels.backend import constant
X_EVICT = constant(int(os.environ.get("X_EVICT", "0")))
X_AHEAD = constant(int(os.environ.get("X_AHEAD", "1")))


@jit
def _state(state, local, hot, columns, dim, KIND: tl.constexpr, FULL: tl.constexpr):
    """The optimizer state of some rows: up to two tensors, by the kind of optimizer."""
    if KIND == SGD:
        one = 0.0
        two = 0.0
    elif KIND == ROWWISE:
        one = tl.load(state + local, mask=hot, other=0.0)
        two = 0.0
    elif KIND == ADAGRAD:
        at = state + (local.to(tl.int64) * dim)[:, None] + columns[None, :]
        one = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0)
        two = 0.0
    else:
        tl.static_assert(KIND == ADAM)
        at = state + (local.to(tl.int64) * (2 * dim))[:, None] + columns[None, :]
        one = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0)
        two = tl.load(at + dim, mask=within(hot, columns, dim, FULL), other=0.0)
    return one, two


@jit
def _prepared(grad, row, hyper):
    """The gradient clipped, and decay added."""
    most = tl.load(hyper + CLIP_VALUE)
    most = tl.where(most > 0.0, most, float("inf"))
    grad = tl.minimum(tl.maximum(grad, -most), most)
    longest = tl.load(hyper + CLIP_NORM)
    longest = tl.where(longest > 0.0, longest, float("inf"))
    norm = tl.sqrt(tl.sum(grad * grad, 1))
    scale = tl.where(norm > longest, longest / tl.maximum(norm, 1e-30), 1.0)
    return grad * scale[:, None] + tl.load(hyper + DECAY) * row


@jit
def _moved(
    grad, row, state, one, two, local, hot, columns, dim, hyper, BLOCK: tl.constexpr, KIND: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The rows after one step of their optimizer; writes the state on."""
    rate = tl.load(hyper + RATE)
    if KIND == SGD:
        moved = row - rate * grad
    elif KIND == ROWWISE:
        if FULL:
            mean = tl.sum(grad * grad, 1) * (1.0 / BLOCK)
        else:
            mean = tl.sum(grad * grad, 1) / dim.to(tl.float32)
        squares = one + mean
        tl.store(state + local, squares, mask=hot)
        moved = row - (rate / (tl.sqrt(squares) + tl.load(hyper + EPS)))[:, None] * grad
    elif KIND == ADAGRAD:
        squares = one + grad * grad
        at = state + (local.to(tl.int64) * dim)[:, None] + columns[None, :]
        tl.store(at, squares, mask=within(hot, columns, dim, FULL))
        moved = row - rate * grad / (tl.sqrt(squares) + tl.load(hyper + EPS))
    else:
        moment = tl.load(hyper + BETA1) * one + tl.load(hyper + REST1) * grad
        squares = tl.load(hyper + BETA2) * two + tl.load(hyper + REST2) * grad * grad
        at = state + (local.to(tl.int64) * (2 * dim))[:, None] + columns[None, :]
        tl.store(at, moment, mask=within(hot, columns, dim, FULL))
        tl.store(at + dim, squares, mask=within(hot, columns, dim, FULL))
        moved = row - rate * moment / (tl.sqrt(squares) + tl.load(hyper + EPS))
    return moved


@jit
def _finish(
    grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
    hyper, seed, BLOCK: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Uses the summed gradients of some rows of one segment: in place, or handed out where the row is staged."""
    hot = whole
    if STAGED:
        here = tl.load(layout + segment * LAYOUT_COLUMNS + HOT).to(tl.int32)
        hot = whole & (local < here)
        cold = within(whole & (local >= here), columns, dim, FULL)
        to = handed + tl.load(staged_at + segment) // VECTOR * VECTOR
        tl.store(to + ((local - here).to(tl.int64) * dim)[:, None] + columns[None, :], grad, mask=cold)
    hyper += segment * HYPER_COLUMNS
    if not PLAIN:
        grad = tl.where(within(hot, columns, dim, FULL), _prepared(grad, row, hyper), 0.0)
    moved = _moved(grad, row, state, one, two, local, hot, columns, dim, hyper, BLOCK, KIND, FULL)
    if not PLAIN:
        bound = tl.load(hyper + BOUND)
        bound = tl.where(bound > 0.0, bound, float("inf"))
        moved = tl.minimum(tl.maximum(moved, -bound), bound)
    if values.dtype.element_ty != tl.float32:
        random = random_bits(tl.load(seed), slot, columns)
    else:
        random = 0
    place = (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    if X_EVICT == 2 or X_EVICT == 3:
        tl.store(values + place, rounded(moved, random, values), mask=within(hot, columns, dim, FULL), eviction_policy="evict_first")
    elif X_EVICT == 4:
        tl.store(values + place, rounded(moved, random, values), mask=within(hot, columns, dim, FULL), cache_modifier=".cs")
    else:
        tl.store(values + place, rounded(moved, random, values), mask=within(hot, columns, dim, FULL))


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
def _sum(
    grads, places, factors, begin, place, length, mine, columns, dim,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, UNROLL: tl.constexpr, UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
):  # fmt: skip
    """The gradient of each chunk, over its lookups in their order; the first one's place is known already."""
    at = grads + (place.to(tl.int64) * UNIT)[:, None] + columns[None, :]
    total = tl.load(at, mask=within(mine, columns, dim, FULL), other=0.0).to(tl.float32)
    if FACTORS:
        total *= tl.load(factors + begin, mask=mine, other=0.0)[:, None]
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
def _chunks(
    grads, places, factors, begin, place, info, slot, mine, segment, partials, values, state, handed, staged_at,
    layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    FULL: tl.constexpr, UNROLL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr,
    STAGED: tl.constexpr,
):  # fmt: skip
    """Some chunks of one segment, side by side."""
    columns = tl.arange(0, BLOCK)
    dim, first, base, state_base = _segment(layout, segment, BLOCK, VECTOR, FULL)
    state += state_base
    local = slot - first
    whole = mine & (info < FROM_BEFORE)
    hot = _here(layout, segment, local, whole, STAGED)
    at = values + (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    if X_EVICT == 1 or X_EVICT == 3:
        row = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0, eviction_policy="evict_first").to(tl.float32)
    else:
        row = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0).to(tl.float32)
    one, two = _state(state, local, hot, columns, dim, KIND, FULL)
    grad = _sum(
        grads, places, factors, begin, place, info & 255, mine, columns, dim, BLOCK, TILE, FULL, UNROLL, UNIT, FACTORS
    )
    if tl.max(info, 0) >= FROM_BEFORE:
        part = 2 * (begin // CHUNK) + tl.where((info & FROM_BEFORE) != 0, 0, 1)
        to = partials + (part.to(tl.int64) * WIDTH)[:, None] + columns[None, :]
        tl.store(to, grad, mask=within(mine & (info >= FROM_BEFORE), columns, dim, FULL))
    _finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
        hyper, seed, BLOCK, KIND, VECTOR, FULL, PLAIN, STAGED,
    )  # fmt: skip


@jit
def _records(begins, firsts, infos, slots, chunk, last):
    """What is known of some chunks."""
    live = chunk < last
    begin = tl.load(begins + chunk, mask=live, other=0)
    place = tl.load(firsts + chunk, mask=live, other=0)
    info = tl.load(infos + chunk, mask=live, other=0)
    return begin, place, info, tl.load(slots + chunk, mask=live, other=0)


@jit
def update_kernel(
    grads, places, factors, ends, begins, infos, slots, segments, firsts, partials, values, state, handed, staged_at,
    layout, hyper, seed, tiles,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, TILES: tl.constexpr, VECTORS: tl.constexpr,
    FULL: tl.constexpr, FIRSTS: tl.constexpr, COUNTS: tl.constexpr, UNROLL: tl.constexpr, UNIT: tl.constexpr,
    FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """A tile of chunks at a time: all of one segment where a class has only one, else segment after segment."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    start = 0
    for c in tl.static_range(len(BLOCKS)):
        last = tl.load(ends + (c + 1) * tiles - 1)
        chunk = start + program * TILES[c] + tl.arange(0, TILES[c])
        next_begin, next_place, next_info, next_slot = _records(begins, firsts, infos, slots, chunk, last)
        for tile in range(program, tl.cdiv(last - start, TILES[c]), programs):
            chunk = start + tile * TILES[c] + tl.arange(0, TILES[c])
            live = chunk < last
            begin, place, info, slot = next_begin, next_place, next_info, next_slot
            further = chunk + programs * TILES[c]
            next_begin, next_place, next_info, next_slot = _records(begins, firsts, infos, slots, further, last)
            if COUNTS[c] == 1:
                _chunks(
                    grads, places, factors, begin, place, info, slot, live, FIRSTS[c], partials, values, state,
                    handed, staged_at, layout, hyper, seed, WIDTH, BLOCKS[c], KINDS[c], TILES[c], VECTORS[c], FULL[c],
                    UNROLL, UNIT, FACTORS, PLAIN, STAGED,
                )  # fmt: skip
            else:
                segment = tl.load(segments + chunk, mask=live, other=-1)
                lowest = tl.min(tl.where(live, segment, 2147483647), 0)
                highest = tl.max(segment, 0)
                for s in range(lowest, highest + 1):
                    _chunks(
                        grads, places, factors, begin, place, info, slot, live & (segment == s), s, partials, values,
                        state, handed, staged_at, layout, hyper, seed, WIDTH, BLOCKS[c], KINDS[c], TILES[c],
                        VECTORS[c], FULL[c], UNROLL, UNIT, FACTORS, PLAIN, STAGED,
                    )  # fmt: skip
        start = last


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
    one, two = _state(state, local, hot, columns, dim, KIND, FULL)
    parts = partials + block.to(tl.int64) * (2 * WIDTH) + columns[None, :]
    grad = tl.load(parts + WIDTH, mask=within(whole, columns, dim, FULL), other=0.0)
    # Rows are sorted, so a block that begins with the slot is one more part.
    wide = tl.arange(0, 64)
    going = 1
    while going > 0:
        start = CHUNK * (block + going + wide)
        count = tl.sum((tl.load(rows + start, mask=start < lookups, other=-1) == slot).to(tl.int32), 0)
        for k in range(0, count, UNROLL):
            for j in tl.static_range(UNROLL):
                part = parts + (going + k + j).to(tl.int64) * (2 * WIDTH)
                has = whole & (k + j < count)
                grad += tl.load(part, mask=within(has, columns, dim, FULL), other=0.0)
        going = tl.where(count == 64, going + 64, 0)
    _finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
        hyper, seed, BLOCK, KIND, VECTOR, FULL, PLAIN, STAGED,
    )  # fmt: skip


@jit
def join_kernel(
    rows, lookups, partials, values, state, handed, staged_at, layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, VECTORS: tl.constexpr, FULL: tl.constexpr,
    UNROLL: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """A program for each border between blocks, which works if a row begins before it and ends behind it."""
    block = tl.program_id(0)
    border = CHUNK * (block + 1)
    slot = tl.load(rows + border - 1)
    behind = tl.load(rows + border)
    before = tl.load(rows + CHUNK * block - 1, mask=block > 0, other=-1)
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
        moved = _step_twin(values[place].to(compute), grad, state, state_base, local, hyper[t].tolist(), kinds[kind])
        values[place] = rounded_twin(moved, random_bits_twin(int(seed), slots, dim), values.dtype)


def _step_twin(
    row: Tensor, grad: Tensor, state: Tensor, base: int, local: Tensor, hyper: list[float], kind: int
) -> Tensor:
    rate, eps, decay, clip_value, clip_norm, bound, beta1, beta2, rest1, rest2, *_ = hyper
    dim = row.shape[1]
    columns = torch.arange(dim, device=row.device)
    if clip_value:
        grad = grad.clamp(-clip_value, clip_value)
    if clip_norm:
        norm = grad.norm(dim=1, keepdim=True)
        grad = torch.where(norm > clip_norm, grad * (clip_norm / norm), grad)
    grad = grad + decay * row
    if kind == 0:
        row = row - rate * grad
    elif kind == 2:
        squares = state[base + local].to(row.dtype) + grad.square().mean(dim=1)
        state[base + local] = squares.float()
        row = row - (rate / (squares.sqrt() + eps))[:, None] * grad
    elif kind == 1:
        at = (base + local * dim)[:, None] + columns
        squares = state[at].to(row.dtype) + grad.square()
        state[at] = squares.float()
        row = row - rate * grad / (squares.sqrt() + eps)
    else:
        at = (base + local * 2 * dim)[:, None] + columns
        moment = beta1 * state[at].to(row.dtype) + rest1 * grad
        squares = beta2 * state[at + dim].to(row.dtype) + rest2 * grad.square()
        state[at], state[at + dim] = moment.float(), squares.float()
        row = row - rate * moment / (squares.sqrt() + eps)
    return row.clamp(-bound, bound) if bound else row
