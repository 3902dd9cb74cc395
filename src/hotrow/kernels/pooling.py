# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Pooled and sequence lookup: all features of a batch, over tables of any dims, in one launch.

A program takes a few cells of one feature and adds up their rows side by side, one lookup of each cell at a time,
in the order of the batch. So every result has one order of summation, whatever the tuned tile is: tuning never
changes a bit. A cell of an expanded group is pooled once and written to each sample that shares it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import after_previous, apart, constant, jit, kernel, tl
from hotrow.kernels.shape import (
    BEGIN,
    CELLS,
    EXPAND,
    FEATURE_COLUMNS,
    FIRST_SLOT,
    HERE,
    KIND,
    LOOKUPS,
    MEAN,
    OFFSETS,
    OUT,
    POOLING,
    SEGMENT,
    SEQUENCE,
    STRIDE,
    WIDTH,
)

COPIES = constant(4)  # samples that a result is written to at once


@jit
def feature_of(program, units, even, FEATURES: tl.constexpr):
    """Which feature a program works for, and its number there: found without a load if all have `even` programs.

    Where `even` is negative, programs of all features take turns.
    """
    each = tl.maximum(tl.abs(even), 1)
    feature = program // each
    block = program % each
    if even < 0:
        count = tl.num_programs(0) // each
        feature = program % count
        block = program // count
    if even == 0:
        ends = tl.load(units + 1 + tl.arange(0, FEATURES))
        feature = tl.sum((ends <= program).to(tl.int32), 0)
        block = program - tl.load(units + feature)
    return feature, block


@jit
def bag_lookups(offsets, shift, cell, live):
    """The first lookup of each cell of a pooled feature and the one behind its last; dead cells have none."""
    begin = (tl.load(offsets + cell, mask=live, other=0) + shift).to(tl.int32)
    end = (tl.load(offsets + cell + 1, mask=live, other=0) + shift).to(tl.int32)
    return begin, tl.where(live, end, begin)


@jit
def within(rows, columns, dim, FULL: tl.constexpr):
    """The mask of a tile: live rows, and columns below the dim where it is not the whole block."""
    return rows[:, None] & ((columns >= 0) if FULL else (columns < dim))[None, :]


@jit
def take(at, mask, ALL: tl.constexpr):
    """What lies at `at`, in float32, 0 where it is masked; without a mask if `ALL` is there.

    Of masked loads the assembler asks for a few at a time, of others for as many as there are registers.
    """
    taken = tl.load(at) if ALL else tl.load(at, mask=mask, other=0.0)
    return taken.to(tl.float32)


@jit
def whole_vectors(dim, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr):
    """The dim in a form that says how far it can be divided, so that loads are wide; a constant where it is one."""
    return BLOCK if FULL else dim // VECTOR * VECTOR


@jit
def _row(
    values, staged, base, staged_base, local, here, has, columns, dim, FULL: tl.constexpr, STAGED: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Some rows of one segment, by their number in it; `ALL` if none is to be masked."""
    place = (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    if STAGED:
        row = take(values + place, within(has & (local < here), columns, dim, FULL), False)
        place = (staged_base + (local - here).to(tl.int64) * dim)[:, None] + columns[None, :]
        row += take(staged + place, within(has & (local >= here), columns, dim, FULL), False)
    else:
        row = take(values + place, within(has, columns, dim, FULL), FULL and ALL)
    return row


@jit
def _add(
    total, share, values, staged, base, staged_base, slots, weights, begin, length, k, first, here, columns, dim,
    FULL: tl.constexpr, WEIGHTED: tl.constexpr, STAGED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Adds the row of each cell's k-th lookup, of those that have so many, or of `ALL`."""
    has = k < length
    slot = tl.load(slots + begin + k) if ALL else tl.load(slots + begin + k, mask=has, other=0)
    local = slot - first
    row = _row(values, staged, base, staged_base, local, here, has, columns, dim, FULL, STAGED, ALL)
    if WEIGHTED:
        weight = tl.load(weights + begin + k, mask=has, other=0.0)
        share += weight
        row *= weight[:, None]
    return total + row, share


@jit
def _pool(
    to, values, staged, base, staged_base, slots, offsets, shift, weights, members, member_starts, group, mean, cell,
    cells, first, here, columns, dim, stride,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, UNROLL: tl.constexpr, WEIGHTED: tl.constexpr,
    STAGED: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """One tile of cells of one pooled feature."""
    live = cell < cells
    begin, end = bag_lookups(offsets, shift, cell, live)
    length = end - begin
    member = cell
    last = cell
    if EXPANDED and group >= 0:  # asked for now, as they are needed as soon as the rows are there
        member = tl.load(member_starts + group + cell, mask=live, other=0)
        last = tl.load(member_starts + group + cell + 1, mask=live, other=0)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    share = tl.zeros([TILE], tl.float32)
    all = tl.min(length, 0) // UNROLL * UNROLL  # lookups that each cell of the tile has
    for k in range(0, all, UNROLL):
        for j in tl.static_range(UNROLL):
            total, share = _add(
                total, share, values, staged, base, staged_base, slots, weights, begin, length, k + j, first, here,
                columns, dim, FULL, WEIGHTED, STAGED, True,
            )  # fmt: skip
    for k in range(all, tl.max(length, 0), UNROLL):
        for j in tl.static_range(UNROLL):
            total, share = _add(
                total, share, values, staged, base, staged_base, slots, weights, begin, length, k + j, first, here,
                columns, dim, FULL, WEIGHTED, STAGED, False,
            )  # fmt: skip
    if mean:
        if not WEIGHTED:
            share = tl.maximum(length, 1).to(tl.float32)
        total = total * tl.where(share == 0.0, 0.0, 1.0 / tl.where(share == 0.0, 1.0, share))[:, None]
    result = total.to(to.dtype.element_ty)
    if EXPANDED and group >= 0:
        most = tl.max(last - member, 0)
        for m in range(0, most, COPIES):
            for j in tl.static_range(COPIES):
                shares = member + m + j < last
                sample = tl.load(members + member + m + j, mask=shares, other=0).to(tl.int64)
                place = (sample * stride)[:, None] + columns[None, :]
                tl.store(to + place, result, mask=within(shares, columns, dim, FULL), cache_modifier=".cs")
    else:
        place = (cell.to(tl.int64) * stride)[:, None] + columns[None, :]
        tl.store(to + place, result, mask=within(live, columns, dim, FULL), cache_modifier=".cs")


@jit
def _feature(
    out, values, staged, staged_at, slots, offsets, weights, members, member_starts, at, block, rounds,
    BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr, UNROLL: tl.constexpr,
    OUT_VECTOR: tl.constexpr, WEIGHTED: tl.constexpr, STAGED: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """Some tiles of cells of one feature, one after another."""
    columns = tl.arange(0, BLOCK)
    cells = tl.load(at + CELLS)
    first = tl.load(at + FIRST_SLOT).to(tl.int32)
    here = tl.load(at + HERE).to(tl.int32)
    dim = whole_vectors(tl.load(at + WIDTH), BLOCK, VECTOR, FULL)
    base = tl.load(at + BEGIN) // VECTOR * VECTOR
    staged_base = tl.load(staged_at + tl.load(at + SEGMENT)) // VECTOR * VECTOR if STAGED else 0
    stride = tl.load(at + STRIDE) // OUT_VECTOR * OUT_VECTOR
    to = out + tl.load(at + OUT) // OUT_VECTOR * OUT_VECTOR
    group = tl.load(at + EXPAND) if EXPANDED else -1
    shift = tl.load(at + LOOKUPS)
    pooling = tl.load(at + POOLING)
    offsets += tl.load(at + OFFSETS)
    cell = block * (rounds * TILE) + tl.arange(0, TILE)
    if pooling == SEQUENCE:
        start = (tl.load(offsets) + shift).to(tl.int32)
        for r in range(rounds):
            mine = cell + r * TILE
            live = mine < cells
            local = tl.load(slots + start + mine, mask=live, other=0) - first
            row = _row(values, staged, base, staged_base, local, here, live, columns, dim, FULL, STAGED, False)
            place = (mine.to(tl.int64) * stride)[:, None] + columns[None, :]
            tl.store(
                to + place, row.to(out.dtype.element_ty), mask=within(live, columns, dim, FULL), cache_modifier=".cs"
            )
    else:
        for r in range(rounds):
            _pool(
                to, values, staged, base, staged_base, slots, offsets, shift, weights, members, member_starts, group,
                pooling == MEAN, cell + r * TILE, cells, first, here, columns, dim, stride, BLOCK, TILE, FULL, UNROLL,
                WEIGHTED, STAGED, EXPANDED,
            )  # fmt: skip


_feature_apart = apart(_feature)


@kernel("even", "rounds")
def lookup_kernel(
    out, values, staged, staged_at, slots, offsets, weights, members, member_starts, features, units, even, rounds,
    FEATURES: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, VECTORS: tl.constexpr, FULL: tl.constexpr,
    UNROLL: tl.constexpr, OUT_VECTOR: tl.constexpr, WEIGHTED: tl.constexpr, STAGED: tl.constexpr,
    EXPANDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    feature, block = feature_of(tl.program_id(0), units, even, FEATURES)
    at = features + feature * FEATURE_COLUMNS
    if len(BLOCKS) == 1:
        _feature(
            out, values, staged, staged_at, slots, offsets, weights, members, member_starts, at, block, rounds,
            BLOCKS[0], TILES[0], VECTORS[0], FULL[0], UNROLL, OUT_VECTOR, WEIGHTED, STAGED, EXPANDED,
        )  # fmt: skip
    else:
        kind = tl.load(at + KIND)
        for c in tl.static_range(len(BLOCKS)):
            if kind == c:
                _feature_apart(
                    out, values, staged, staged_at, slots, offsets, weights, members, member_starts, at, block, rounds,
                    BLOCKS[c], TILES[c], VECTORS[c], FULL[c], UNROLL, OUT_VECTOR, WEIGHTED, STAGED, EXPANDED,
                )  # fmt: skip


def lookup_twin(
    values: Tensor,
    staged: Tensor,
    staged_at: Tensor,
    slots: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    members: Tensor,
    member_starts: Tensor,
    features: Tensor,
    size: int,
    out_dtype: torch.dtype,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """What `lookup_kernel` computes, feature by feature; `compute` is the precision of its sums."""
    out = torch.zeros(size, dtype=out_dtype, device=values.device)
    for row in features.tolist():
        offset, shift, cells, to, stride, pooling, group, _, _, segment, _, first, here, dim, begin, _ = row
        if pooling == 2:
            start = int(offsets[offset]) + shift
            ends = torch.arange(start, start + cells + 1, device=out.device)
        else:
            ends = offsets[offset : offset + cells + 1] + shift
        lengths = ends[1:] - ends[:-1]
        cell = torch.repeat_interleave(torch.arange(cells, device=out.device), lengths)
        span = slice(int(ends[0]), int(ends[-1]))
        local = slots[span].long() - first
        rows = rows_at(values, staged, local, here, dim, begin, int(staged_at[segment]) if len(staged) else 0)
        rows = rows.to(compute)
        weight = torch.ones(len(local), dtype=compute, device=out.device)
        if weights is not None and pooling != 2:  # rows of a sequence come as they are
            weight = weights[span]
        result = torch.zeros(cells, dim, dtype=compute, device=out.device)
        result.index_add_(0, cell, rows * weight.to(compute)[:, None])
        if pooling == 1:
            share = torch.zeros(cells, dtype=compute, device=out.device).index_add_(0, cell, weight.to(compute))
            result = torch.where(share == 0, 0.0, 1 / torch.where(share == 0, 1.0, share))[:, None] * result
        samples, source = torch.arange(cells, device=out.device), torch.arange(cells, device=out.device)
        if group >= 0:
            span = slice(int(member_starts[group]), int(member_starts[group + cells]))
            counts = member_starts[group + 1 : group + cells + 1] - member_starts[group : group + cells]
            samples, source = members[span].long(), torch.repeat_interleave(source, counts)
        place = (to + samples * stride)[:, None] + torch.arange(dim, device=out.device)
        out[place] = result[source].to(out_dtype)
    return out


def rows_at(values: Tensor, staged: Tensor, local: Tensor, here: int, dim: int, begin: int, staged_at: int) -> Tensor:
    """Rows of one table by their number in it, `[n, dim]`: those below `here` from storage, others staged."""
    columns = torch.arange(dim, device=values.device)
    cold = local >= here
    rows = torch.empty(len(local), dim, dtype=values.dtype if staged.numel() == 0 else torch.float32)
    rows = rows.to(values.device)
    rows[~cold] = values[(begin + local[~cold] * dim)[:, None] + columns].to(rows.dtype)
    rows[cold] = staged[(staged_at + (local[cold] - here) * dim)[:, None] + columns].to(rows.dtype)
    return rows
