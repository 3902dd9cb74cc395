"""How a kernel is cut into programs: a default for each, and a small autotuner that keeps what it found.

What is tuned never changes the order of a sum, so tuning changes no bit of a result. A choice belongs to a device, a
kernel, the classes of the tables, their dtype and the kind of batch (its size and the length of its bags to a power of
two, or that it is of sequences; and whether it is expanded). It is kept in memory and in one JSON file (`HOTROW_CACHE`,
or `~/.cache/hotrow`), so a machine measures once. Without a measurement the defaults hold, which are those found on an
H200.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

FULL_LOAD = 128  # elements that a warp loads at once: 16 bytes a thread
WIDEST = 128  # dims above are always summed by one warp, so that the sum of squares has one order; they need registers


class Config(NamedTuple):
    """`elements` a warp has at a time, lookups it takes at once, warps of a program: the update's have one.

    `share` is, for the lookup, how many tiles one program takes one after another, and for the update how many lookups
    there are for each program. `across` says whether in the lookup features take turns or come one after another.
    `registers` are the most a thread may have, 0 if the assembler is to say: it saves them, and asks for fewer rows at
    a time.
    """

    elements: int
    unroll: int
    warps: int = 1
    share: int = 1
    across: bool = False
    registers: int = 0

    def tiles(self, blocks: Sequence[int], elements: int | None = None) -> tuple[int, ...]:
        """How many cells or rows of each class one program handles at a time.

        Never so few that a warp has less than a full load: a thread would hold fewer columns, and sums of squares
        would have another order.
        """
        return _tiles(max(elements or self.elements, FULL_LOAD) * self.warps, blocks)


DEFAULTS = {"lookup": Config(256, 4, share=2), "update": Config(512, 8, share=32, registers=80)}
ONE_ROW_EACH = Config(512, 1, share=4)  # the default of a lookup of sequences, or of bags of one row

_chosen: dict[str, Config] | None = None


def machine_name(device: torch.device | str) -> str:
    """What choices are kept for."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else torch.device(device).type


def key_of(kernel: str, machine: str, blocks: tuple[int, ...], dtype: torch.dtype, kind: str) -> str:
    """What a choice belongs to; `kind` is `BatchShape.kind`."""
    return f"{machine}|{kernel}|{'-'.join(map(str, blocks))}|{dtype}|{kind}"


@functools.cache
def chosen(kernel: str, machine: str, blocks: tuple[int, ...], dtype: torch.dtype, kind: str) -> Config:
    """The configuration to use: what was measured for this machine and shape, or the default."""
    each = kind.split("|")[1].rstrip("+")
    default = ONE_ROW_EACH if kernel == "lookup" and each in ("1", "s") else DEFAULTS[kernel]
    config = _known().get(key_of(kernel, machine, blocks, dtype, kind), default)
    return config._replace(warps=1, registers=0) if max(blocks) > WIDEST else config


def candidates(kernel: str, blocks: Sequence[int]) -> list[Config]:
    """What the autotuner tries."""
    wide = max(blocks) > WIDEST
    if kernel == "lookup":
        warps = (1,) if wide else (1, 2)
        sizes = ((128, 8, 0), (128, 8, 80), (256, 4, 0), (256, 4, 80), (512, 1, 0), (512, 1, 80), (512, 2, 80),
                 (1024, 1, 128), (2048, 1, 128))  # fmt: skip
        cuts = [(share, across) for share in (1, 2, 4) for across in (False, True)]
        return [Config(e, u, w, *cut, r) for w in warps for e, u, r in sizes if not (wide and r) for cut in cuts]
    cuts_of_sums = ((4, 0), (8, 0)) if wide else ((4, 0), (4, 80), (8, 0), (8, 80), (16, 128))
    return [Config(512, u, share=s, registers=r) for u, r in cuts_of_sums for s in (8, 16, 32, 64)]


def choose(key: str, tried: Sequence[Config], run: Callable[[Config], object], repeats: int = 5) -> Config:
    """Measures `run` with each configuration, keeps the fastest under `key` and returns it."""
    times = {config: _milliseconds(lambda config=config: run(config), repeats) for config in tried}  # type: ignore[misc]
    best = min(times, key=lambda config: times[config])
    _known()[key] = best
    chosen.cache_clear()
    _write()
    return best


def forget() -> None:
    """Drops what is known in memory; the file stays."""
    global _chosen
    _chosen = None
    chosen.cache_clear()


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
            _chosen = {key: _config(*values) for key, values in found.items()}
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


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The same work as one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Of a captured run: called one by one, small kernels would be measured by how fast the host launches them."""
    replay = captured(run)
    replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def _config(elements: int, unroll: int, warps: int, share: int, across: bool, registers: int) -> Config:
    return Config(int(elements), int(unroll), int(warps), int(share), bool(across), int(registers))


def _tiles(elements: int, blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(1, elements // block) for block in blocks)
