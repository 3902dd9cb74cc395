# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The work list of the backward pass: what each touched row's gradient is summed from, in pieces of about equal size.

Lookups sorted by row are cut into spans of 64. A row whose lookups lie in one span or two is one *chunk*; a longer one
is a chunk in each span it reaches, which run side by side and are joined afterwards. So most rows are one entry of the
list, and what an entry is can be seen from the lookups around a border. Entries stand by class of table, then by
kind, long chunks before short ones and rows of a *single* lookup, and in the order of rows: so programs at work
on different kinds are at the same table, whose gradients are in the cache. Behind them the list names the rows that
have to be joined.

The list has no gaps, so a program finds its entries by their number alone: spans are counted, a running sum says where
each begins, and then they are written. No atomics: the list is the same each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import constant, jit, kernel, tl
from hotrow.kernels.tables import CLASS, FIRST, LAYOUT_COLUMNS

SPAN_SIZE = 64
SPAN = constant(SPAN_SIZE)
SPANS_EACH = 8  # spans that one program lists
FROM_BEFORE = constant(1 << 8)  # bits of a chunk's `info` beside its length: a part of a row that began before
GOES_ON = constant(1 << 9)  # a part of a row that goes on behind

# Kinds of entries of a class: long chunks and parts, chunks of two to four lookups, single lookups.
KIND_COUNT = 3
LIST_KINDS = constant(KIND_COUNT)
LONG, SHORT, SINGLE = (constant(i) for i in range(KIND_COUNT))


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
def list_end_at(ends, kind, spans):
    """The address of where entries of a kind end, counted over all classes."""
    return ends + (kind + 1) * spans - 1


@jit
def list_end(ends, kind, spans):
    """Where entries of a kind end; those of kind -1 end where the list begins."""
    return tl.load(list_end_at(ends, kind, spans), mask=kind >= 0, other=0, eviction_policy="evict_last")


@jit
def _begin(ends, kind, span, spans):
    """Where the entries of a kind that some spans have begin."""
    at = kind * spans + span
    return tl.load(ends + at - 1, mask=(at > 0) & (span < spans), other=0)


@jit
def _class(layout, slot, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr):
    """The class of each slot."""
    if CLASSES > 1:
        found = tl.load(layout + segment_of(layout, slot, SEGMENTS) * LAYOUT_COLUMNS + CLASS).to(tl.int32)
    else:
        found = tl.zeros_like(slot)
    return found


@jit
def _border(rows, span, lookups):
    """The slots around the end of some spans: the last, the first behind it, and the first of the span after that."""
    border = (span + 1) * SPAN
    last = tl.load(rows + border - 1, mask=border <= lookups, other=-2)
    behind = tl.load(rows + border, mask=border < lookups, other=-1)
    further = tl.load(rows + border + SPAN, mask=border + SPAN < lookups, other=-1)
    return last, behind, further


@kernel("lookups", "spans")
def chunk_kernel(
    rows, order, places, factors, sorted_places, sorted_factors, counts, ends, begins, infos, slots, firsts, layout,
    lookups, spans,
    EACH: tl.constexpr, SEGMENTS: tl.constexpr, CLASSES: tl.constexpr, FACTORS: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Some spans of sorted lookups: first their entries are counted, then written, with places and factors sorted.

    A span is read from its end to its beginning: so the next head behind a lookup is a running maximum.
    """
    span = tl.program_id(0) * EACH + tl.arange(0, EACH)
    column = (-tl.arange(0, SPAN) + (SPAN - 1))[None, :]
    lookup = (span * SPAN)[:, None] + column
    live = lookup < lookups
    slot = tl.load(rows + lookup, mask=live, other=0)
    before = tl.load(rows + lookup - 1, mask=live & (lookup > 0), other=-1)
    after = tl.load(rows + lookup + 1, mask=lookup + 1 < lookups, other=-1)
    new = slot != before
    single = live & new & (slot != after)
    last, behind, further = _border(rows, span, lookups)
    # A row that began in the span before and ends in this one is that span's.
    start = span * SPAN
    earlier = tl.load(rows + start - SPAN - 1, mask=(start > SPAN) & (start < lookups), other=-1)
    first = tl.load(rows + start, mask=start < lookups, other=0)
    taken = (earlier != first) & (behind != first)
    head = live & (new | ((column == 0) & (taken[:, None] == 0))) & (single == 0)
    ending = (after != slot) | (column == SPAN - 1)
    length = -tl.associative_scan(tl.where(ending, -(lookup + 1), -2147483647), 1, _later) - lookup
    reaches = (lookup + length == (start + SPAN)[:, None]) & (behind[:, None] == slot)
    next_span = (start + SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    next_slot = tl.load(rows + next_span, mask=next_span < lookups, other=-1)
    over = tl.sum((next_slot == last[:, None]).to(tl.int32), 1)
    long = reaches & ((further[:, None] == slot) | (new == 0))
    length += tl.where(reaches & (long == 0), over[:, None], 0)
    info = length + tl.where(new, 0, FROM_BEFORE) + tl.where(long, GOES_ON, 0)
    which = _class(layout, slot, SEGMENTS, CLASSES)
    if WRITE:
        source = tl.load(order + lookup, mask=live, other=0)
        place = tl.load(places + source, mask=live, other=0)
        tl.store(sorted_places + lookup, place, mask=live)
        if FACTORS:
            tl.store(sorted_factors + lookup, tl.load(factors + source, mask=live, other=0.0), mask=live)
    # Four buckets by length, counted by one sum: eight bits each. The first two are long, with parts in the first.
    shorter = (length <= 16).to(tl.int32) + (length <= 4).to(tl.int32) + (length <= 2).to(tl.int32)
    shift = tl.where(info < FROM_BEFORE, shorter, 0) * 8
    one = tl.full([EACH, SPAN], 1, tl.int32) << shift
    for c in tl.static_range(CLASSES):
        only = (single & (which == c)).to(tl.int32)
        mine = head & (which == c)
        total = tl.sum(tl.where(mine, one, 0), 1)
        if WRITE:
            longer = ((total & 0x00FF00FF) << 8)[:, None]  # of the second bucket of a kind: those in the first
            within = (((tl.cumsum(tl.where(mine, one, 0), 1) + longer) >> shift) & 255) - 1
            long_begin = _begin(ends, c * LIST_KINDS + LONG, span, spans)
            short_begin = _begin(ends, c * LIST_KINDS + SHORT, span, spans)
            to = tl.where(shift < 16, long_begin[:, None], short_begin[:, None]) + within
            tl.store(begins + to, lookup, mask=mine)
            tl.store(infos + to, info, mask=mine)
            tl.store(slots + to, slot, mask=mine)
            tl.store(firsts + to, place, mask=mine)
            to = _begin(ends, c * LIST_KINDS + SINGLE, span, spans)[:, None] + tl.cumsum(only, 1) - 1
            tl.store(begins + to, lookup, mask=only > 0)
            tl.store(slots + to, slot, mask=only > 0)
            tl.store(firsts + to, place, mask=only > 0)
        else:
            to = counts + c * LIST_KINDS * spans + span
            each = (total & 0x00FF00FF) + ((total >> 8) & 0x00FF00FF)
            tl.store(to + LONG * spans, each & 255, mask=span < spans)
            tl.store(to + SHORT * spans, each >> 16, mask=span < spans)
            tl.store(to + SINGLE * spans, tl.sum(only, 1), mask=span < spans)
    joined = live & new & long
    if WRITE:
        to = _begin(ends, CLASSES * LIST_KINDS, span, spans)[:, None] + tl.zeros_like(lookup)
        tl.store(begins + to, lookup, mask=joined)
        tl.store(slots + to, slot, mask=joined)
    else:
        to = counts + CLASSES * LIST_KINDS * spans + span
        tl.store(to, tl.sum(joined.to(tl.int32), 1), mask=span < spans)


def list_twin(rows: Tensor, places: Tensor, layout: Tensor, classes: int) -> tuple[Tensor, ...]:
    """What the kernel lists: ends of each kind by spans; and of each entry its begin, info, slot and first place.

    `rows` and `places` are sorted by row.
    """
    n, device = len(rows), rows.device
    spans = -(-n // SPAN_SIZE)
    new = torch.ones(n + 1, dtype=torch.bool, device=device)
    new[1:-1] = rows[1:] != rows[:-1]
    run = torch.nonzero(new).squeeze(1)  # where each row begins, and the end
    touched = (run[1:] - 1) // SPAN_SIZE - run[:-1] // SPAN_SIZE
    long = torch.repeat_interleave(touched > 1, run[1:] - run[:-1])
    begin = torch.nonzero(new[:-1] | (long & (torch.arange(n, device=device) % SPAN_SIZE == 0))).squeeze(1)
    length = torch.diff(begin, append=begin.new_tensor([n]))
    part = long[begin]
    info = length + (~new[begin]) * (1 << 8) + (part & ~new[begin + length]) * (1 << 9)
    bucket = (length <= 16).long() + (length <= 4).long() + (length <= 2).long() + (length <= 1).long()
    bucket[part] = 0  # of five: two are of long chunks, two of short ones, the last of single lookups
    which = layout[torch.searchsorted(layout[:, 0].contiguous(), rows[begin].long(), right=True) - 1, 5]
    joined = torch.nonzero(part & new[begin]).squeeze(1)
    kind = torch.cat([which * KIND_COUNT + bucket // 2, torch.full_like(joined, classes * KIND_COUNT)])
    entry = torch.cat([torch.arange(len(begin), device=device), joined])
    group = kind * spans + begin[entry] // SPAN_SIZE
    by = torch.argsort((group * 5 + bucket[entry]) * SPAN_SIZE + SPAN_SIZE - 1 - begin[entry] % SPAN_SIZE)
    counts = torch.bincount(group, minlength=(classes * KIND_COUNT + 1) * spans)
    listed = [t[entry[by]] for t in (begin, info, rows[begin], places[begin])]
    return torch.cumsum(counts, 0).to(torch.int32), *(_padded(t, n + spans) for t in listed)


def _padded(entries: Tensor, room: int) -> Tensor:
    out = torch.zeros(room, dtype=torch.int32, device=entries.device)
    out[: len(entries)] = entries.to(torch.int32)
    return out
