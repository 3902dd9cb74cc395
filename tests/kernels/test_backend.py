"""Without Triton everything still works, as twins, and says so once."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from hotrow.kernels import backend

WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from hotrow.kernels import BatchShape, FeatureSpec, GroupSpec, Tables, TableSpec, group_numbers, lookup, update
tables = Tables([TableSpec(4, 8)])
shape = BatchShape(tables, [GroupSpec([FeatureSpec(0, "sum")], 2, 3)])
numbers, offsets = torch.tensor([0, 3, 3]), torch.tensor([0, 2, 3])
slots, grouping = group_numbers(tables, shape, numbers, offsets)
update(tables, shape, grouping, torch.ones(16))
out = lookup(tables, shape, slots, offsets)
assert (out.view(2, 8)[0] < 0).all() and tables.rows_of(0)[1].eq(0).all(), out
"""


def test_the_package_works_where_triton_is_absent() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_falling_back_on_an_accelerator_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "triton", None)
    monkeypatch.setattr(backend, "_told", False)
    on_device = SimpleNamespace(is_cuda=True)
    with pytest.warns(UserWarning, match="pip install triton"):
        assert not backend.runs_kernels(on_device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.runs_kernels(on_device)
        assert not backend.runs_kernels(SimpleNamespace(is_cuda=False))


def test_these_tests_run_kernels_and_not_their_twins(device: str) -> None:
    if backend.triton is None:
        pytest.skip("Triton is not installed")
    assert backend.runs_kernels(torch.zeros(1, device=device))
