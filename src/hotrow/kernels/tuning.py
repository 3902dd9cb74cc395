"""How a kernel is cut into programs: a default for each, and a small autotuner that keeps what it found.

What is tuned (elements a program, unrolling, warps, programs that stay on a processor) never changes the order of a
sum, so tuning changes no bit of a result. A choice belongs to a device, a kernel, the classes of the tables, their
dtype and the size of the batch to a power of two. It is kept in memory and in one JSON file (`HOTROW_CACHE`, or
`~/.cache/hotrow`), so a machine measures once. Without a measurement the defaults hold, which are those found on an H200.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

FULL_LOAD = 128  # elements that a warp loads at once: 16 bytes a thread
WIDEST = 128  # dims above are always summed by one warp, so that the sum of squares has one order


class Config(NamedTuple):
    """`elements` of a tile, lookups taken at once, warps, and tiles a program has at most on average."""

    elements: int
    unroll: int
    warps: int
    share: int = 1

    def tiles(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """How many cells or chunks of each class one program handles at a time.

        Never so few that a warp has less than a full load: a thread would hold fewer columns, and sums of squares
        would have another order.
        """
        elements = max(self.elements, FULL_LOAD * self.warps)
        return tuple(max(1, elements // block) for block in blocks)


DEFAULTS = {"lookup": Config(256, 4, 1), "update": Config(512, 4, 1, 2)}

_chosen: dict[str, Config] | None = None


def key_of(kernel: str, device: torch.device, blocks: Sequence[int], dtype: torch.dtype, lookups: int) -> str:
    """What a choice belongs to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}|{kernel}|{'-'.join(map(str, blocks))}|{dtype}|{max(lookups, 1).bit_length()}"


def chosen(kernel: str, device: torch.device, blocks: Sequence[int], dtype: torch.dtype, lookups: int) -> Config:
    """The configuration to use: what was measured for this device and shape, or the default."""
    config = _known().get(key_of(kernel, device, blocks, dtype, lookups), DEFAULTS[kernel])
    return config._replace(warps=1) if max(blocks) > WIDEST else config


def candidates(kernel: str, blocks: Sequence[int]) -> list[Config]:
    """What the autotuner tries."""
    warps = (1,) if max(blocks) > WIDEST else (1, 2, 4)
    shapes = [(e * w, u, w) for w in warps for e in (512, 1024) for u in (2, 4, 8)]
    if kernel == "lookup":
        return [Config(e, u, w) for e, u, w in shapes]
    return [Config(e, u, w, s) for e, u, w in shapes if u < 8 for s in (1, 2, 4)]


def choose(key: str, tried: Sequence[Config], run: Callable[[Config], object], repeats: int = 5) -> Config:
    """Measures `run` with each configuration, keeps the fastest under `key` and returns it."""
    times = {config: _milliseconds(lambda config=config: run(config), repeats) for config in tried}  # type: ignore[misc]
    best = min(times, key=lambda config: times[config])
    _known()[key] = best
    _write()
    return best


def forget() -> None:
    """Drops what is known in memory; the file stays."""
    global _chosen
    _chosen = None


def cache_file() -> Path:
    """Where choices are kept."""
    folder = os.environ.get("HOTROW_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "hotrow") / "kernels.json"


def _known() -> dict[str, Config]:
    global _chosen
    if _chosen is None:
        _chosen = {}
        try:
            found = json.loads(cache_file().read_text())
            _chosen = {key: Config(*(int(x) for x in values)) for key, values in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # no file, or not one of ours: measured again when asked
    return _chosen


def _write() -> None:
    file = cache_file()
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(_known(), indent=1, sort_keys=True) + "\n")
        beside.replace(file)
    except OSError:
        beside.unlink(missing_ok=True)  # a home that cannot be written to: known in this process only


def _milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()  # type: ignore[no-untyped-call]
        run()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        times.append(start.elapsed_time(end))  # type: ignore[no-untyped-call]
    return statistics.median(times)
