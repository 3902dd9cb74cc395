# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The work lists of the backward pass: chunks of lookups that share a row, and rows that have one lookup only.

Lookups sorted by row are cut into spans of 64. A *chunk* is the lookups of one row within a span, so a row of many
lookups is many chunks, which run side by side and are joined afterwards; whether a row goes on in the next span is
seen from the two lookups at the border. Chunks stand longest first: those that one program handles together are about
equally long. Rows of a *single* lookup, most rows of most batches, need no sum and have a list of their own.
Either list has as much room in a span as there are lookups, so nothing has to be counted over spans first; no atomics:
the lists are the same each time.

A grouping made ahead of time lists single lookups by spans of the batch instead (`single_kernel`): neighbours then
belong to one bag and read one gradient. That costs two trips through memory, so one made in the step does without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import constant, jit, kernel, tl
from hotrow.kernels.tables import CLASS, FIRST, LAYOUT_COLUMNS

SPAN_SIZE = 64
SPAN = constant(SPAN_SIZE)
SPANS_EACH = 8  # spans that one program lists
FROM_BEFORE = constant(1 << 8)  # bits of a chunk's `info` beside its length: the row began in an earlier span
GOES_ON = constant(1 << 9)  # the row goes on in the next span


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
def _kind(layout, slot, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr):
    """The class of each slot."""
    if CLASSES > 1:
        kind = tl.load(layout + segment_of(layout, slot, SEGMENTS) * LAYOUT_COLUMNS + CLASS).to(tl.int32)
    else:
        kind = tl.zeros_like(slot)
    return kind


@jit
def _list_singles(
    single, lookup, slot, place, kind, span, spans, counts, at, slots, firsts, CLASSES: tl.constexpr
):  # fmt: skip
    """Writes the single lookups of some spans side by side, class after class."""
    start = span * SPAN
    for c in tl.static_range(CLASSES):
        mine = single & (kind == c)
        to = start[:, None] + tl.cumsum(mine.to(tl.int32), 1) - 1
        tl.store(slots + to, slot, mask=mine)
        tl.store(firsts + to, place, mask=mine)
        tl.store(at + to, lookup, mask=mine)
        count = tl.sum(mine.to(tl.int32), 1)
        tl.store(counts + c * spans + span, count, mask=span < spans)
        start += count


@kernel("lookups", "spans")
def chunk_kernel(
    rows, order, places, factors, sorted_places, sorted_factors, counts, begins, infos, slots, firsts, singles,
    single_counts, single_at, single_slots, single_firsts, layout, lookups, spans,
    EACH: tl.constexpr, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr, FACTORS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some spans of sorted lookups: places and factors in sorted order, their chunks, and their single lookups.

    A span is read from its end to its beginning: so the next head behind a lookup is a running maximum.
    """
    span = tl.program_id(0) * EACH + tl.arange(0, EACH)
    column = (-tl.arange(0, SPAN) + (SPAN - 1))[None, :]
    lookup = (span * SPAN)[:, None] + column
    live = lookup < lookups
    source = tl.load(order + lookup, mask=live, other=0)
    slot = tl.load(rows + lookup, mask=live, other=0)
    before = tl.load(rows + lookup - 1, mask=live & (lookup > 0), other=-1)
    after = tl.load(rows + lookup + 1, mask=lookup + 1 < lookups, other=-1)
    place = tl.load(places + source, mask=live, other=0)
    tl.store(sorted_places + lookup, place, mask=live)
    if FACTORS:
        tl.store(sorted_factors + lookup, tl.load(factors + source, mask=live, other=0.0), mask=live)
    new = slot != before
    single = live & new & (slot != after)
    head = live & (new | (column == 0)) & (single == 0)
    last = (after != slot) | (column == SPAN - 1)
    length = -tl.associative_scan(tl.where(last, -(lookup + 1), -2147483647), 1, _later) - lookup
    border = (span + 1) * SPAN
    behind = tl.load(rows + border, mask=border < lookups, other=-1)
    goes_on = (lookup + length == border[:, None]) & (behind[:, None] == slot)
    info = length + tl.where(new, 0, FROM_BEFORE) + tl.where(goes_on, GOES_ON, 0)
    # Four buckets by length, longest first, counted by one sum: eight bits each.
    shift = ((length <= 16).to(tl.int32) + (length <= 4).to(tl.int32) + (length <= 2).to(tl.int32)) * 8
    one = tl.full([EACH, SPAN], 1, tl.int32) << shift
    kind = _kind(layout, slot, SEGMENTS, CLASSES)
    if AHEAD:
        tl.store(singles + source, tl.where(single, slot, -1), mask=live)
    else:
        _list_singles(
            single,
            lookup,
            slot,
            place,
            kind,
            span,
            spans,
            single_counts,
            single_at,
            single_slots,
            single_firsts,
            CLASSES,
        )
    start = span * SPAN
    for c in tl.static_range(CLASSES):
        mine = head & (kind == c)
        counted = tl.cumsum(tl.where(mine, one, 0), 1)
        total = tl.sum(tl.where(mine, one, 0), 1)
        longer = (total << 8) + (total << 16) + (total << 24)  # of each bucket: those before it
        to = start[:, None] + (((counted + longer[:, None]) >> shift) & 255) - 1
        tl.store(begins + to, lookup, mask=mine)
        tl.store(infos + to, info, mask=mine)
        tl.store(slots + to, slot, mask=mine)
        tl.store(firsts + to, place, mask=mine)
        count = tl.sum(mine.to(tl.int32), 1)
        tl.store(counts + c * spans + span, count, mask=span < spans)
        start += count


@kernel("lookups", "spans")
def single_kernel(
    singles, places, counts, slots, firsts, at, layout, lookups, spans, EACH: tl.constexpr, SEGMENTS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Some spans of the batch's lookups: the slots and places of the single ones, side by side."""
    span = tl.program_id(0) * EACH + tl.arange(0, EACH)
    lookup = (span * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    live = lookup < lookups
    slot = tl.load(singles + lookup, mask=live, other=-1)
    place = tl.load(places + lookup, mask=live, other=0)
    kind = _kind(layout, tl.maximum(slot, 0), SEGMENTS, CLASSES)
    _list_singles(slot >= 0, lookup, slot, place, kind, span, spans, counts, at, slots, firsts, CLASSES)


def chunk_twin(rows: Tensor, places: Tensor, layout: Tensor, classes: int) -> tuple[Tensor, ...]:
    """What `chunk_kernel` writes of chunks: counts, begins, infos, slots and first places; `places` are sorted."""
    new = torch.ones(len(rows) + 1, dtype=torch.bool, device=rows.device)
    new[1:-1] = rows[1:] != rows[:-1]
    head = new[:-1].clone()
    head[::SPAN_SIZE] = True
    begin = torch.nonzero(head).squeeze(1)
    end = torch.cat([begin[1:], begin.new_tensor([len(rows)])])
    chunk = ~(new[begin] & new[begin + 1])
    begin, end = begin[chunk], end[chunk]
    length, slot, span = end - begin, rows[begin], begin // SPAN_SIZE
    info = length + (~new[begin]) * (1 << 8) + (~new[end]) * (1 << 9)
    bucket = (length <= 16).long() + (length <= 4).long() + (length <= 2).long()
    kind = layout[_segments(slot, layout), 5]
    by = torch.argsort(((span * classes + kind) * 4 + bucket) * SPAN_SIZE + (SPAN_SIZE - 1 - begin % SPAN_SIZE))
    counts, to = _room(span[by], kind[by], -(-len(rows) // SPAN_SIZE), classes)
    return counts, *(_spread(t[by], to, len(rows)) for t in (begin, info, slot, places[begin]))


def single_twin(singles: Tensor, places: Tensor, layout: Tensor, classes: int, *, falling: bool) -> tuple[Tensor, ...]:
    """The list of single lookups: counts, lookups, slots and places.

    `singles` are as `singles_twin` gives them; `falling` if a span is listed from its end, as `chunk_kernel` does.
    """
    at = torch.nonzero(singles >= 0).squeeze(1)
    kind = layout[_segments(singles[at], layout), 5]
    within = SPAN_SIZE - 1 - at % SPAN_SIZE if falling else at % SPAN_SIZE
    at = at[torch.argsort((at // SPAN_SIZE * classes + kind) * SPAN_SIZE + within)]
    kind = layout[_segments(singles[at], layout), 5]
    counts, to = _room(at // SPAN_SIZE, kind, -(-len(singles) // SPAN_SIZE), classes)
    return counts, *(_spread(t, to, len(singles)) for t in (at, singles[at], places[at]))


def singles_twin(rows: Tensor) -> Tensor:
    """For each sorted lookup its slot if it is its row's only one, else -1."""
    new = torch.ones(len(rows) + 1, dtype=torch.bool, device=rows.device)
    new[1:-1] = rows[1:] != rows[:-1]
    return torch.where(new[:-1] & new[1:], rows, -1)


def _room(span: Tensor, kind: Tensor, spans: int, classes: int) -> tuple[Tensor, Tensor]:
    """How many entries each class has in each span, and where entries in the order of spans go."""
    counts = torch.bincount(kind * spans + span, minlength=classes * spans)
    each = torch.bincount(span, minlength=spans)
    begins = torch.cumsum(each, 0) - each
    to = span * SPAN_SIZE + torch.arange(len(span), device=span.device) - begins[span]
    return counts.to(torch.int32), to


def _spread(entries: Tensor, to: Tensor, room: int) -> Tensor:
    out = torch.zeros(room, dtype=torch.int32, device=entries.device)
    out[to] = entries.to(torch.int32)
    return out


def _segments(slots: Tensor, layout: Tensor) -> Tensor:
    return torch.searchsorted(layout[:, 0].contiguous(), slots.long(), right=True) - 1
