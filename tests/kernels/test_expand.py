"""Expanding jagged rows to the batch, its gradient, and contracting gradients to unique samples."""

import pytest
import torch
from torch import Tensor

from hotrow.kernels import BatchShape, FeatureSpec, GroupSpec, Members, Tables, TableSpec, ops
from hotrow.kernels.expand import select_backward_twin, select_twin


def jagged(device: str, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    lengths = torch.tensor([3, 0, 5, 1])
    inverse = torch.tensor([2, 0, 2, 1, 3, 2, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths, 0)])
    out_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths[inverse], 0)])
    values = torch.randn(9, dim).to(dtype)
    members = Members.of(inverse, 4)
    return tuple(t.to(device) for t in (values, offsets, out_offsets, inverse, *members))


@pytest.mark.parametrize("dim", [4, 20, 300])
def test_each_sample_gets_the_rows_of_its_unique_one_and_gradients_are_summed(device: str, dim: int) -> None:
    values, offsets, out_offsets, inverse, members, starts = jagged(device, dim)
    values.requires_grad_()
    total = int(out_offsets[-1])
    out = ops.jagged_select(values, offsets, out_offsets, inverse, members, starts, total)
    plain = values.detach().clone().requires_grad_()
    expected = torch.cat([plain[offsets[u] : offsets[u + 1]] for u in inverse.tolist()])
    assert torch.equal(out, expected)
    grad = torch.randn(total, dim).to(device)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(values.grad, plain.grad)
    host = [t.detach().cpu() for t in (values, offsets, out_offsets, inverse, members, starts)]
    assert torch.equal(select_twin(*host[:4], total), out.detach().cpu())
    twin = select_backward_twin(grad.cpu(), *host[1:3], *host[4:], 9)
    torch.testing.assert_close(twin, values.grad.cpu())


def test_low_rows_are_selected_and_their_gradients_added_in_float32(device: str) -> None:
    _, offsets, out_offsets, _, members, starts = jagged(device, 8, torch.bfloat16)
    total = int(out_offsets[-1])
    grad = torch.randn(total, 8).to(torch.bfloat16).to(device)
    out = ops.jagged_select_backward(grad, offsets, out_offsets, members, starts, 9)
    host = [t.cpu() for t in (grad, offsets, out_offsets, members, starts)]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.cpu(), select_backward_twin(*host, 9), rtol=1e-2, atol=1e-2)


def test_members_are_each_unique_samples_samples_in_order() -> None:
    members = Members.of(torch.tensor([1, 0, 1, 3, 1]), 4)
    assert members.samples.tolist() == [1, 0, 2, 4, 3]
    assert members.starts.tolist() == [0, 1, 4, 4, 5]


@pytest.mark.parametrize("repeats", [1, 6])
@pytest.mark.parametrize("dim", [12, 256])
@pytest.mark.parametrize("samples", [1, 5])
def test_gradients_are_contracted_however_often_samples_repeat(
    device: str, repeats: int, dim: int, samples: int
) -> None:
    generator = torch.Generator().manual_seed(repeats)
    tables = Tables([TableSpec(3, dim)], device)
    inverse = torch.randint(0, samples, (repeats * samples,), generator=generator)
    group = GroupSpec([FeatureSpec(0, "sum")], samples, 0, len(inverse))
    shape = BatchShape(tables, [group])
    assert shape.contract_tile == (1 if repeats == 6 else 2)
    grads = torch.randn(len(inverse), dim, generator=generator)
    members = [part.to(device) for part in Members.of(inverse, samples)]
    out = ops.contract(
        grads.to(device).flatten(), *members, shape.segments, shape.contract_tile, shape.contract_programs,
        shape.unique_size, shape.contract_vector, shape.contract_whole,
    )  # fmt: skip
    expected = torch.zeros(samples, dim).index_add_(0, inverse, grads)
    torch.testing.assert_close(out.cpu().view(samples, dim), expected)
