"""Chunks cover every sorted lookup once, and are those of the twin."""

import torch
from cases import make

from hotrow.kernels import Rule, TableSpec
from hotrow.kernels.chunks import CHUNK_SIZE, chunk_twin, count_twin
from hotrow.kernels.steps import TILE


def test_the_chunks_are_the_twins_and_cover_every_lookup_once(device: str) -> None:
    specs = [TableSpec(300, 8), TableSpec(40, 20, Rule("sgd")), TableSpec(90, 8, staged=20)]
    case = make(device, specs, [([(0, "sum"), (1, "sum"), (2, "sum")], 200, None)], longest=9, hot=0.4)
    g, layout = case.grouping, case.tables.layout.cpu()
    rows = g.rows.cpu()
    assert torch.equal(g.ends.cpu(), torch.cumsum(count_twin(rows, layout, TILE, 2), 0).to(torch.int32))
    count = int(g.ends[-1])
    found = [t.cpu()[:count] for t in (g.begins, g.infos, g.slots, g.segments, g.firsts)]
    for ours, expected in zip(found, chunk_twin(rows, g.places.cpu(), layout, TILE), strict=True):
        assert torch.equal(ours, expected)
    begins, infos, slots, _, _ = found
    lengths = infos & 255
    covered = torch.zeros(len(rows), dtype=torch.int64)
    for begin, length, slot in zip(begins.tolist(), lengths.tolist(), slots.tolist(), strict=True):
        covered[begin : begin + length] += 1
        assert begin // CHUNK_SIZE == (begin + length - 1) // CHUNK_SIZE
        assert (rows[begin : begin + length] == slot).all()
    assert (covered == 1).all()


def test_sorted_lookups_keep_the_batches_order_within_a_row(device: str) -> None:
    case = make(device, [TableSpec(10, 4)], [([(0, "sequence")], 50, None)], longest=9)
    g = case.grouping
    same = g.rows[1:] == g.rows[:-1]
    assert (g.places[1:][same] > g.places[:-1][same]).all()  # a sequence's places are its lookups in order
