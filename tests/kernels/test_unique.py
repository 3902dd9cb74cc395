"""Unique keys on the device: any int64, of one table or several."""

import pytest
import torch

from hotrow.kernels import ops
from hotrow.kernels.unique import unique_twin


@pytest.mark.parametrize("bound", [None, 50])
@pytest.mark.parametrize("tables", [False, True])
def test_unique_gives_keys_inverse_order_and_starts(device: str, bound: int | None, tables: bool) -> None:
    keys = torch.randint(0, 50, (3000,), device=device)
    if bound is None:
        keys = (keys - 25) * (2**57 + 12345)
    of = torch.randint(0, 3, (3000,), device=device, dtype=torch.int32) if tables else None
    found, table, inverse, order, starts, count = (t.cpu() for t in ops.unique(keys, of, bound))
    expected = unique_twin(keys.cpu(), None if of is None else of.cpu())
    n = int(count)
    assert n == int(expected[5]) == len(set(zip(keys.tolist(), [0] * 3000 if of is None else of.tolist(), strict=True)))
    assert torch.equal(found[:n], expected[0][:n])
    if tables:
        assert torch.equal(table[:n], expected[1][:n])
    assert torch.equal(inverse, expected[2])
    assert torch.equal(order, expected[3])
    assert torch.equal(starts[: n + 1], expected[4][: n + 1])
    assert torch.equal(found[inverse.long()], keys.cpu())


def test_no_keys_are_no_unique_ones(device: str) -> None:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert int(ops.unique(empty, None, None)[5]) == 0
