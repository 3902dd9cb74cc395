"""The kernels as `torch.library` operations: what `torch.compile`, CUDA graphs and `opcheck` see.

Each takes tensors and numbers only, makes no copy to the host and never asks the device how far it is, so every one can
be captured in a graph. Tensors that Triton can take go to the kernel, others to its twin. `steps.py` wraps
them in the terms of tables and batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.kernels.backend import power_of_two, runs_kernels
from hotrow.kernels.chunks import CHUNK_SIZE, chunk_kernel, chunk_twin, count_kernel, count_twin
from hotrow.kernels.expand import (
    contract_kernel,
    contract_twin,
    select_backward_kernel,
    select_backward_twin,
    select_kernel,
    select_twin,
)
from hotrow.kernels.pooling import lookup_kernel, lookup_twin
from hotrow.kernels.places import WIDE, places_kernel, places_twin
from hotrow.kernels.shape import CONTRACT_BLOCK, CONTRACT_TILE
from hotrow.kernels.unique import run_numbers, runs_kernel, sorted_order, unique_twin
from hotrow.kernels.backward import join_kernel, update_kernel, update_twin

JOIN_UNROLL = 8  # parts of a row that are asked for at once
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("hotrow::lookup", mutates_args=())
def lookup(
    values: Tensor,
    staged: Tensor,
    staged_at: Tensor,
    slots: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    members: Tensor,
    member_starts: Tensor,
    features: Tensor,
    units: Tensor,
    even: int,
    programs: int,
    size: int,
    dtype: torch.dtype,
    expanded: bool,
    out_vector: int,
    blocks: Sequence[int],
    vectors: Sequence[int],
    full: Sequence[bool],
    tiles: Sequence[int],
    unroll: int,
    warps: int,
) -> Tensor:
    """Results of a batch, flat: see `BatchShape`."""
    if not runs_kernels(slots):
        return lookup_twin(
            values, staged, staged_at, slots, offsets, weights, members, member_starts, features, size, dtype
        )
    out = torch.empty(size, dtype=dtype, device=slots.device)
    if programs:
        lookup_kernel[(programs,)](
            out, values, staged, staged_at, slots, offsets, slots if weights is None else weights, members,
            member_starts, features, units, even, power_of_two(len(features)), tuple(blocks), tuple(tiles), tuple(vectors),
            tuple(full), unroll, out_vector, weights is not None, staged.numel() > 0, expanded, num_warps=warps,
        )  # fmt: skip
    return out


@lookup.register_fake
def _(values, staged, staged_at, slots, offsets, weights, members, member_starts, features, units, even, programs, size, dtype,
      expanded, out_vector, blocks, vectors, full, tiles, unroll, warps):  # type: ignore[no-untyped-def]  # fmt: skip
    return slots.new_empty(size, dtype=dtype)


@torch.library.custom_op("hotrow::places", mutates_args=())
def places(
    numbers: Tensor | None,
    offsets: Tensor,
    weights: Tensor | None,
    features: Tensor,
    units: Tensor,
    even: int,
    programs: int,
    lookups: int,
    unit: int,
    factored: bool,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """For each lookup its place, its slot if it has a number in its table, and its factor if it needs one."""
    if not runs_kernels(offsets):
        place, slots, factors = places_twin(numbers, offsets, weights, features, lookups, unit)
        return place, slots if numbers is not None else place.new_empty(0), factors if factored else factors[:0].clone()
    place = torch.empty(lookups, dtype=torch.int32, device=offsets.device)
    slots = torch.empty(lookups if numbers is not None else 0, dtype=torch.int32, device=offsets.device)
    factors = torch.empty(lookups if factored else 0, device=offsets.device)
    if programs:
        places_kernel[(programs,)](
            place, slots, factors, offsets if numbers is None else numbers, offsets,
            factors if weights is None else weights, features, units, even, power_of_two(len(features)), tile, WIDE, unit,
            weights is not None, factored, numbers is not None,
        )  # fmt: skip
    return place, slots, factors


@places.register_fake
def _(numbers, offsets, weights, features, units, even, programs, lookups, unit, factored, tile):  # type: ignore[no-untyped-def]
    place = offsets.new_empty(lookups, dtype=torch.int32)
    slots = offsets.new_empty(lookups if numbers is not None else 0, dtype=torch.int32)
    return place, slots, offsets.new_empty(lookups if factored else 0, dtype=torch.float32)


@torch.library.custom_op("hotrow::chunks", mutates_args=())
def chunks(
    rows: Tensor, order: Tensor, places: Tensor, factors: Tensor | None, layout: Tensor, classes: int, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sorted places and factors; ends of the chunks by class and tile; the chunks, five lists."""
    n = len(rows)
    tiles = max(1, -(-n // tile))
    if not runs_kernels(rows) or n == 0:
        ends = torch.zeros(classes * tiles, dtype=torch.int32, device=rows.device)
        lists = [torch.zeros(n, dtype=torch.int32, device=rows.device) for _ in range(5)]
        sorted_places = places[order]
        if n:
            ends.copy_(torch.cumsum(count_twin(rows, layout, tile, classes), 0))
            for full, found in zip(lists, chunk_twin(rows, sorted_places, layout, tile), strict=True):
                full[: len(found)] = found
        begins, infos, slots, segments, firsts = lists
        sorted_factors = torch.empty(0, device=rows.device) if factors is None else factors[order]
        return sorted_places, sorted_factors, ends, begins, infos, slots, segments, firsts
    counts = torch.empty(classes * tiles, dtype=torch.int32, device=rows.device)
    count_kernel[(tiles,)](rows, counts, layout, n, tiles, tile, len(layout), classes)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    sorted_places = torch.empty_like(places)
    sorted_factors = torch.empty(0 if factors is None else n, device=rows.device)
    begins, infos, slots, segments, firsts = (torch.empty(n, dtype=torch.int32, device=rows.device) for _ in range(5))
    chunk_kernel[(tiles,)](
        rows, order, places, sorted_factors if factors is None else factors, sorted_places, sorted_factors, counts,
        ends, begins, infos, slots, segments, firsts, layout, n, tiles, tile, len(layout), classes,
        factors is not None,
    )  # fmt: skip
    return sorted_places, sorted_factors, ends, begins, infos, slots, segments, firsts


@chunks.register_fake
def _(rows, order, places, factors, layout, classes, tile):  # type: ignore[no-untyped-def]
    n = rows.shape[0]
    lists = [rows.new_empty(n, dtype=torch.int32) for _ in range(5)]
    ends = rows.new_empty(classes * max(1, -(-n // tile)), dtype=torch.int32)
    factored = rows.new_empty(0 if factors is None else n, dtype=torch.float32)
    return places.new_empty(n), factored, ends, *lists


@torch.library.custom_op("hotrow::update", mutates_args=("values", "state", "handed"))
def update(
    grads: Tensor,
    rows: Tensor,
    places: Tensor,
    factors: Tensor | None,
    ends: Tensor,
    begins: Tensor,
    infos: Tensor,
    slots: Tensor,
    segments: Tensor,
    firsts: Tensor,
    values: Tensor,
    state: Tensor,
    handed: Tensor,
    staged_at: Tensor,
    layout: Tensor,
    hyper: Tensor,
    seed: Tensor,
    blocks: Sequence[int],
    kinds: Sequence[int],
    vectors: Sequence[int],
    full: Sequence[bool],
    first_segments: Sequence[int],
    segment_counts: Sequence[int],
    plain: bool,
    unit: int,
    tiles: Sequence[int],
    unroll: int,
    warps: int,
    programs: int,
) -> None:
    """Sums each row's gradient over its lookups; updates rows that live here, hands out the others' sums."""
    if len(rows) == 0:
        return
    if not runs_kernels(grads):
        update_twin(
            grads, rows, places, factors, values, state, handed, staged_at, layout, hyper, seed, list(kinds), unit
        )
        return
    n, width = len(rows), max(blocks)
    border = -(-n // CHUNK_SIZE)
    partials = torch.empty(2 * border * width, device=grads.device)
    shared = (values, state, handed, staged_at, layout, hyper, seed)
    classes = (tuple(blocks), tuple(kinds))
    staged = handed.numel() > 0
    update_kernel[(programs,)](
        grads, places, grads if factors is None else factors, ends, begins, infos, slots, segments, firsts, partials,
        *shared, len(ends) // len(blocks), width, *classes, tuple(tiles), tuple(vectors), tuple(full),
        tuple(first_segments), tuple(segment_counts), unroll, unit, factors is not None, plain, staged,
        num_warps=warps,
    )  # fmt: skip
    if border > 1:
        join_kernel[(border - 1,)](
            rows, n, partials, *shared, width, *classes, tuple(vectors), tuple(full), JOIN_UNROLL, plain, staged,
            len(layout), num_warps=1,
        )  # fmt: skip


@update.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("hotrow::contract", mutates_args=())
def contract(
    grads: Tensor, members: Tensor, member_starts: Tensor, segments: Tensor, programs: int, size: int, vector: int
) -> Tensor:
    """Gradients of expanded results summed over the samples of each unique sample: flat, float32."""
    if not runs_kernels(grads):
        return contract_twin(grads, members, member_starts, segments, size)
    out = torch.empty(size, device=grads.device)
    if programs:
        contract_kernel[(programs,)](
            out, grads, members, member_starts, segments, len(segments), CONTRACT_TILE, CONTRACT_BLOCK, vector,
            num_warps=1,
        )  # fmt: skip
    return out


@contract.register_fake
def _(grads, members, member_starts, segments, programs, size, vector):  # type: ignore[no-untyped-def]
    return grads.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("hotrow::jagged_select", mutates_args=())
def jagged_select(
    values: Tensor,
    offsets: Tensor,
    out_offsets: Tensor,
    inverse: Tensor,
    members: Tensor,
    member_starts: Tensor,
    total: int,
) -> Tensor:
    """Jagged rows of unique samples, expanded to the batch: `[total, dim]`, split at `out_offsets`."""
    if not runs_kernels(values):
        return select_twin(values, offsets, out_offsets, inverse, total)
    out = torch.empty(total, values.shape[1], dtype=values.dtype, device=values.device)
    if total and values.shape[1]:
        block = min(power_of_two(values.shape[1]), 256)
        tile = max(1, 512 // block)
        grid = (-(-len(inverse) // tile), -(-values.shape[1] // block))
        select_kernel[grid](
            out, values, offsets, out_offsets, inverse, len(inverse), values.shape[1], tile, block, num_warps=1
        )
    return out


@jagged_select.register_fake
def _(values, offsets, out_offsets, inverse, members, member_starts, total):  # type: ignore[no-untyped-def]
    return values.new_empty(total, values.shape[1])


@torch.library.custom_op("hotrow::jagged_select_backward", mutates_args=())
def jagged_select_backward(
    grads: Tensor, offsets: Tensor, out_offsets: Tensor, members: Tensor, member_starts: Tensor, rows: int
) -> Tensor:
    """The gradient of `jagged_select`'s values: each row's sum over the samples that share it."""
    if not runs_kernels(grads):
        return select_backward_twin(grads, offsets, out_offsets, members, member_starts, rows)
    dim = grads.shape[1]
    out = torch.empty(rows, dim, dtype=grads.dtype, device=grads.device)
    samples = len(offsets) - 1
    if rows and dim and samples:
        block = min(power_of_two(dim), 256)
        tile = max(1, 512 // block)
        select_backward_kernel[(-(-samples // tile), -(-dim // block))](
            out, grads.contiguous(), offsets, out_offsets, members, member_starts, samples, dim, tile, block, num_warps=1
        )
    return out


@jagged_select_backward.register_fake
def _(grads, offsets, out_offsets, members, member_starts, rows):  # type: ignore[no-untyped-def]
    return grads.new_empty(rows, grads.shape[1])


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    values, offsets, out_offsets, _, members, member_starts, _ = inputs
    ctx.save_for_backward(offsets, out_offsets, members, member_starts)
    ctx.rows = values.shape[0]


def _select_gradient(ctx, grad):  # type: ignore[no-untyped-def]
    return jagged_select_backward(grad, *ctx.saved_tensors, ctx.rows), None, None, None, None, None, None


jagged_select.register_autograd(_select_gradient, setup_context=_keep)


@torch.library.custom_op("hotrow::unique", mutates_args=())
def unique(
    keys: Tensor, tables: Tensor | None, bound: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Unique keys `[n]`, their tables, inverse `[n]`, order `[n]`, starts `[n + 1]` and how many there are `[1]`.

    What is behind the count is not defined. `bound` is what every key is below and not below zero, if that is known.
    """
    n = len(keys)
    if not runs_kernels(keys) or n == 0:
        return unique_twin(keys, tables)
    order = sorted_order(keys, tables, bound)
    numbers = run_numbers(keys, tables, order)
    found = torch.empty_like(keys)
    of, inverse = (torch.empty(n, dtype=torch.int32, device=keys.device) for _ in range(2))
    starts = torch.empty(n + 1, dtype=torch.int32, device=keys.device)
    count = torch.empty(1, dtype=torch.int32, device=keys.device)
    tile = 1024
    runs_kernel[(-(-n // tile),)](
        keys, order, keys if tables is None else tables, numbers, found, of, inverse, starts, count, n, tile,
        tables is not None,
    )  # fmt: skip
    return found, of, inverse, order, starts, count


@unique.register_fake
def _(keys, tables, bound):  # type: ignore[no-untyped-def]
    n = keys.shape[0]
    narrow = [keys.new_empty(size, dtype=torch.int32) for size in (n, n, n + 1, 1)]
    return keys.new_empty(n), narrow[0], narrow[1], keys.new_empty(n, dtype=torch.int64), narrow[2], narrow[3]
