"""Where kernels run: on the accelerator through Triton, in Triton's interpreter, or as their plain PyTorch twins.

Every operation here has two forms, a Triton kernel and a twin of a few PyTorch calls that says what the kernel
computes. The kernel is taken for tensors on an accelerator, and for any tensor while Triton's interpreter is on
(`TRITON_INTERPRET=1` when triton is first imported: how CI, which has no accelerator, runs every kernel). Everything
else takes the twin, and where that is only because Triton is absent, one warning says so.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def _triton() -> tuple[Any, Any]:
    try:
        return import_module("triton"), import_module("triton.language")
    except ImportError:
        return None, None


triton, tl = _triton()
_told = False


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function as it is where nobody will launch it."""
    return function if triton is None else triton.jit(function)


def apart(function: Any) -> Any:
    """The same jitted function, compiled on its own and called: of several copies in one kernel, each costs itself.

    The compiler's time grows with the square of what it sees at once: of tables of four dims, 6 instead of 16 seconds.
    """
    return function if triton is None else triton.jit(function.fn, noinline=True)


def kernel(*sizes: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` for a function that is launched; `sizes` change with the batch, and no value of them is compiled for."""

    def decorate(function: Callable[..., Any]) -> Any:
        return function if triton is None else Kernel(function, sizes)

    return decorate


class Kernel:
    """A kernel to launch as Triton's own, `kernel[grid](*arguments, num_warps=...)`, at a tenth of the host time.

    `registers` are the most a thread may have, where the compiler can be told. A kernel whose last constant is `EARLY`
    is launched before the one ahead of it has ended, where the device can do that: see `after_previous`.

    Triton looks at every argument anew to find what it compiled before, which takes longer than these kernels
    run. Here that is found by the arguments' kinds: dtype and alignment of a tensor, width of a size, value of a
    constant. Constants come last. Under the interpreter, or with launch hooks (a profiler's), launches are Triton's
    own.
    """

    def __init__(self, function: Callable[..., Any], sizes: Sequence[str]) -> None:
        self.jit: Any = triton.jit(function, do_not_specialize=list(sizes))
        given = inspect.signature(function).parameters.values()
        self._constants = sum("constexpr" not in str(parameter.annotation) for parameter in given)
        self._sizes = [i for i, parameter in enumerate(given) if parameter.name in sizes]
        self._dependent = self.jit.arg_names[-1] == "EARLY"
        self._tensors: list[int] = []  # which arguments they are, and other values: seen at the first launch
        self._values: list[int] = []
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, registers: int = 0) -> None:
        device = arguments[0].device
        if self._dependent:
            arguments = (*arguments, _starts_early(device))
        if device.type != "cuda" or interpreted() or _hooked():
            self._compile(grid, arguments, num_warps, registers)
            return
        if not self._tensors:
            others = [i for i in range(self._constants) if i not in self._sizes]
            self._tensors = [i for i in others if isinstance(arguments[i], Tensor)]
            self._values = [i for i in others if i not in self._tensors]
        tensors = [arguments[i] for i in self._tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            device.index,
            num_warps,
            registers,
            arguments[self._constants :],
            *[arguments[i] for i in self._values],
            *[-(2**31) <= arguments[i] < 2**31 for i in self._sizes],
            *[tensor.dtype for tensor in tensors],
            *[address & 15 == 0 for address in addresses],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._compile(grid, arguments, num_warps, registers)
            return
        given = list(arguments)
        for i, tensor, address in zip(self._tensors, tensors, addresses, strict=True):
            if tensor.is_cuda:  # an address is taken as it is; of a tensor Triton asks the driver what it is
                given[i] = address
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        compiled.run(
            *grid, *(1,) * (3 - len(grid)), stream, compiled.function, compiled.packed_metadata, None, None, None,
            *given,
        )  # fmt: skip

    def _compile(self, grid: tuple[int, ...], arguments: tuple[Any, ...], num_warps: int, registers: int) -> Any:
        """Launches as Triton does, which compiles what is new to it."""
        options = {"num_warps": num_warps}
        if registers and torch.version.hip is None:
            options["maxnreg"] = registers
        if self._dependent and arguments[-1]:
            options["launch_pdl"] = True
        return self.jit[grid](*arguments, **options)


@jit
def after_previous(EARLY: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]
    """Waits for the kernel before this one in the stream, and lets the one behind it start likewise.

    So the device has programs at hand when the last ones of a kernel end: it need not drain, be told of the next kernel
    and fill again. Every program calls it, also one that has nothing to do. It lets the next kernel start after its own
    wait and never before: so when programs of a kernel start, all kernels have ended but the one just before it. What
    that one writes, and what it reads and this one writes, comes after the call.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _starts_early(device: torch.device) -> bool:
    """Whether kernels of this device can be launched before the one ahead has ended."""
    if device.type != "cuda" or interpreted() or torch.version.hip is not None:
        return False
    return hasattr(tl.extra.cuda, "gdc_wait") and torch.cuda.get_device_capability(device) >= (9, 0)


def _hooked() -> bool:
    """Whether somebody wants to hear of launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def constant(value: int) -> Any:
    """A number that kernels may read by its global name."""
    return value if triton is None else tl.constexpr(value)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether work on `tensor` goes to a kernel; False means to its twin."""
    global _told
    if triton is not None:
        return tensor.is_cuda or interpreted()
    if tensor.is_cuda and not _told:
        _told = True
        warnings.warn(
            "Triton is not installed, so embeddings on this accelerator run as plain PyTorch operations, which are "
            "several times slower. Install it with `pip install triton`.",
            stacklevel=3,
        )
    return False


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


def vector_of(dim: int) -> int:
    """How many elements of rows of `dim` can always be loaded at once."""
    return math.gcd(dim, 8)
