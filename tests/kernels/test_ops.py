"""The operations as torch sees them: schemas, fakes, compilation."""

from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, make
from torch._subclasses import FakeTensorMode

from hotrow.kernels import TableSpec, lookup, ops, steps, update
from hotrow.kernels.host import gather_rows, scatter_rows
from hotrow.kernels.steps import group

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ["places", "chunks", "lookup", "contract", "update"])
def test_the_operations_of_a_step_are_as_they_say(device: str, name: str) -> None:
    """`opcheck` on the very arguments that a step gives."""
    case = make(
        device, [TableSpec(9, 4, staged=2), TableSpec(5, 8)], [([(0, "mean"), (1, "sum")], 4, 6)], weighted=True
    )
    given: list[Any] = []
    operation = getattr(ops, name)

    def run(made: Any, *arguments: Any) -> Any:
        if made is operation:
            given.append(arguments)
        return made(*arguments)

    with mock.patch.object(steps.ops, "run", run):
        case.step()
    checks = CHECKS[:3] if name == "chunks" else CHECKS  # what is behind the last chunk differs from call to call
    torch.library.opcheck(operation, given[0], test_utils=checks)


def test_batches_are_traced_on_fake_tensors_beside_real_tables(device: str) -> None:
    case = make(device, [TableSpec(9, 4)], [([(0, "sum")], 4, None)])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        slots, offsets = fake.from_tensor(case.slots), fake.from_tensor(case.offsets)
        assert lookup(case.tables, case.shape, slots, offsets).shape == (case.shape.size,)
        grouping = group(case.tables, case.shape, slots, offsets)
        assert grouping.places.shape == case.slots.shape
        update(case.tables, case.shape, grouping, torch.empty(case.shape.size, device=device))


def test_the_other_operations_are_as_they_say(device: str) -> None:
    keys = torch.randint(0, 9, (40,), device=device)
    torch.library.opcheck(ops.unique, (keys, None, None), test_utils=CHECKS[:3])
    rows, numbers = torch.randn(9, 4, device=device), torch.tensor([3, 1], device=device)
    torch.library.opcheck(gather_rows, (rows, numbers), test_utils=CHECKS)
    torch.library.opcheck(scatter_rows, (rows, numbers, torch.randn(2, 4, device=device)), test_utils=CHECKS)


def test_jagged_select_is_as_it_says_and_so_is_its_gradient(device: str) -> None:
    values = torch.randn(5, 4, device=device, requires_grad=True)
    offsets, out_offsets = torch.tensor([0, 2, 5], device=device), torch.tensor([0, 3, 5, 8], device=device)
    inverse = torch.tensor([1, 0, 1], device=device)
    members, starts = steps.Members.of(inverse, 2)
    torch.library.opcheck(ops.jagged_select, (values, offsets, out_offsets, inverse, members, starts, 8))


def test_a_step_compiles_into_one_graph(device: str) -> None:
    case = make(device, [TableSpec(9, 4), TableSpec(5, 8)], [([(0, "mean"), (1, "sum")], 4, None)])
    grouping, grads = case.grouping, torch.randn(case.shape.size, device=device)
    expected = lookup(case.tables, case.shape, case.slots, case.offsets)
    values, _, _ = case.expected_update(grads)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(slots: torch.Tensor, offsets: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        results = lookup(case.tables, case.shape, slots, offsets)
        update(case.tables, case.shape, grouping, grads)
        return results * 2

    lookup(case.tables, case.shape, case.slots, case.offsets)
    assert torch.equal(step(case.slots, case.offsets, grads), expected * 2)
    torch.testing.assert_close(case.tables.values.cpu(), values, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_a_captured_step_is_the_same_step(device: str) -> None:
    a, b = (make(device, [TableSpec(9, 4), TableSpec(5, 8)], [([(0, "mean"), (1, "sum")], 4, None)]) for _ in range(2))
    grads = torch.randn(a.shape.size, device=device)

    def step(case: Case) -> torch.Tensor:
        results = lookup(case.tables, case.shape, case.slots, case.offsets)
        update(case.tables, case.shape, case.grouping, grads)
        return results

    expected = [step(a).clone() for _ in range(3)]
    before = [t.clone() for t in (b.tables.values, b.tables.state)]
    step(b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(b)
    b.tables.values.copy_(before[0])
    b.tables.state.copy_(before[1])
    for wanted in expected:
        graph.replay()
        assert torch.equal(results, wanted)
    assert torch.equal(a.tables.values, b.tables.values)
