# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""From unique samples to the batch and back: `contract`, the sum over samples that share a unique one; and the index
select of jagged rows with its gradient, which is such a sum too.

`members` are the samples of the batch ordered by their unique sample and `member_starts` say where each one's begin:
made once from the inverse, they let every sum run in one fixed order without atomics. Nothing is padded: a jagged
sample costs its own length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import after_previous, kernel, tl
from hotrow.kernels.shape import BLOCKS, COLUMNS, FROM, MEMBERS, SAMPLES, SEGMENT_COLUMNS, TO


@kernel()
def contract_kernel(
    out, grads, members, member_starts, segments, SEGMENTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of unique samples by a block of columns; segments without members are copied.

    `WHOLE` if every segment is as wide as some whole blocks: then the first sample is read in place of one that is not
    there, as fewer masked loads are asked for at once.
    """
    after_previous(EARLY)
    program = tl.program_id(0)
    at = segments
    if SEGMENTS > 1:
        begins = tl.load(segments + tl.arange(0, SEGMENTS) * SEGMENT_COLUMNS + BLOCKS)
        at += (tl.sum((begins <= program).to(tl.int32), 0) - 1) * SEGMENT_COLUMNS
    width = tl.load(at + COLUMNS) // VECTOR * VECTOR
    across = tl.cdiv(width, BLOCK)
    piece = program - tl.load(at + BLOCKS)
    columns = (piece % across) * BLOCK + tl.arange(0, BLOCK)
    sample = (piece // across) * TILE + tl.arange(0, TILE)
    live = sample < tl.load(at + SAMPLES)
    inside = (columns < width)[None, :]
    source = grads + tl.load(at + FROM) // VECTOR * VECTOR
    group = tl.load(at + MEMBERS)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    if group >= 0:
        member = tl.load(member_starts + group + sample, mask=live, other=0)
        last = tl.load(member_starts + group + sample + 1, mask=live, other=0)
        for m in range(0, tl.max(last - member, 0), UNROLL):
            for j in tl.static_range(UNROLL):
                has = member + m + j < last
                row = tl.load(members + member + m + j, mask=has, other=0).to(tl.int64)
                place = source + (row * width)[:, None] + columns[None, :]
                if WHOLE:
                    each = tl.load(place, eviction_policy="evict_first")
                    total += tl.where(has[:, None], each, 0.0).to(tl.float32)
                else:
                    total += tl.load(place, mask=has[:, None] & inside, other=0.0).to(tl.float32)
    else:
        place = (sample.to(tl.int64) * width)[:, None] + columns[None, :]
        total += tl.load(source + place, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    place = (sample.to(tl.int64) * width)[:, None] + columns[None, :]
    to = out + tl.load(at + TO) // VECTOR * VECTOR + place
    tl.store(to, total, mask=live[:, None] & inside, eviction_policy="evict_last")  # the update reads it next


def contract_twin(grads: Tensor, members: Tensor, member_starts: Tensor, segments: Tensor, size: int) -> Tensor:
    """What `contract_kernel` computes: float32, flat, on unique samples."""
    out = torch.zeros(size, device=grads.device)
    for begin, to, width, samples, group, *_ in segments.tolist():
        if group < 0:
            out[to : to + samples * width] = grads[begin : begin + samples * width].float()
            continue
        starts = member_starts[group : group + samples + 1].long()
        rows = members[int(starts[0]) : int(starts[-1])].long()
        unique = torch.repeat_interleave(torch.arange(samples, device=out.device), starts[1:] - starts[:-1])
        matrix = grads[begin : begin + len(rows) * width].view(len(rows), width)
        total = torch.zeros(samples, width, device=out.device).index_add_(0, unique, matrix[rows].float())
        out[to : to + samples * width] = total.view(-1)
    return out


@kernel("samples")
def select_kernel(
    out,
    values,
    offsets,
    out_offsets,
    inverse,
    samples,
    dim,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The rows of each sample's unique sample, for a tile of samples side by side."""
    sample = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = sample < samples
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = dim // VECTOR * VECTOR
    inside = (columns < dim)[None, :]
    unique = tl.load(inverse + sample, mask=live, other=0)
    begin = tl.load(offsets + unique, mask=live, other=0).to(tl.int64)
    to = tl.load(out_offsets + sample, mask=live, other=0).to(tl.int64)
    length = tl.load(out_offsets + sample + 1, mask=live, other=0).to(tl.int64) - to
    longest = tl.max(tl.where(live, length, 0), 0)
    for k in range(longest):
        has = (live & (k < length))[:, None] & inside
        row = tl.load(values + ((begin + k) * dim)[:, None] + columns[None, :], mask=has, other=0.0)
        tl.store(out + ((to + k) * dim)[:, None] + columns[None, :], row, mask=has)


@kernel("samples")
def select_backward_kernel(
    out,
    grads,
    offsets,
    out_offsets,
    members,
    member_starts,
    samples,
    dim,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradient of each unique sample's rows: the sum over its samples, in their order."""
    unique = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = unique < samples
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = dim // VECTOR * VECTOR
    inside = (columns < dim)[None, :]
    begin = tl.load(offsets + unique, mask=live, other=0).to(tl.int64)
    length = tl.load(offsets + unique + 1, mask=live, other=0).to(tl.int64) - begin
    member = tl.load(member_starts + unique, mask=live, other=0)
    count = tl.load(member_starts + unique + 1, mask=live, other=0) - member
    most = tl.max(tl.where(live, count, 0), 0)
    longest = tl.max(tl.where(live, length, 0), 0)
    for k in range(longest):
        here = live & (k < length)
        total = tl.zeros([TILE, BLOCK], tl.float32)
        for m in range(most):
            has = here & (m < count)
            sample = tl.load(members + member + m, mask=has, other=0)
            row = tl.load(out_offsets + sample, mask=has, other=0).to(tl.int64) + k
            place = (row * dim)[:, None] + columns[None, :]
            total += tl.load(grads + place, mask=has[:, None] & inside, other=0.0).to(tl.float32)
        place = ((begin + k) * dim)[:, None] + columns[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=here[:, None] & inside)


def select_twin(values: Tensor, offsets: Tensor, out_offsets: Tensor, inverse: Tensor, total: int) -> Tensor:
    """What `select_kernel` computes: `[total, dim]`."""
    return values[_sources(offsets, out_offsets, inverse, total)]


def select_backward_twin(
    grads: Tensor, offsets: Tensor, out_offsets: Tensor, members: Tensor, member_starts: Tensor, rows: int
) -> Tensor:
    """What `select_backward_kernel` computes: `[rows, dim]`."""
    unique = torch.arange(len(member_starts) - 1, device=grads.device)
    inverse = torch.empty(len(members), dtype=torch.int64, device=grads.device)
    inverse[members.long()] = torch.repeat_interleave(unique, (member_starts[1:] - member_starts[:-1]).long())
    total = torch.zeros(rows, grads.shape[1], device=grads.device)
    return total.index_add_(0, _sources(offsets, out_offsets, inverse, len(grads)), grads.float()).to(grads.dtype)


def _sources(offsets: Tensor, out_offsets: Tensor, inverse: Tensor, total: int) -> Tensor:
    lengths = (out_offsets[1:] - out_offsets[:-1]).long()
    shift = torch.repeat_interleave(offsets[inverse.long()].long() - out_offsets[:-1].long(), lengths)
    return torch.arange(total, device=offsets.device) + shift
