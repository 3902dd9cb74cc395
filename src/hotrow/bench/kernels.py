"""`hotrow bench kernels`: embedding kernels on an accelerator against FBGEMM's table-batched embedding.

Row-wise Adagrad, float32 rows and results, sum pooling or sequences. One step is forward, backward and update, on
a fresh batch each time; all sides see the same batches, int64 row numbers and offsets on the device. "counted" makes
the grouping in the step; "given" has it ready, as in training, where it is made ahead. `ikjt5` has every sample five
times: FBGEMM looks up the expanded batch, Hotrow the unique samples, and both give results for every sample.

Both sides are called from Python, batch after batch, as a training loop calls them, and timed by the device's own
clock over a turn of 64 batches, so that waiting for the first launch of a turn counts little. FBGEMM so called leaves
the device waiting on most of these shapes; figures that end in ".device" are of the same two captured in CUDA graphs:
kernels alone. The floor is what must move (unique rows in, and in and out again; results out, gradients in) at the
speed of a plain copy on the same device in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.bench.report import Report, add, missing, new_report, reading
from hotrow.kernels import (
    BatchShape,
    FeatureSpec,
    Grouping,
    GroupSpec,
    Members,
    Tables,
    TableSpec,
    group_numbers,
    lookup,
    tune,
    update,
)
from hotrow.kernels.host import WAYS, HostRows
from hotrow.kernels.tuning import captured

ZIPF, LR, REPEATS = 1.05, 0.01, 5


class Workload(NamedTuple):
    """Tables x rows x dim, batch x length; keys Zipf or uniform; pooled or not."""

    tables: int
    rows: int
    dim: int
    batch: int
    length: int
    zipf: bool = True
    sequence: bool = False

    @property
    def lookups(self) -> int:
        return self.tables * self.batch * self.length


WORKLOADS = {
    "uniform128": Workload(26, 1_000_000, 128, 8192, 8, zipf=False),
    "zipf128": Workload(26, 1_000_000, 128, 8192, 8),
    "zipf64": Workload(26, 1_000_000, 64, 8192, 8),
    "onehot128": Workload(26, 1_000_000, 128, 16384, 1),
    "seq128": Workload(4, 4_000_000, 128, 1024, 200, sequence=True),
}
Side = Callable[[], None]


def run(quick: bool = False, only: list[str] | None = None, tuned: bool = True) -> Report:
    """All figures of the kernels; `quick` takes few batches and turns."""
    batches, rounds = (2, 3) if quick else (64, 12)
    report = new_report("kernels", {"optimizer": "row-wise Adagrad", "dtype": "float32", "keys": f"Zipf {ZIPF}"},
                        ("triton", "fbgemm-gpu"))  # fmt: skip
    ids = [f"kernels.{name}.{what}" for name in WORKLOADS for what in ("given", "counted")] + ["kernels.ikjt5"]
    if not torch.cuda.is_available():
        for id in ids:
            missing(report, id, "there is no CUDA device here")
        return report
    report["machine"]["device"] = torch.cuda.get_device_name()
    speed = copy_speed()
    report["machine"]["copy_gb_s"] = round(speed / 1e9)
    for name, workload in WORKLOADS.items():
        if only is None or name in only:
            _measure(report, name, workload, batches, rounds, speed, tuned)
    if only is None or "ikjt5" in only:
        _measure_repeated(report, WORKLOADS["zipf128"], batches, rounds, speed, tuned)
    if only is None or "host" in only:
        _measure_host(report)
    try:
        import fbgemm_gpu

        report["versions"]["fbgemm-gpu"] = str(getattr(fbgemm_gpu, "__version__", "unknown"))
    except ImportError:
        pass
    return report


def _measure(
    report: Report, name: str, workload: Workload, batches: int, rounds: int, speed: float, tuned: bool
) -> None:
    """One workload: FBGEMM, ours with the grouping given, ours with it counted in."""
    data = list(make_batches(workload, batches))
    grad = torch.randn(_results(workload), device="cuda")
    tables = make_tables(workload)
    shape = BatchShape(tables, [_group(workload, workload.batch)])
    groupings = [group_numbers(tables, shape, *pair) for pair in data]
    if tuned:
        tune(tables, shape, groupings[0][0], data[0][1], groupings[0][1])
    given = _given(tables, shape, data, groupings, grad)
    sides = _both_ways({"given": given, "counted": _counted(tables, shape, data, grad)}, fbgemm(workload, data, grad))
    times = take_turns(sides, rounds, batches)
    floor = _floor(workload, groupings, workload.batch, workload.batch) / speed
    uniform = not workload.zipf
    for what, must, aim in (("given", 2 if uniform else 3, 3 if uniform else 4.5), ("counted", 1.5, 2.5)):
        _ratio(report, f"kernels.{name}.{what}", times, what, must, aim)
        _ratio(report, f"kernels.{name}.{what}.device", times, f"{what}.device", None, None)
    ours = reading(times["given.device"])
    share = floor * 1e3 / ours["median_ms"]
    note = f"of the copy bandwidth, over the bytes that must move ({floor * 1e3:.3f} ms)"
    add(report, f"kernels.{name}.bandwidth", share, "share", ours=ours, note=note)
    del sides, given, tables, groupings
    _free()


def _measure_repeated(report: Report, workload: Workload, batches: int, rounds: int, speed: float, tuned: bool) -> None:
    """The IKJT: unique samples looked up once, results for all."""
    unique = -(-workload.batch // REPEATS)
    small = workload._replace(batch=unique)
    data = list(make_batches(small, batches))
    inverse = torch.arange(workload.batch, device="cuda") // REPEATS
    expanded = [_expand(workload, small, pair, inverse) for pair in data]
    grad = torch.randn(_results(workload), device="cuda")
    tables = make_tables(workload)
    shape = BatchShape(tables, [_group(small, unique)._replace(expanded=workload.batch)])
    members = Members.of(inverse, unique)
    groupings = [group_numbers(tables, shape, *pair) for pair in data]
    if tuned:
        tune(tables, shape, groupings[0][0], data[0][1], groupings[0][1], members=members)
    mine = {
        "given": _given(tables, shape, data, groupings, grad, members),
        "counted": _counted(tables, shape, data, grad, inverse),
    }
    sides = _both_ways(mine, fbgemm(workload, expanded, grad))
    times = take_turns(sides, rounds, batches)
    _ratio(report, "kernels.ikjt5", times, "given", 6, 12)
    _ratio(report, "kernels.ikjt5.device", times, "given.device", None, None)
    _ratio(report, "kernels.ikjt5.counted", times, "counted", None, None)
    floor = _floor(small, groupings, workload.batch, unique) / speed
    ours = reading(times["given.device"])
    add(report, "kernels.ikjt5.bandwidth", floor * 1e3 / ours["median_ms"], "share", ours=ours,
        note=f"of the copy bandwidth, over the bytes that must move ({floor * 1e3:.3f} ms)")  # fmt: skip
    del sides, mine, tables, groupings
    _free()


def _measure_host(report: Report, rows: int = 2_000_000, dim: int = 128, count: int = 200_000) -> None:
    """Random rows from and to pinned host memory, both ways, in GB/s."""
    host = HostRows(torch.randn(rows, dim).pin_memory(), "cuda")
    numbers = torch.randperm(rows)[:count].pin_memory()
    taken = host.gather(numbers)
    moves: dict[str, Callable[[str], object]] = {
        "gather": lambda way: host.gather(numbers, way),
        "scatter": lambda way: host.scatter(numbers, taken, way),
    }
    for name, move in moves.items():
        speeds = {}
        for way in WAYS:
            times = []
            for _ in range(6):
                torch.cuda.synchronize()
                start = time.perf_counter()
                move(way)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            speeds[way] = round(taken.nbytes / min(times[1:]) / 1e9, 2)
        used = host.gather_way if name == "gather" else host.scatter_way
        note = f"random rows of {dim * 4} bytes in pinned host memory; measured at start, chosen: {used}"
        add(report, f"kernels.host.{name}", speeds[used], "GB/s", ours=speeds, note=note)


def _both_ways(ours: Mapping[str, Side], peer: Side | None) -> dict[str, Side]:
    """Every side as it is called from Python, and captured in a CUDA graph."""
    sides = dict(ours) if peer is None else {**ours, "fbgemm": peer}
    return sides | {f"{name}.device": captured(side) for name, side in sides.items()}


def _ratio(
    report: Report, id: str, times: Mapping[str, list[float]], ours: str, must: float | None, aim: float | None
) -> None:
    theirs = "fbgemm.device" if ours.endswith(".device") else "fbgemm"
    if theirs not in times:
        missing(report, id, f"fbgemm_gpu is not installed (ours: {reading(times[ours])['median_ms']:.3f} ms)")
        return
    mine, peer = reading(times[ours]), reading(times[theirs])
    add(report, id, peer["median_ms"] / mine["median_ms"], "x", must=must, aim=aim, ours=mine, baseline=peer)


def make_batches(workload: Workload, count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers within their tables and offsets, feature after feature, sample after sample."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ranks = torch.arange(1, workload.rows + 1, device="cuda", dtype=torch.float64)
    cumulative = torch.cumsum(ranks**-ZIPF, 0)
    cumulative /= cumulative[-1].clone()
    spread = [torch.randperm(workload.rows, generator=generator, device="cuda") for _ in range(workload.tables)]
    each = workload.batch * workload.length
    offsets = torch.arange(0, workload.lookups + 1, workload.length, device="cuda")
    for _ in range(count):
        numbers = []
        for t in range(workload.tables):
            if workload.zipf:
                chance = torch.rand(each, generator=generator, device="cuda", dtype=torch.float64)
                rank = torch.searchsorted(cumulative, chance).clamp_(max=workload.rows - 1)
                numbers.append(spread[t][rank])
            else:
                numbers.append(torch.randint(workload.rows, (each,), generator=generator, device="cuda"))
        yield torch.cat(numbers), offsets


def make_tables(workload: Workload) -> Tables:
    """The workload's tables with random rows."""
    tables = Tables([TableSpec(workload.rows, workload.dim)] * workload.tables, "cuda")
    tables.values.uniform_(-0.05, 0.05)
    return tables


def _group(workload: Workload, samples: int) -> GroupSpec:
    each = samples * workload.length
    pooling = "sequence" if workload.sequence else "sum"
    features = [FeatureSpec(t, pooling, each if workload.sequence else 0) for t in range(workload.tables)]
    return GroupSpec(features, samples, workload.tables * each)


def _given(
    tables: Tables,
    shape: BatchShape,
    data: list[tuple[Tensor, Tensor]],
    groupings: list[tuple[Tensor, Grouping]],
    grad: Tensor,
    members: Members | None = None,
) -> Side:
    def turn() -> None:
        for (_, offsets), (slots, grouping) in zip(data, groupings, strict=True):
            lookup(tables, shape, slots, offsets, members=members)
            update(tables, shape, grouping, grad, members=members)

    return turn


def _counted(
    tables: Tables,
    shape: BatchShape,
    data: list[tuple[Tensor, Tensor]],
    grad: Tensor,
    inverse: Tensor | None = None,
) -> Side:
    def turn() -> None:
        for numbers, offsets in data:
            members = None if inverse is None else Members.of(inverse, shape.groups[0].samples)
            slots, grouping = group_numbers(tables, shape, numbers, offsets)
            lookup(tables, shape, slots, offsets, members=members)
            update(tables, shape, grouping, grad, members=members)

    return turn


def fbgemm(workload: Workload, data: list[tuple[Tensor, Tensor]], grad: Tensor) -> Side | None:
    """FBGEMM's table-batched embedding on the same batches; None where it is not installed."""
    try:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    place = (workload.rows, workload.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    embeddings: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [place] * workload.tables,
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=1e-8,
        pooling_mode=PoolingMode.NONE if workload.sequence else PoolingMode.SUM,
    )
    embeddings.init_embedding_weights_uniform(-0.05, 0.05)
    width = workload.dim if workload.sequence else workload.tables * workload.dim
    matrix = grad.view(-1, width)

    def turn() -> None:
        for numbers, offsets in data:
            embeddings(numbers, offsets).backward(matrix)

    return turn


def take_turns(sides: Mapping[str, Side], rounds: int, batches: int) -> dict[str, list[float]]:
    """Seconds a step of each side, by device events around each turn; sides take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round in range(rounds + 1):
        for name, turn in sides.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            start.record()
            turn()
            end.record()
            end.synchronize()
            if round:
                seconds[name].append(start.elapsed_time(end) / 1e3 / batches)
    return seconds


def copy_speed() -> float:
    """Bytes a second of a plain device-to-device copy, read and written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    seconds = take_turns({"copy": lambda: (target.copy_(source), None)[1]}, 10, 1)["copy"]
    return 2 * source.nbytes / sorted(seconds)[len(seconds) // 2]


def _floor(workload: Workload, groupings: list[tuple[Tensor, Grouping]], batch: int, samples: int) -> float:
    """Bytes that must move in a step, on average over the batches; grads of repeats are summed once in between."""
    unique = sum(len(torch.unique(g.rows)) for _, g in groupings) / len(groupings)
    row = workload.dim * 4
    results = _results(workload._replace(batch=batch)) * 4
    contracted = 0 if batch == samples else 2 * _results(workload._replace(batch=samples)) * 4
    return 3 * unique * row + 2 * results + contracted


def _results(workload: Workload) -> int:
    return workload.tables * workload.batch * workload.dim * (workload.length if workload.sequence else 1)


def _expand(workload: Workload, small: Workload, pair: tuple[Tensor, Tensor], inverse: Tensor) -> tuple[Tensor, Tensor]:
    numbers = pair[0].view(workload.tables, small.batch, workload.length)[:, inverse].reshape(-1)
    return numbers, torch.arange(0, workload.lookups + 1, workload.length, device="cuda")


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":  # where the command line's own dependencies are missing
    parser = argparse.ArgumentParser(description="hotrow bench kernels")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    began = time.perf_counter()
    result = run(arguments.quick, arguments.only)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for r in result["results"]:
        ours, peer = r["ours"].get("median_ms", 0), r["baseline"].get("median_ms", 0)
        print(f"{r['id']:32s} {r['value']:7.3f} {r['unit']:6s} must {r['must']} aim {r['aim']} ours {ours} peer {peer}")
    print(result["missing"], f"{time.perf_counter() - began:.0f} s")
