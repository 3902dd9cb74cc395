# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Backward and optimizer in one: each touched row's gradient is summed over its lookups, and used where the sum ends.

`update_kernel` goes through the list of `chunks.py`: each program has a share of the long chunks, one of the short ones
and one of the single lookups, all about the same rows. So programs are equally long, and sums, which wait for the
cache, run beside single lookups, which wait for memory. A row that is one entry is updated at once. Sums of the
parts of longer rows go to `partials`, two places for each span of sorted lookups, and `join_kernel` adds them up, as
tiles. No atomics and one order of summation: the same bits on every run, whatever was tuned. Rows that are only
staged here have their gradient written to `handed`, laid out as the staged rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import after_previous, apart, constant, jit, kernel, tl
from hotrow.kernels.chunks import FROM_BEFORE, LIST_KINDS, LONG, SHORT, SINGLE, SPAN, list_end, list_end_at, segment_of
from hotrow.kernels.pooling import take, whole_vectors, within
from hotrow.kernels.rounding import random_bits_twin, rounded_twin
from hotrow.kernels.rules import decayed, finish, settings_of, state_of, step_twin
from hotrow.kernels.tables import CLASS, DIM, FIRST, HOT, LAYOUT_COLUMNS, STATE, VALUES

FIRST_PARTS, MORE_PARTS = constant(64), constant(512)  # blocks that are searched at once for parts of a row


@jit
def _segment(
    layout, hyper, staged_at, segment, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    STAGED: tl.constexpr,
):  # fmt: skip
    """What rows of a segment need, asked for at once: dim, first slot, where values and state begin, how many rows live
    here and where gradients of the others are handed out, and the optimizer's settings."""
    at = layout + segment * LAYOUT_COLUMNS
    dim = whole_vectors(tl.load(at + DIM), BLOCK, VECTOR, FULL)
    base, state_base = tl.load(at + VALUES) // VECTOR * VECTOR, tl.load(at + STATE) // VECTOR * VECTOR
    here, handed_base = 0, 0
    if STAGED:
        here = tl.load(at + HOT).to(tl.int32)
        handed_base = tl.load(staged_at + segment) // VECTOR * VECTOR
    settings = settings_of(hyper, segment)
    return dim, tl.load(at + FIRST).to(tl.int32), base, state_base, here, handed_base, settings


@jit
def _gradients(
    grads, factors, lookup, place, has, columns, dim, FULL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr
):
    """The gradient that each of some lookups has: its result's, times its factor; 0 of those that are not had, whose
    places must still be some."""
    at = grads + (place.to(tl.int64) * UNIT)[:, None] + columns[None, :]
    grad = tl.where(has[:, None], take(at, within(has, columns, dim, FULL), FULL), 0.0)
    if FACTORS:
        grad *= tl.load(factors + lookup, mask=has, other=0.0)[:, None]
    return grad


@jit
def _further(
    grads, places, factors, begin, length, mine, k, columns, dim, FULL: tl.constexpr, UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
):  # fmt: skip
    """The gradient of each chunk's k-th lookup, of those that have so many."""
    lookup = begin + tl.minimum(k, length - 1)
    place = tl.load(places + lookup)
    return _gradients(grads, factors, lookup, place, mine & (k < length), columns, dim, FULL, UNIT, FACTORS)


@jit
def _rows(
    grads, places, factors, begin, place, info, slot, mine, found, partials, values, state, handed, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr, UNROLL: tl.constexpr,
    UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, MOST: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """Some entries of one segment, side by side, of `MOST` lookups; 0 if of any number, and parts of rows too.

    `found` is what `_segment` found. Where all entries are of its rows (`ALIKE`), also those that are not `mine` can be
    read, which saves masks; only what is written is masked.
    """
    columns = tl.arange(0, BLOCK)
    dim, first, base, state_base, here, handed_base, settings = found
    state += state_base
    local = slot - first
    whole = mine
    if MOST == 0:
        whole = mine & (info < FROM_BEFORE)
    hot = (whole & (local < here)) if STAGED else whole
    at = values + (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    row = take(at, within(hot, columns, dim, FULL), FULL and ALIKE and not STAGED)
    if MOST == 0:
        row = tl.where(whole[:, None], row, 0.0)  # parts are not decayed
    one, two = state_of(state, local, hot, columns, dim, KIND, FULL, ALIKE and not STAGED)
    grad = _gradients(grads, factors, begin, place, mine, columns, dim, FULL, UNIT, FACTORS)
    length = info & 255
    if MOST != 1:
        for k in tl.static_range(1, 4):
            grad += _further(grads, places, factors, begin, length, mine, k, columns, dim, FULL, UNIT, FACTORS)
    grad = decayed(grad, row, settings, PLAIN)
    if MOST == 0:
        for k in range(4, tl.max(length, 0), UNROLL):
            for j in tl.static_range(UNROLL):
                grad += _further(grads, places, factors, begin, length, mine, k + j, columns, dim, FULL, UNIT, FACTORS)
        grad += 0.0  # as may have been added to fill the last turn: the sign of a zero is not to depend on it
    if MOST == 0:  # noqa: SIM102  this is known when it is compiled, the next is not
        if tl.max(info, 0) >= FROM_BEFORE:
            part = 2 * (begin // SPAN) + tl.where((info & FROM_BEFORE) != 0, 0, 1)
            to = partials + (part.to(tl.int64) * WIDTH)[:, None] + columns[None, :]
            mask = within(mine & (info >= FROM_BEFORE), columns, dim, FULL)
            tl.store(to, grad, mask=mask, eviction_policy="evict_last")  # the join reads it next
    finish(
        grad, row, one, two, slot, local, whole, columns, dim, base, here, handed_base, state, values, handed,
        settings, seed, BLOCK, KIND, FULL, PLAIN, STAGED,
    )  # fmt: skip


@jit
def _share(tiles):
    """Which of so many tiles are this program's: every program has about as many, the first ones the last.

    The lookup went through the tables of a class from first to last, and left rows of the last in the cache. This goes
    back, and leaves rows of the first to the next lookup. The same product says where one program ends and the next
    begins; it may round to a tile behind the last, whose entries are masked.
    """
    each = tiles.to(tl.float32) / tl.num_programs(0)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    end = ((program + 1).to(tl.float32) * each).to(tl.int32)
    return (program.to(tl.float32) * each).to(tl.int32), tl.where(program + 1 == tl.num_programs(0), tiles, end)


@jit
def _entries(
    grads, places, factors, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout, hyper,
    seed, alike, first, last,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    FULL: tl.constexpr, SEGMENTS: tl.constexpr, ALL: tl.constexpr, UNROLL: tl.constexpr, UNIT: tl.constexpr,
    FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """This program's share of the entries from `first` to `last`, which are of one kind, tile after tile.

    `alike` is what `_segment` found of the class's first segment, which is all there is to find if it is the only one.
    """
    begin_tile, end_tile = _share(tl.cdiv(last - first, TILE))
    for tile in range(begin_tile, end_tile):
        entry = first + tile * TILE + tl.arange(0, TILE)
        live = entry < last
        entry = tl.minimum(entry, last - 1)
        place = tl.load(firsts + entry)
        slot = tl.load(slots + entry)
        begin = place
        info = place
        if FACTORS or MOST != 1:
            begin = tl.load(begins + entry)
        if MOST != 1:
            info = tl.load(infos + entry)
        if SEGMENTS == 1:
            _rows(
                grads, places, factors, begin, place, info, slot, live, alike, partials, values, state, handed, seed,
                WIDTH, BLOCK, KIND, FULL, UNROLL, UNIT, FACTORS, PLAIN, STAGED, MOST, True,
            )  # fmt: skip
        else:
            segment = segment_of(layout, slot, ALL)
            lowest = tl.min(tl.where(live, segment, 2147483647), 0)
            highest = tl.max(tl.where(live, segment, -1), 0)
            for s in range(lowest, highest + 1):
                found = _segment(layout, hyper, staged_at, s, BLOCK, VECTOR, FULL, STAGED)
                _rows(
                    grads, places, factors, begin, place, info, slot, live & (segment == s), found, partials, values,
                    state, handed, seed, WIDTH, BLOCK, KIND, FULL, UNROLL, UNIT, FACTORS, PLAIN, STAGED, MOST,
                    False,
                )  # fmt: skip


@jit
def _class_entries(
    grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout,
    hyper, seed, spans, c, segment,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, LONG_TILE: tl.constexpr, SHORT_TILE: tl.constexpr,
    SINGLE_TILE: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr, SEGMENTS: tl.constexpr, ALL: tl.constexpr,
    UNROLL: tl.constexpr, UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """This program's share of the entries of one class, whose first segment is `segment`."""
    long = list_end(ends, c * LIST_KINDS + LONG - 1, spans)
    short = list_end(ends, c * LIST_KINDS + SHORT - 1, spans)
    single = list_end(ends, c * LIST_KINDS + SINGLE - 1, spans)
    end = list_end(ends, c * LIST_KINDS + SINGLE, spans)
    alike = _segment(layout, hyper, staged_at, segment, BLOCK, VECTOR, FULL, STAGED)
    _entries(
        grads, places, factors, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout, hyper,
        seed, alike, long, short, WIDTH, BLOCK, KIND, LONG_TILE, VECTOR, FULL, SEGMENTS, ALL, UNROLL, UNIT, FACTORS,
        PLAIN, STAGED, 0,
    )  # fmt: skip
    _entries(
        grads, places, factors, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout, hyper,
        seed, alike, short, single, WIDTH, BLOCK, KIND, SHORT_TILE, VECTOR, FULL, SEGMENTS, ALL, UNROLL, UNIT, FACTORS,
        PLAIN, STAGED, 4,
    )  # fmt: skip
    _entries(
        grads, places, factors, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout, hyper,
        seed, alike, single, end, WIDTH, BLOCK, KIND, SINGLE_TILE, VECTOR, FULL, SEGMENTS, ALL, UNROLL, UNIT, FACTORS,
        PLAIN, STAGED, 1,
    )  # fmt: skip


_class_entries_apart = apart(_class_entries)


@kernel("spans")
def update_kernel(
    grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at, layout,
    hyper, seed, spans,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, TILES: tl.constexpr, VECTORS: tl.constexpr,
    FULL: tl.constexpr, FIRSTS: tl.constexpr, COUNTS: tl.constexpr, ALL: tl.constexpr, UNROLL: tl.constexpr,
    UNIT: tl.constexpr, FACTORS: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each program's share of the list; `TILES` of a class are those of long, of short and of single entries."""
    after_previous(EARLY)
    if len(BLOCKS) == 1:
        _class_entries(
            grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at,
            layout, hyper, seed, spans, 0, FIRSTS[0], WIDTH, BLOCKS[0], KINDS[0], *TILES[0], VECTORS[0], FULL[0],
            COUNTS[0], ALL, UNROLL, UNIT, FACTORS, PLAIN, STAGED,
        )  # fmt: skip
    else:
        for c in tl.static_range(len(BLOCKS)):
            _class_entries_apart(
                grads, places, factors, ends, begins, infos, slots, firsts, partials, values, state, handed, staged_at,
                layout, hyper, seed, spans, c, FIRSTS[c], WIDTH, BLOCKS[c], KINDS[c], *TILES[c], VECTORS[c], FULL[c],
                COUNTS[c], ALL, UNROLL, UNIT, FACTORS, PLAIN, STAGED,
            )  # fmt: skip


@jit
def _parts_in(rows, lookups, block, slot, COUNT: tl.constexpr):
    """How many of so many blocks have a part of a row: rows are sorted, so those that begin with its slot."""
    start = SPAN * (block + tl.arange(0, COUNT))
    begins_with = tl.load(rows + start, mask=start < lookups, other=-1, cache_modifier=".cg")
    return tl.sum((begins_with == slot).to(tl.int32), 0)


@jit
def _parts(rows, lookups, block, slot):
    """How many parts a row has that begins in a block and goes on behind it."""
    count = _parts_in(rows, lookups, block + 1, slot, FIRST_PARTS)
    going = count // FIRST_PARTS
    while going > 0:  # few rows have so many
        more = _parts_in(rows, lookups, block + 1 + count, slot, MORE_PARTS)
        count += more
        going = more // MORE_PARTS
    return count + 1


@jit
def _sum_of_parts(
    partials, block, k, count, columns, dim, WIDTH: tl.constexpr, FULL: tl.constexpr, MOST: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """The sum of so many parts of a row, from its k-th on, which are asked for at once; `ALL` if it has all of them.

    A row is the second of the two parts of the block that it begins in, and the first of those behind. In place of
    parts that it does not have its first is read.
    """
    part = k + tl.arange(0, MOST)
    has = part < count
    part = part if ALL else tl.where(has, part, 0)
    at = partials + ((2 * (block + part) + (part == 0)).to(tl.int64) * WIDTH)[:, None] + columns[None, :]
    sums = take(at, within(has, columns, dim, FULL), FULL)
    return tl.sum(sums if ALL else tl.where(has[:, None], sums, 0.0), 0)[None, :]


@jit
def _join(
    block, slot, count, found, partials, values, state, handed, seed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr, MANY: tl.constexpr,
    PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds up so many parts of a row that goes on from its block to the next ones, and uses the sum."""
    columns = tl.arange(0, BLOCK)
    whole = tl.full([1], 1, tl.int1)
    dim, first, base, state_base, here, handed_base, settings = found
    state += state_base
    slot = tl.full([1], 0, tl.int32) + slot
    local = slot - first
    hot = (whole & (local < here)) if STAGED else whole
    at = values + (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    row = take(at, within(hot, columns, dim, FULL), FULL and not STAGED)
    one, two = state_of(state, local, hot, columns, dim, KIND, FULL, not STAGED)
    grad = tl.zeros([1, BLOCK], tl.float32)
    many = count // MANY * MANY
    FEW: tl.constexpr = MANY // 4 if MANY > 4 else 1
    for k in range(0, many, MANY):
        grad += _sum_of_parts(partials, block, k, count, columns, dim, WIDTH, FULL, MANY, True)
    for k in range(many, count, FEW):
        grad += _sum_of_parts(partials, block, k, count, columns, dim, WIDTH, FULL, FEW, False)
    finish(
        decayed(grad, row, settings, PLAIN), row, one, two, slot, local, whole, columns, dim, base, here, handed_base,
        state, values, handed, settings, seed, BLOCK, KIND, FULL, PLAIN, STAGED,
    )  # fmt: skip


@kernel("lookups", "spans")
def join_kernel(
    rows, ends, begins, slots, lookups, spans, partials, values, state, handed, staged_at, layout, hyper, seed,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr, VECTORS: tl.constexpr, FULL: tl.constexpr,
    MANY: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr, SEGMENTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The rows that were summed in parts, each program every so many of them.

    The lists are read before the wait: they were written before the update began. They are read past the L1 (`.cg`),
    which may hold older bytes until then.
    """
    first = tl.load(list_end_at(ends, len(BLOCKS) * LIST_KINDS - 1, spans), cache_modifier=".cg")
    last = tl.load(list_end_at(ends, len(BLOCKS) * LIST_KINDS, spans), cache_modifier=".cg")
    for entry in range(first + tl.program_id(0), last, tl.num_programs(0)):
        block = tl.load(begins + entry, cache_modifier=".cg") // SPAN
        slot = tl.load(slots + entry, cache_modifier=".cg")
        count = _parts(rows, lookups, block, slot)
        after_previous(EARLY)
        if SEGMENTS == 1:
            found = _segment(layout, hyper, staged_at, 0, BLOCKS[0], VECTORS[0], FULL[0], STAGED)
            _join(
                block, slot, count, found, partials, values, state, handed, seed, WIDTH, BLOCKS[0], KINDS[0], FULL[0],
                MANY, PLAIN, STAGED,
            )  # fmt: skip
        else:
            segment = segment_of(layout, slot, SEGMENTS)
            kind = tl.load(layout + segment * LAYOUT_COLUMNS + CLASS)
            for c in tl.static_range(len(BLOCKS)):
                if kind == c:
                    found = _segment(layout, hyper, staged_at, segment, BLOCKS[c], VECTORS[c], FULL[c], STAGED)
                    _join(
                        block, slot, count, found, partials, values, state, handed, seed, WIDTH, BLOCKS[c], KINDS[c],
                        FULL[c], MANY, PLAIN, STAGED,
                    )  # fmt: skip
    after_previous(EARLY)  # also a program without a row: the next kernel waits for this one, not for those before


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
