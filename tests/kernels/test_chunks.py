"""The work lists name every sorted lookup once, and are those of the twins."""

import pytest
import torch
from cases import make

from hotrow.kernels import Rule, TableSpec, group
from hotrow.kernels.chunks import SPAN_SIZE, chunk_twin, single_twin, singles_twin


def listed(counts: torch.Tensor, classes: int) -> torch.Tensor:
    """Which entries of a list are taken."""
    each = counts.view(classes, -1).sum(0)
    return (torch.arange(SPAN_SIZE)[None, :] < each[:, None]).reshape(-1)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_lists_are_the_twins_and_name_every_lookup_once(device: str, ahead: bool) -> None:
    specs = [TableSpec(300, 8), TableSpec(40, 20, Rule("sgd")), TableSpec(90, 8, staged=20)]
    case = make(device, specs, [([(0, "sum"), (1, "sum"), (2, "sum")], 200, None)], longest=5, hot=0.4)
    g, layout = group(case.tables, case.shape, case.slots, case.offsets, ahead=ahead), case.tables.layout.cpu()
    rows, places = g.rows.cpu(), g.places.cpu()
    counts, *expected = chunk_twin(rows, places, layout, 2)
    assert torch.equal(g.counts.cpu(), counts)
    taken = listed(counts, 2)[: len(rows)]
    found = [t.cpu()[taken] for t in (g.begins, g.infos, g.slots, g.firsts)]
    for ours, twins in zip(found, expected, strict=True):
        assert torch.equal(ours, twins[taken])

    order = torch.sort(case.slots.cpu(), stable=True)[1]
    batch_places, batch_singles = torch.empty_like(places), torch.empty_like(places)
    batch_places[order], batch_singles[order] = places, singles_twin(rows)
    if ahead:
        counts, *expected = single_twin(batch_singles, batch_places, layout, 2, falling=False)
    else:
        counts, *expected = single_twin(singles_twin(rows), places, layout, 2, falling=True)
    assert torch.equal(g.single_counts.cpu(), counts)
    taken = listed(counts, 2)[: len(rows)]
    singles = [t.cpu()[taken] for t in (g.single_at, g.single_slots, g.single_firsts)]
    for ours, twins in zip(singles, expected, strict=True):
        assert torch.equal(ours, twins[taken])

    covered = torch.zeros(len(rows), dtype=torch.int64)
    for begin, info, slot, _ in zip(*(t.tolist() for t in found), strict=True):
        length = info & 255
        covered[begin : begin + length] += 1
        assert begin // SPAN_SIZE == (begin + length - 1) // SPAN_SIZE
        assert (rows[begin : begin + length] == slot).all()
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    covered[position[singles[0].long()] if ahead else singles[0].long()] += 1
    assert (covered == 1).all()
    assert 50 < len(singles[0]) < len(rows) - 50


def test_sorted_lookups_keep_the_batches_order_within_a_row(device: str) -> None:
    case = make(device, [TableSpec(10, 4)], [([(0, "sequence")], 50, None)], longest=9)
    g = case.grouping
    same = g.rows[1:] == g.rows[:-1]
    assert (g.places[1:][same] > g.places[:-1][same]).all()  # a sequence's places are its lookups in order
