"""What only an accelerator can show; left out where there is none."""

from pathlib import Path

import pytest
import torch
from cases import make

from hotrow.kernels import (
    BatchShape,
    FeatureSpec,
    GroupSpec,
    Rule,
    Tables,
    TableSpec,
    backend,
    group_numbers,
    lookup,
    tune,
    update,
)
from hotrow.kernels.tuning import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_rows_beyond_two_billion_elements_are_found_and_updated() -> None:
    rows, dim = 17_000_000, 128
    assert rows * dim > 2**31
    tables = Tables([TableSpec(rows, dim, Rule("sgd", lr=1.0))], "cuda")
    numbers = torch.tensor([rows - 1, 0, 2**31 // dim + 1, rows - 1, 5], device="cuda")
    offsets = torch.tensor([0, 2, 5], device="cuda")
    tables.rows_of(0)[numbers] = torch.arange(5.0, device="cuda")[:, None].expand(5, dim)
    tables.rows_of(0)[rows - 1] = 7.0
    shape = BatchShape(tables, [GroupSpec([FeatureSpec(0)], 2, 5)])
    slots, grouping = group_numbers(tables, shape, numbers, offsets)
    results = lookup(tables, shape, slots, offsets).view(2, dim)
    assert results[:, 0].tolist() == [8.0, 2.0 + 7.0 + 4.0]
    update(tables, shape, grouping, torch.tensor([1.0, 10.0], device="cuda").repeat_interleave(dim))
    assert tables.rows_of(0)[numbers, 3].tolist() == [7.0 - 11.0, 0.0, 2.0 - 10.0, -4.0, 4.0 - 10.0]
    assert int((tables.values != 0).sum()) == 3 * dim


def test_rows_in_pinned_host_memory_are_looked_up_and_updated_from_the_kernel() -> None:
    specs = [TableSpec(40, 12, Rule("adagrad")), TableSpec(30, 8)]
    case = make("cuda", specs, [([(0, "sum"), (1, "mean")], 16, None)])
    host = Tables(specs, "cuda", memory="pinned")
    host.values.copy_(case.tables.values)
    host.state.copy_(case.tables.state)
    grads = torch.randn(case.shape.size, device="cuda")
    shape = BatchShape(host, case.shape.groups)
    results = lookup(host, shape, case.slots, case.offsets)
    assert torch.equal(results, lookup(case.tables, case.shape, case.slots, case.offsets))
    update(host, shape, case.grouping, grads)
    update(case.tables, case.shape, case.grouping, grads)
    torch.cuda.synchronize()
    assert host.values.is_pinned() and torch.equal(host.values, case.tables.values.cpu())
    assert torch.equal(host.state, case.tables.state.cpu())


@pytest.mark.parametrize("expanded", [None, 70])
@pytest.mark.parametrize("as_graph", [False, True])
def test_kernels_that_start_early_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, as_graph: bool, expanded: int | None
) -> None:
    """Small steps close behind each other, whose long rows share sectors of memory with others."""
    specs = [TableSpec(3, 4), TableSpec(40, 10, Rule("adam"))]

    def trained(steps: int = 60) -> tuple[torch.Tensor, ...]:
        case = make("cuda", specs, [([(0, "sum"), (1, "sum")], 64, expanded)], longest=16)
        grads = torch.randn(case.shape.size, generator=torch.Generator().manual_seed(1)).to("cuda")
        grouping, out = case.grouping, []

        def run() -> None:
            for _ in range(steps):
                out.append(lookup(case.tables, case.shape, case.slots, case.offsets, members=case.members))
                update(case.tables, case.shape, grouping, grads, members=case.members)

        (captured(run) if as_graph else run)()
        torch.cuda.synchronize()
        return case.tables.values, case.tables.state, out[-1]

    early = trained()
    monkeypatch.setattr(backend, "_starts_early", lambda device: False)
    assert all(torch.equal(a, b) for a, b in zip(early, trained(), strict=True))


@pytest.mark.parametrize("expanded", [None, 30])
def test_tuning_leaves_rows_and_state_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expanded: int | None
) -> None:
    monkeypatch.setenv("HOTROW_CACHE", str(tmp_path))
    case = make("cuda", [TableSpec(40, 12, Rule("adam"))], [([(0, "sum")], 16, expanded)])
    before = case.tables.values.clone(), case.tables.state.clone()
    found = tune(case.tables, case.shape, case.slots, case.offsets, case.grouping, members=case.members)
    assert set(found) == {"lookup", "update"} and (tmp_path / "kernels.json").exists()
    assert torch.equal(case.tables.values, before[0]) and torch.equal(case.tables.state, before[1])
