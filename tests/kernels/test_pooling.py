"""Every form of lookup gives what its twin gives."""

from dataclasses import replace

import pytest
import torch
from cases import Case, make

from hotrow.errors import BatchError
from hotrow.kernels import Rule, TableSpec, lookup
from hotrow.kernels.tuning import Config

ALL = [[(0, "sum"), (1, "mean"), (2, "sequence"), (0, "mean")], [(1, "sequence"), (3, "sum")]]


def looked_up(case: Case, dtype: torch.dtype = torch.float32, config: Config | None = None) -> torch.Tensor:
    return lookup(
        case.tables,
        case.shape,
        case.slots,
        case.offsets,
        case.weights,
        members=case.members,
        staged=case.staged,
        dtype=dtype,
        config=config,
    ).cpu()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("expanded", [None, 9])
def test_all_features_of_a_batch_are_looked_up_in_one_launch(device: str, weighted: bool, expanded: int | None) -> None:
    specs = [TableSpec(17, 20), TableSpec(5, 4), TableSpec(9, 8, staged=4), TableSpec(3, 100, Rule("adam"))]
    case = make(device, specs, [(ALL[0], 6, expanded), (ALL[1], 4, None)], weighted=weighted)
    expected = case.expected_results()
    torch.testing.assert_close(looked_up(case), expected, rtol=1e-5, atol=1e-5)
    for matrix, (_, rows, width) in zip(case.shape.views(expected), case.shape.matrices, strict=True):
        assert matrix.shape == (rows, width)


@pytest.mark.parametrize("dim", [1, 4, 10, 64, 128, 1024])
def test_any_dim_is_pooled(device: str, dim: int) -> None:
    case = make(device, [TableSpec(7, dim)], [([(0, "mean")], 5, None)])
    torch.testing.assert_close(looked_up(case), case.expected_results(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_rows_are_added_up_in_float32(device: str, dtype: torch.dtype) -> None:
    case = make(device, [TableSpec(7, 20)], [([(0, "sum")], 5, None)], dtype=dtype, longest=9)
    torch.testing.assert_close(looked_up(case), case.expected_results(), rtol=1e-5, atol=1e-5)
    low = looked_up(case, dtype)
    assert low.dtype == dtype
    torch.testing.assert_close(low, case.expected_results(dtype), rtol=1e-2, atol=1e-2)


def test_weights_of_a_sequence_are_of_no_account(device: str) -> None:
    """In the gradients they never were: rows of a sequence come as they are."""
    case = make(device, [TableSpec(17, 20)], [([(0, "sequence"), (0, "sum")], 6, None)], weighted=True)
    assert case.weights is not None
    heavy = replace(case, weights=case.weights * torch.where(case.weights == 1.0, 7.0, 1.0))
    torch.testing.assert_close(looked_up(heavy), case.expected_results(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(heavy.expected_results(), case.expected_results())


def test_empty_bags_are_zeros_and_empty_batches_are_empty(device: str) -> None:
    case = make(device, [TableSpec(7, 8)], [([(0, "sum"), (0, "sequence")], 5, None)], longest=0)
    assert torch.equal(looked_up(case), torch.zeros(5 * 8))


def test_no_tile_changes_a_bit(device: str) -> None:
    case = make(device, [TableSpec(30, 16), TableSpec(30, 24)], [([(0, "sum"), (1, "mean")], 12, None)], longest=20)
    configs = [
        Config(128, 1),
        Config(256, 4, 2, across=True),
        Config(1024, 8, 4),
        Config(128, 3, share=3, registers=80),
    ]
    first, *others = [looked_up(case, config=config) for config in configs]
    assert all(torch.equal(first, other) for other in others)


def test_a_batch_that_does_not_fit_its_shape_is_refused(device: str) -> None:
    case = make(device, [TableSpec(7, 8)], [([(0, "sum")], 5, 8)])
    with pytest.raises(BatchError, match="lookups, but"):
        lookup(case.tables, case.shape, case.slots[1:], case.offsets, members=case.members)
    with pytest.raises(BatchError, match="needs 6 offsets"):
        lookup(case.tables, case.shape, case.slots, case.offsets[1:], members=case.members)
    with pytest.raises(BatchError, match="give members"):
        lookup(case.tables, case.shape, case.slots, case.offsets)
