"""Without Triton everything still works, as twins, and says so once."""

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

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


class OnDevice:
    """Stands in for a tensor on an accelerator."""

    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, dtype: torch.dtype = torch.float32, address: int = 512, is_cuda: bool = True) -> None:
        self.dtype, self.is_cuda, self._address = dtype, is_cuda, address

    def data_ptr(self) -> int:
        return self._address


class Launches:
    """Stands in for Triton: what was compiled, with which options, and what was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[tuple[Any, ...]] = []
        monkeypatch.setattr(backend, "Tensor", OnDevice)
        monkeypatch.setattr(backend, "interpreted", lambda: False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)

    def of(self, function: Any, *sizes: str) -> backend.Kernel:
        kernel = backend.Kernel(function, sizes)
        kernel.jit = self
        return kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.compiled.append(options)
        run = lambda *all: self.launched.append(all)  # noqa: E731
        return SimpleNamespace(run=run, function=None, packed_metadata=None)


def test_a_kernel_is_compiled_once_for_each_kind_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.triton is None:
        pytest.skip("Triton is not installed")

    def function(out, rows, count, dim, BLOCK: "tl.constexpr"):  # type: ignore[no-untyped-def]  # noqa: F821
        pass

    seen = Launches(monkeypatch)
    kernel, compiled, launched = seen.of(function, "count"), seen.compiled, seen.launched
    usual = (OnDevice(), OnDevice(), 5, 8, 64)
    kinds = [
        usual,
        (OnDevice(torch.bfloat16), *usual[1:]),
        (OnDevice(), OnDevice(address=520), *usual[2:]),
        (*usual[:2], 2**31, 8, 64),
        (*usual[:3], 9, 64),
        (*usual[:4], 128),
    ]
    for arguments in kinds:
        kernel[(3,)](*arguments)
    kernel[(3,)](*usual, num_warps=1)
    kernel[(3,)](*usual, registers=80)
    assert len(compiled) == len(kinds) + 2 and not launched
    assert compiled[-1] == {"num_warps": 4, "maxnreg": 80} and compiled[0] == {"num_warps": 4}
    for arguments in kinds:
        kernel[(3,)](*arguments)
    kernel[(4, 2)](OnDevice(address=1024), OnDevice(), 2**20, 8, 64)  # another place and size: the same kind
    assert len(compiled) == len(kinds) + 2 and len(launched) == len(kinds) + 1
    assert launched[-1][:4] == (4, 2, 1, 7) and launched[-1][-5:] == (1024, 512, 2**20, 8, 64)
    elsewhere = OnDevice(is_cuda=False)  # host memory: Triton finds out whether the device can read it
    kernel[(3,)](OnDevice(), elsewhere, *usual[2:])
    assert len(compiled) == len(kinds) + 2 and launched[-1][-5:-3] == (512, elsewhere)


@pytest.mark.parametrize("early", [True, False])
def test_a_kernel_that_can_start_early_is_told_whether_it_does(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    if backend.triton is None:
        pytest.skip("Triton is not installed")

    def function(out, BLOCK: "tl.constexpr", EARLY: "tl.constexpr"):  # type: ignore[no-untyped-def]  # noqa: F821
        pass

    seen = Launches(monkeypatch)
    kernel = seen.of(function)
    monkeypatch.setattr(backend, "_starts_early", lambda device: early)
    for _ in range(2):
        kernel[(3,)](OnDevice(), 64)
    assert seen.compiled == [{"num_warps": 4, **({"launch_pdl": True} if early else {})}]
    assert [launch[-2:] for launch in seen.launched] == [(64, early)]


def test_these_tests_run_kernels_and_not_their_twins(device: str) -> None:
    if backend.triton is None:
        pytest.skip("Triton is not installed")
    assert backend.runs_kernels(torch.zeros(1, device=device))
