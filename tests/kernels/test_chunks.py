"""The work list names every sorted lookup once, and is the twin's."""

import pytest
import torch
from cases import make

from hotrow.kernels import Rule, TableSpec, group
from hotrow.kernels.chunks import KIND_COUNT, SPAN_SIZE, list_twin


@pytest.mark.parametrize("hot", [0.0, 0.4, 0.9])
def test_the_list_is_the_twins_and_names_every_lookup_once(device: str, hot: float) -> None:
    specs = [TableSpec(300, 8), TableSpec(40, 20, Rule("sgd")), TableSpec(90, 8, staged=20)]
    case = make(device, specs, [([(0, "sum"), (1, "sum"), (2, "sum")], 200, None)], longest=5, hot=hot)
    g = group(case.tables, case.shape, case.slots, case.offsets)
    rows = g.rows.cpu()
    ends, *expected = list_twin(rows, g.places.cpu(), case.tables.layout.cpu(), 2)
    assert torch.equal(g.ends.cpu(), ends)
    spans = -(-len(rows) // SPAN_SIZE)
    bounds = [0, *ends[spans - 1 :: spans].tolist()]
    found = [t.cpu() for t in (g.begins, g.infos, g.slots, g.firsts)]
    covered, touched = torch.zeros(len(rows), dtype=torch.int64), []
    for kind in range(2 * KIND_COUNT):
        entries = slice(bounds[kind], bounds[kind + 1])
        single = kind % KIND_COUNT == KIND_COUNT - 1
        for i, (ours, twins) in enumerate(zip(found, expected, strict=True)):
            if not (single and i == 1):  # single lookups have no info
                assert torch.equal(ours[entries], twins[entries])
        for begin, info, slot in zip(*(t[entries].tolist() for t in found[:3]), strict=True):
            length, begins = (1, True) if single else (info & 255, info & 256 == 0)
            covered[begin : begin + length] += 1
            assert (rows[begin : begin + length] == slot).all()
            touched += [slot] if begins else []
    assert (covered == 1).all()
    assert sorted(touched) == rows.unique().tolist()
    joined = slice(bounds[-2], bounds[-1])
    assert torch.equal(found[2][joined], expected[2][joined]) and torch.equal(found[0][joined], expected[0][joined])
    counts = torch.bincount(rows.long())
    assert (counts[found[2][joined].long()] > SPAN_SIZE).all()
    assert set(found[2][joined].tolist()) >= set(torch.nonzero(counts > 2 * SPAN_SIZE).flatten().tolist())
    assert (bounds[-1] > bounds[-2]) == (hot > 0)


@pytest.mark.parametrize("count", [1, 2, 64, 65, 127, 128, 129, 192, 193, 500])
@pytest.mark.parametrize("before", [0, 1, 63])
def test_a_row_is_one_entry_unless_it_reaches_over_a_whole_span(device: str, before: int, count: int) -> None:
    """A row of `count` lookups behind `before` others: on a border of spans, over it, over many."""
    layout = torch.tensor([[0, 10, 4, 0, 0, 0, 0, 0]])
    rows = torch.cat([torch.zeros(before), torch.ones(count), torch.full((5,), 2)]).to(torch.int32)
    _, begins, infos, slots, _ = list_twin(rows, rows, layout, 1)
    mine = [(b, i) for b, i, s in zip(begins.tolist(), infos.tolist(), slots.tolist(), strict=True) if s == 1]
    if (before + count - 1) // SPAN_SIZE - before // SPAN_SIZE < 2:
        assert mine == [(before, count)]
    else:  # and once as a row to be joined
        assert sum(i & 255 for _, i in mine[:-1]) == count and mine[-1][0] == before


def test_sorted_lookups_keep_the_batches_order_within_a_row(device: str) -> None:
    case = make(device, [TableSpec(10, 4)], [([(0, "sequence")], 50, None)], longest=9)
    g = case.grouping
    same = g.rows[1:] == g.rows[:-1]
    assert (g.places[1:][same] > g.places[:-1][same]).all()  # a sequence's places are its lookups in order
