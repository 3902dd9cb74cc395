"""The kernels as `torch.library` operations: what `torch.compile`, CUDA graphs and `opcheck` see.

Each takes tensors and numbers only, makes no copy to the host and never asks the device how far it is, so every one can
be captured in a graph. Tensors that Triton can take go to the kernel, others to its twin. `steps.py` wraps
them in the terms of tables and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.backend import power_of_two, runs_kernels, vector_of
from hotrow.kernels.backward import join_kernel, update_kernel, update_twin
from hotrow.kernels.chunks import KIND_COUNT, SPAN_SIZE, SPANS_EACH, chunk_kernel, list_twin
from hotrow.kernels.expand import (
    contract_kernel,
    contract_twin,
    select_backward_kernel,
    select_backward_twin,
    select_kernel,
    select_twin,
)
from hotrow.kernels.places import WIDE, places_kernel, places_twin
from hotrow.kernels.pooling import lookup_kernel, lookup_twin
from hotrow.kernels.shape import CONTRACT_BLOCK, CONTRACT_UNROLL
from hotrow.kernels.tuning import WIDEST
from hotrow.kernels.unique import run_numbers, runs_kernel, sorted_order, unique_twin

JOIN_PROGRAMS = 2048  # enough for every long row to be at work at once, on most batches
JOIN_ELEMENTS, JOIN_REGISTERS = 4096, 224  # of the parts of a row that are asked for at once, and what that takes
JOIN_MOST = 32  # parts that are asked for at once, also of narrow rows


def operation(name: str, mutates_args: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op`, that is called past the dispatcher where nobody traces: it takes a tenth of a
    millisecond for so many arguments, and has nothing to add to tensors without gradients."""

    def decorate(function: Callable[..., Any]) -> Any:
        made: Any = torch.library.custom_op(name, mutates_args=mutates_args)(function)
        made.direct = function
        return made

    return decorate


def run(made: Any, *arguments: Any) -> Any:
    """Calls an operation, directly where it makes no difference: not while it is traced, nor on fake tensors.

    A batch's tensors, which may be fake where the tables are not, are among the first four arguments of each.
    """
    traced = torch.compiler.is_compiling() or any(
        isinstance(a, Tensor) and type(a) is not Tensor for a in arguments[:4]
    )
    return made(*arguments) if traced else made.direct(*arguments)


GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@operation("hotrow::lookup", mutates_args=())
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
    rounds: int,
    registers: int,
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
            member_starts, features, units, even, rounds, power_of_two(features.shape[0]), tuple(blocks), tuple(tiles),
            tuple(vectors), tuple(full), unroll, out_vector, weights is not None, staged.numel() > 0, expanded,
            num_warps=warps, registers=registers,
        )  # fmt: skip
    return out


@lookup.register_fake
def _(values, staged, staged_at, slots, *others):  # type: ignore[no-untyped-def]
    size, dtype = others[8:10]
    return slots.new_empty(size, dtype=dtype)


@operation("hotrow::places", mutates_args=())
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
            factors if weights is None else weights, features, units, even, power_of_two(features.shape[0]), tile, WIDE,
            unit, weights is not None, factored, numbers is not None,
        )  # fmt: skip
    return place, slots, factors


@places.register_fake
def _(numbers, offsets, weights, features, units, even, programs, lookups, unit, factored, tile):  # type: ignore[no-untyped-def]
    place = offsets.new_empty(lookups, dtype=torch.int32)
    slots = offsets.new_empty(lookups if numbers is not None else 0, dtype=torch.int32)
    return place, slots, offsets.new_empty(lookups if factored else 0, dtype=torch.float32)


@operation("hotrow::chunks", mutates_args=())
def chunks(
    rows: Tensor, order: Tensor, places: Tensor, factors: Tensor | None, layout: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Places and factors sorted by row; the ends of each kind of entries; and of entries the begins, infos, slots and
    first places: see `chunks.py`."""
    n = len(rows)
    spans = -(-n // SPAN_SIZE)

    def new(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=rows.device)

    sorted_factors = torch.empty(0 if factors is None else n, device=rows.device)
    if n == 0:
        return new(0), sorted_factors, new(0), new(0), new(0), new(0), new(0)
    if not runs_kernels(rows):
        if factors is not None:
            sorted_factors = factors[order]
        return places[order], sorted_factors, *list_twin(rows, places[order], layout, classes)  # type: ignore[return-value]
    sorted_places, counts = new(n), new((classes * KIND_COUNT + 1) * spans)
    entries = tuple(new(n + spans) for _ in range(4))
    given = (rows, order, places, sorted_factors if factors is None else factors, sorted_places, sorted_factors, counts)
    others = (layout, n, spans, SPANS_EACH, layout.shape[0], classes, factors is not None)
    grid = (-(-spans // SPANS_EACH),)
    chunk_kernel[grid](*given, counts, *entries, *others, False)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    chunk_kernel[grid](*given, ends, *entries, *others, True)
    return sorted_places, sorted_factors, ends, *entries  # type: ignore[return-value]


@chunks.register_fake
def _(rows, order, places, factors, layout, classes):  # type: ignore[no-untyped-def]
    n = rows.shape[0]
    spans = -(-n // SPAN_SIZE)
    sizes = ((classes * KIND_COUNT + 1) * spans, *(n + spans,) * 4)
    factored = rows.new_empty(0 if factors is None else n, dtype=torch.float32)
    return places.new_empty(n), factored, *(rows.new_empty(size, dtype=torch.int32) for size in sizes)


@operation("hotrow::update", mutates_args=("values", "state", "handed"))
def update(
    grads: Tensor,
    rows: Tensor,
    places: Tensor,
    factors: Tensor | None,
    ends: Tensor,
    begins: Tensor,
    infos: Tensor,
    slots: Tensor,
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
    long: Sequence[int],
    short: Sequence[int],
    single: Sequence[int],
    unroll: int,
    share: int,
    registers: int,
) -> None:
    """Sums each row's gradient over its lookups; updates rows that live here, hands out the others' sums."""
    n = rows.numel()
    if n == 0:
        return
    if not runs_kernels(grads):
        update_twin(
            grads, rows, places, factors, values, state, handed, staged_at, layout, hyper, seed, list(kinds), unit
        )
        return
    width = max(blocks)
    spans = -(-n // SPAN_SIZE)
    partials = torch.empty(2 * spans * width, device=grads.device)
    shared = (values, state, handed, staged_at, layout, hyper, seed)
    classes = (tuple(blocks), tuple(kinds))
    staged = handed.numel() > 0
    update_kernel[(-(-n // share),)](
        grads, places, grads if factors is None else factors, ends, begins, infos, slots, firsts, partials, *shared,
        spans, width, *classes, tuple(zip(long, short, single, strict=True)), tuple(vectors), tuple(full),
        tuple(first_segments), tuple(segment_counts), layout.shape[0], unroll, unit, factors is not None, plain,
        staged, num_warps=1, registers=registers,
    )  # fmt: skip
    if spans > 2:  # or no row is long enough to have parts
        join_kernel[(min(JOIN_PROGRAMS, spans),)](
            rows, ends, begins, slots, n, spans, partials, *shared, width, *classes, tuple(vectors), tuple(full),
            min(JOIN_MOST, JOIN_ELEMENTS // width), plain, staged, layout.shape[0], num_warps=1,
            registers=JOIN_REGISTERS if width <= WIDEST else 0,
        )  # fmt: skip


@update.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None


@operation("hotrow::contract", mutates_args=())
def contract(
    grads: Tensor,
    members: Tensor,
    member_starts: Tensor,
    segments: Tensor,
    tile: int,
    programs: int,
    size: int,
    vector: int,
    whole: bool,
) -> Tensor:
    """Gradients of expanded results summed over the samples of each unique sample: flat, float32."""
    if not runs_kernels(grads):
        return contract_twin(grads, members, member_starts, segments, size)
    out = torch.empty(size, device=grads.device)
    if programs:
        contract_kernel[(programs,)](
            out, grads, members, member_starts, segments, segments.shape[0], tile, CONTRACT_BLOCK, vector,
            CONTRACT_UNROLL, whole, num_warps=1,
        )  # fmt: skip
    return out


@contract.register_fake
def _(grads, members, member_starts, segments, tile, programs, size, vector, whole):  # type: ignore[no-untyped-def]
    return grads.new_empty(size, dtype=torch.float32)


@operation("hotrow::jagged_select", mutates_args=())
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
            out,
            values,
            offsets,
            out_offsets,
            inverse,
            len(inverse),
            values.shape[1],
            tile,
            block,
            vector_of(values.shape[1]),
            num_warps=1,
        )
    return out


@jagged_select.register_fake
def _(values, offsets, out_offsets, inverse, members, member_starts, total):  # type: ignore[no-untyped-def]
    return values.new_empty(total, values.shape[1])


@operation("hotrow::jagged_select_backward", mutates_args=())
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
            out,
            grads.contiguous(),
            offsets,
            out_offsets,
            members,
            member_starts,
            samples,
            dim,
            tile,
            block,
            vector_of(dim),
            num_warps=1,
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


@operation("hotrow::unique", mutates_args=())
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
