"""The steps of a batch on a device: group its lookups, look them up, and update the rows from the results' gradients.

    slots, grouping = group_numbers(tables, shape, numbers, offsets)   # or group(...), where slots are known
    results = lookup(tables, shape, slots, offsets)                    # flat; shape.views(results) are the matrices
    update(tables, shape, grouping, gradient_of_results)

Grouping needs no row and only the update needs it: it may be made ahead, or on a stream of its own beside the lookup.
Nothing here waits for the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.errors import BatchError
from hotrow.kernels import ops
from hotrow.kernels.shape import BatchShape
from hotrow.kernels.tables import Tables
from hotrow.kernels.tuning import FULL_LOAD, Config, candidates, choose, chosen, key_of
from hotrow.kernels.unique import sort_by_row

PLACES_TILE = 128  # cells whose lookups one program writes down


class Members(NamedTuple):
    """The samples of a batch ordered by their unique sample, group after group, and where each one's begin."""

    samples: Tensor
    starts: Tensor

    @staticmethod
    def of(inverse: Tensor, unique: int) -> Members:
        """The members of one group; `inverse[B]` says which of `unique` samples each sample is."""
        ordered, order = torch.sort(inverse.to(torch.int32), stable=True)
        each = torch.arange(unique + 1, dtype=torch.int32, device=inverse.device)
        return Members(order.to(torch.int32), torch.searchsorted(ordered, each, out_int32=True))


@dataclass(frozen=True)
class Staged:
    """Rows of other tiers that came with a batch: flat `rows`, and at `begins[segment]` each segment's.

    `tables.staged_begins` are the begins of a buffer with room for all staged slots, `tables.staged_of` its views.
    """

    rows: Tensor
    begins: Tensor


class Grouping(NamedTuple):
    """Lookups sorted by row, with their places and factors in that order, and the work list of `chunks.py`."""

    rows: Tensor
    places: Tensor
    factors: Tensor | None
    ends: Tensor
    begins: Tensor
    infos: Tensor
    slots: Tensor
    firsts: Tensor


def group(
    tables: Tables,
    shape: BatchShape,
    slots: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
) -> Grouping:
    """Groups lookups whose slots are known: `slots[L]`, int32, in the batch's order."""
    _check(shape, slots, offsets, weights)
    places, _, factors = _places(shape, None, offsets, weights)
    return group_places(tables, slots, places, factors)


def group_numbers(
    tables: Tables,
    shape: BatchShape,
    numbers: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, Grouping]:
    """The same for keys that are row numbers within their tables, any integer dtype; returns their slots too."""
    slots, places, factors = number_slots(shape, numbers, offsets, weights)
    return slots, group_places(tables, slots, places, factors)


def number_slots(
    shape: BatchShape, numbers: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first half of `group_numbers`: slots, which the lookup needs at once; places and factors."""
    _check(shape, numbers, offsets, weights)
    places, slots, factors = _places(shape, numbers, offsets, weights)
    return slots, places, factors


def group_places(tables: Tables, slots: Tensor, places: Tensor, factors: Tensor | None) -> Grouping:
    """The second half of `group_numbers`."""
    rows, order = sort_by_row(slots)
    sorted_places, sorted_factors, *entries = ops.run(
        ops.chunks, rows, order, places, factors, tables.layout, len(tables.classes)
    )
    return Grouping(rows, sorted_places, None if factors is None else sorted_factors, *entries)


def lookup(
    tables: Tables,
    shape: BatchShape,
    slots: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    members: Members | None = None,
    staged: Staged | None = None,
    dtype: torch.dtype = torch.float32,
    config: Config | None = None,
) -> Tensor:
    """Results of a batch, flat; `members` of the expanded groups, if there are any."""
    _check(shape, slots, offsets, weights)
    if shape.expanded and members is None:
        raise BatchError("A group is to be expanded, but nothing says which samples share a unique one: give members.")
    config = config or chosen("lookup", tables.machine, tables.blocks, tables.dtype, shape.kind)
    tiles = config.tiles(tables.blocks)
    units, programs, even = shape.units(tuple(tile * config.share for tile in tiles))
    empty = tables.nothing
    results: Tensor = ops.run(
        ops.lookup,
        tables.values,
        staged.rows if staged is not None else tables.no_rows,
        staged.begins if staged is not None else empty,
        slots,
        offsets,
        weights,
        members.samples if members is not None else empty,
        members.starts if members is not None else empty,
        shape.features,
        units,
        -even if config.across else even,
        programs,
        shape.size,
        dtype,
        shape.expanded,
        shape.out_vector,
        tables.blocks,
        tables.vectors,
        tables.full,
        tiles,
        config.unroll,
        config.warps,
        config.share,
        config.registers,
    )
    return results


def update(
    tables: Tables,
    shape: BatchShape,
    grouping: Grouping,
    grads: Tensor,
    *,
    members: Members | None = None,
    staged: Staged | None = None,
    handed: Tensor | None = None,
    seed: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """One step of every touched row's optimizer from the flat gradient of the results.

    Summed gradients of staged rows go to `handed`, float32 and laid out as the staged rows are. Where rows are stored
    in less than float32, `seed[1]`, int64, must be given and differ from step to step.
    """
    if grads.numel() != shape.size:
        raise BatchError(f"The gradient has {grads.numel():,} values, the results of this batch have {shape.size:,}.")
    if (staged is None) != (handed is None):
        raise BatchError("Staged rows and the buffer their gradients are handed out in come together or not at all.")
    if seed is None and tables.dtype != torch.float32:
        raise BatchError(
            f"Rows in {str(tables.dtype).removeprefix('torch.')} are rounded by chance, with other bits at every step: "
            f"give update a seed[1], int64, that changes from step to step."
        )
    grads = grads.reshape(-1)
    if shape.expanded:
        assert members is not None
        grads = ops.run(
            ops.contract,
            grads,
            *members,
            shape.segments,
            shape.contract_tile,
            shape.contract_programs,
            shape.unique_size,
            shape.contract_vector,
            shape.contract_whole,
        )
    blocks = tables.blocks
    config = config or chosen("update", tables.machine, blocks, tables.dtype, shape.kind)
    ops.run(
        ops.update,
        grads,
        *grouping,
        tables.values,
        tables.state,
        handed if handed is not None else tables.no_rows,
        staged.begins if staged is not None else tables.nothing,
        tables.layout,
        tables.hyper,
        seed if seed is not None else tables.no_seed,
        blocks,
        tables.kinds,
        tables.vectors,
        tables.full,
        tables.first_segments,
        tables.segment_counts,
        tables.plain,
        shape.unit,
        config.tiles(blocks, FULL_LOAD),
        config.tiles(blocks, 2 * FULL_LOAD),
        config.tiles(blocks, max(config.elements, 2 * FULL_LOAD)),  # a full load of 16 bits a value
        config.unroll,
        config.share,
        config.registers,
    )


def tune(
    tables: Tables,
    shape: BatchShape,
    slots: Tensor,
    offsets: Tensor,
    grouping: Grouping,
    *,
    weights: Tensor | None = None,
    members: Members | None = None,
) -> dict[str, Config]:
    """Measures the kernels on one real batch and keeps the best. Rows and state are put back as they were."""
    device, blocks = slots.device, tables.blocks
    if device.type != "cuda":
        return {}
    best = {}
    key = key_of("lookup", tables.machine, blocks, tables.dtype, shape.kind)
    best["lookup"] = choose(
        key,
        candidates("lookup", blocks),
        lambda c: lookup(tables, shape, slots, offsets, weights, members=members, config=c),
    )
    grads = torch.zeros(shape.size, device=device)
    touched = [
        (
            t,
            torch.unique(slots[(slots >= tables.first[t]) & (slots < tables.first[t] + spec.rows)]).long()
            - tables.first[t],
        )
        for t, spec in enumerate(tables.specs)
    ]
    kept = [(t, at, tables.rows_of(t)[at].clone(), tables.state_of(t)[at].clone()) for t, at in touched]
    key = key_of("update", tables.machine, blocks, tables.dtype, shape.kind)
    best["update"] = choose(
        key,
        candidates("update", blocks),
        lambda c: update(tables, shape, grouping, grads, members=members, seed=tables.no_seed, config=c),
    )
    for t, at, rows, state in kept:
        tables.rows_of(t)[at] = rows
        tables.state_of(t)[at] = state
    return best


def _places(
    shape: BatchShape, numbers: Tensor | None, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    units, programs, even = shape.units((PLACES_TILE,) * len(shape.tables.classes))
    factored = weights is not None or any(f.pooling == "mean" for g in shape.groups for f in g.features)
    places, slots, factors = ops.run(
        ops.places,
        numbers,
        offsets,
        weights,
        shape.features,
        units,
        even,
        programs,
        shape.lookups,
        shape.unit,
        factored,
        PLACES_TILE,
    )
    return places, slots, factors if factored else None


def _check(shape: BatchShape, slots: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
    if slots.numel() != shape.lookups:
        raise BatchError(f"The batch has {shape.lookups:,} lookups, but {len(slots):,} rows are named.")
    if offsets.numel() != shape.bags:
        raise BatchError(
            f"The batch needs {shape.bags:,} offsets (features x samples + 1 for each group), not {len(offsets):,}."
        )
    if weights is not None and weights.numel() != shape.lookups:
        raise BatchError(f"The batch has {shape.lookups:,} lookups, but {len(weights):,} weights.")
