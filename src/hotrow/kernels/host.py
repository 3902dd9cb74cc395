# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""`HostRows`: rows in pinned host memory, brought to the device and taken back, by the faster of two ways.

*Direct*: a kernel reads or writes host rows over the link, one program a few rows, so that very many requests are
under way at once; the processor does nothing. *Staged*: the processor gathers rows into a pinned buffer and one long
copy takes them over, or the other way round. Which is faster depends on link, cores and row size, so both are measured
once when the rows are made, for each direction: on an H200 with 16 cores, random rows of 512 bytes go at 47 GB/s
direct and 26 staged, and back at 49 and 17. Optimizers can also run on host rows straight from the update kernel:
see `Tables(memory="pinned")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hotrow.errors import SettingsError
from hotrow.kernels.backend import kernel, power_of_two, runs_kernels, tl, vector_of

WAYS = ("direct", "staged")
_PROBE = 16384  # rows that are moved to measure


@kernel("count")
def gather_kernel(out, rows, numbers, count, dim, TILE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = dim // VECTOR * VECTOR
    inside = (i < count)[:, None] & (columns < dim)[None, :]
    number = tl.load(numbers + i, mask=i < count, other=0).to(tl.int64)
    row = tl.load(rows + (number * dim)[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(out + (i.to(tl.int64) * dim)[:, None] + columns[None, :], row, mask=inside)


@kernel("count")
def scatter_kernel(rows, new, numbers, count, dim, TILE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = dim // VECTOR * VECTOR
    inside = (i < count)[:, None] & (columns < dim)[None, :]
    number = tl.load(numbers + i, mask=i < count, other=0).to(tl.int64)
    row = tl.load(new + (i.to(tl.int64) * dim)[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(rows + (number * dim)[:, None] + columns[None, :], row, mask=inside)


@torch.library.custom_op("hotrow::gather_rows", mutates_args=())
def gather_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """`rows[numbers]` on the device of `numbers`; `rows[n, dim]` may be pinned host memory."""
    if not runs_kernels(numbers):
        return rows[numbers.to(rows.device).long()].to(numbers.device)
    out = torch.empty(len(numbers), rows.shape[1], dtype=rows.dtype, device=numbers.device)
    if out.numel():
        grid, tile, block, vector = _cut(*out.shape)
        gather_kernel[grid](out, rows, numbers, *out.shape, tile, block, vector, num_warps=1)
    return out


@gather_rows.register_fake
def _(rows: Tensor, numbers: Tensor) -> Tensor:
    return numbers.new_empty(numbers.shape[0], rows.shape[1], dtype=rows.dtype)


@torch.library.custom_op("hotrow::scatter_rows", mutates_args=("rows",))
def scatter_rows(rows: Tensor, numbers: Tensor, new: Tensor) -> None:
    """`rows[numbers] = new`, where `numbers` are distinct; `rows[n, dim]` may be pinned host memory."""
    if not runs_kernels(numbers):
        rows[numbers.to(rows.device).long()] = new.to(rows.device)
    elif new.numel():
        grid, tile, block, vector = _cut(*new.shape)
        scatter_kernel[grid](rows, new.contiguous(), numbers, *new.shape, tile, block, vector, num_warps=1)


@scatter_rows.register_fake
def _(rows: Tensor, numbers: Tensor, new: Tensor) -> None:
    return None


class HostRows:
    """`rows[n, dim]` in host memory for a device; `gather_way` and `scatter_way` say how they travel.

    `seconds` holds what was measured for both ways, if it was. Numbers are given on the host; the staged way
    waits for the device where it must, the direct one never.
    """

    def __init__(self, rows: Tensor, device: torch.device | str, way: str | None = None) -> None:
        if rows.dim() != 2 or rows.device.type != "cpu":
            raise SettingsError("Host rows are a matrix [rows, dim] in host memory.")
        if way is not None and way not in WAYS:
            raise SettingsError(f'Host rows travel "direct" or "staged", not "{way}".')
        self.rows, self.device = rows, torch.device(device)
        self.seconds: dict[str, float] = {}
        self.gather_way = self.scatter_way = way or "staged"
        if way is None and self.device.type == "cuda" and rows.is_pinned():
            self._measure()

    def gather(self, numbers: Tensor, way: str | None = None) -> Tensor:
        """The rows of `numbers[k]` (int64, on the host), `[k, dim]` on the device."""
        if (way or self.gather_way) == "direct":
            found: Tensor = gather_rows(self.rows, numbers.to(self.device, non_blocking=True))
            return found
        taken = torch.empty(len(numbers), self.rows.shape[1], dtype=self.rows.dtype, pin_memory=self._pins)
        torch.index_select(self.rows, 0, numbers, out=taken)
        return taken.to(self.device, non_blocking=True)

    def scatter(self, numbers: Tensor, new: Tensor, way: str | None = None) -> None:
        """Writes `new[k, dim]`, on the device, to the rows of distinct `numbers[k]` (int64, on the host)."""
        if (way or self.scatter_way) == "direct":
            scatter_rows(self.rows, numbers.to(self.device, non_blocking=True), new)
            return
        taken = torch.empty(new.shape, dtype=self.rows.dtype, pin_memory=self._pins)
        taken.copy_(new, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.rows.index_copy_(0, numbers, taken)

    @property
    def _pins(self) -> bool:
        return self.device.type == "cuda"

    def _measure(self) -> None:
        """Moves random rows both ways and puts back what was there."""
        count = min(_PROBE, len(self.rows))
        numbers = torch.randperm(len(self.rows))[:count].pin_memory()
        kept = self.gather(numbers, "staged")
        for way in WAYS:
            self.seconds[f"gather {way}"] = self._seconds(lambda way=way: self.gather(numbers, way))  # type: ignore[misc]
            self.seconds[f"scatter {way}"] = self._seconds(lambda way=way: self.scatter(numbers, kept, way))  # type: ignore[misc]
        self.gather_way = min(WAYS, key=lambda way: self.seconds[f"gather {way}"])
        self.scatter_way = min(WAYS, key=lambda way: self.seconds[f"scatter {way}"])

    def _seconds(self, move: Callable[[], object], repeats: int = 3) -> float:
        times = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            move()
            torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return min(times[1:])


def _cut(count: int, dim: int) -> tuple[tuple[int, int], int, int, int]:
    """Grid, tile, block and vector for `count` rows of `dim`."""
    block = min(power_of_two(dim), 256)
    tile = max(1, 1024 // block)
    return (-(-count // tile), -(-dim // block)), tile, block, vector_of(dim)
