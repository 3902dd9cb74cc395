"""`hotrow bench store`: the row store through the public `Embeddings`, against FBGEMM's CPU kernels and PyTorch.

26 tables, dim 32, batches of 2048 single-key samples with Zipf 1.05 keys, row-wise Adagrad; one step is forward,
backward and update, on a fresh batch each time, grouping counted in. The peers have fixed dense tables and
are given row numbers; Hotrow is given arbitrary 64-bit keys and hashes them. FBGEMM and PyTorch read and
write a row for each lookup or sort their gradients; Hotrow touches each unique row once.

Growth is measured on tables of dim 8 and three sizes, in turns: uniformly random keys, the worst case, fetched and
updated.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hotrow import Batch, Embeddings, Feature, Table, _native
from hotrow.bench.report import Report, add, missing, new_report, reading, take_turns
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.store.store import RowStore, fetch, update
from hotrow.tiers import HostTier

TABLES, DIM, BATCH, ZIPF, LR = 26, 32, 2048, 1.05, 0.01
BATCHES, WARM = 24, 6

Keys = npt.NDArray[np.int64]


def run(quick: bool = False) -> Report:
    """All figures of the row store; `quick` leaves the largest tables out."""
    workload = {
        "tables": TABLES,
        "dim": DIM,
        "batch": BATCH,
        "keys": f"Zipf {ZIPF}",
        "optimizer": "row-wise Adagrad",
    }
    report = new_report("store", workload, ("fbgemm-gpu-cpu",))
    _against_peers(report, 200_000, "store.vs_fbgemm_cpu", must=1.3, aim=2.0, torch_too=True, rounds=3 if quick else 10)
    if quick:
        missing(report, "store.vs_fbgemm_cpu_2m", "left out by --quick")
    else:
        _against_peers(report, 2_000_000, "store.vs_fbgemm_cpu_2m", must=1.5, aim=2.5, torch_too=False, rounds=6)
    _growth(report, [1_000_000, 10_000_000] if quick else [1_000_000, 10_000_000, 100_000_000])
    return report


def _against_peers(
    report: Report, rows: int, id: str, *, must: float, aim: float, torch_too: bool, rounds: int
) -> None:
    numbers = zipf_batches(rows)
    grad = torch.randn(BATCH, TABLES * DIM)
    sides: dict[str, Callable[[int], None]] = {"ours": _ours(rows, numbers, grad)}
    reason = "fbgemm-gpu-cpu is not installed (make bench installs it)"
    try:
        sides["fbgemm"] = _fbgemm(rows, numbers, grad)
    except ImportError:
        missing(report, id, reason)
    if torch_too:
        sides["torch"] = _embedding_bags(rows, numbers, grad)
    if len(sides) == 1:
        return
    take_turns(sides, WARM, 1)
    seconds = take_turns(sides, BATCHES, rounds)
    read = {name: {**reading(s), "rows_a_table": rows} for name, s in seconds.items()}
    for peer, name, least, wanted in (("fbgemm", id, must, aim), ("torch", "store.vs_torch", 6.0, 10.0)):
        if peer in read:
            ratio = read[peer]["median_ms"] / read["ours"]["median_ms"]
            add(report, name, ratio, "x", must=least, aim=wanted, ours=read["ours"], baseline=read[peer])
    if torch_too:
        _cores(report, sides["ours"])


def _cores(report: Report, ours: Callable[[int], None]) -> None:
    """The same step on one core and on all of them."""
    cores = _native.threads()
    torch_threads = torch.get_num_threads()
    one: list[float] = []
    every: list[float] = []
    for _ in range(3):
        for threads, into in ((1, one), (cores, every)):
            _native.set_threads(threads)
            torch.set_num_threads(min(threads, torch_threads))
            into += take_turns({"ours": ours}, BATCHES, 1)["ours"]
    _native.set_threads(cores)
    torch.set_num_threads(torch_threads)
    ratio = reading(one)["median_ms"] / reading(every)["median_ms"]
    add(
        report,
        "store.cores",
        ratio,
        "x",
        ours=reading(every),
        baseline=reading(one),
        note=f"1 core to {cores}",
    )


def zipf_batches(rows: int) -> list[list[Keys]]:
    """Row numbers for each batch and table: Zipf by rank, ranks spread over the table at random."""
    rng = np.random.default_rng(0)
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    cumulative /= cumulative[-1]
    spread = [rng.permutation(rows) for _ in range(TABLES)]
    return [[s[np.searchsorted(cumulative, rng.random(BATCH))] for s in spread] for _ in range(BATCHES)]


def arbitrary_keys(table: int, numbers: Keys) -> Keys:
    """Distinct 64-bit keys for a table's row numbers, spread over the whole range."""
    return ((numbers.astype(np.uint64) + np.uint64(table << 40)) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _ours(rows: int, numbers: list[list[Keys]], grad: Tensor) -> Callable[[int], None]:
    names = [f"t{t}" for t in range(TABLES)]
    tables = [Table(name=n, dim=DIM, optimizer=RowWiseAdagrad(lr=LR)) for n in names]
    embeddings = Embeddings(tables, [Feature(name=n) for n in names])
    host = embeddings.router.tiers["host"]
    assert isinstance(host, HostTier)
    for t, store in enumerate(host.stores().values()):
        for part in np.array_split(np.arange(rows), max(1, rows // 250_000)):
            store.fetch(arbitrary_keys(t, part), 0)
    batches = [
        Batch.plain({n: torch.from_numpy(arbitrary_keys(t, keys[t])) for t, n in enumerate(names)}) for keys in numbers
    ]

    def step(i: int) -> None:
        embeddings(batches[i]).vectors().backward(grad)
        embeddings.step()

    return step


def _fbgemm(rows: int, numbers: list[list[Keys]], grad: Tensor) -> Callable[[int], None]:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    embeddings: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    embeddings.init_embedding_weights_uniform(-0.05, 0.05)
    values = [torch.from_numpy(np.concatenate(keys)) for keys in numbers]
    offsets = torch.arange(TABLES * BATCH + 1)

    def step(i: int) -> None:
        embeddings(values[i], offsets).backward(grad)

    return step


def _embedding_bags(rows: int, numbers: list[list[Keys]], grad: Tensor) -> Callable[[int], None]:
    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch's own, about its own optimizer
    bags = [nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(TABLES)]
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=LR)
    values = [[torch.from_numpy(keys[t]) for t in range(TABLES)] for keys in numbers]
    offsets = torch.arange(BATCH)

    def step(i: int) -> None:
        optimizer.zero_grad()
        out = torch.cat([bag(values[i][t], offsets) for t, bag in enumerate(bags)], dim=1)
        torch.autograd.backward(out, grad)
        optimizer.step()

    return step


def _growth(report: Report, sizes: list[int], dim: int = 8, batch: int = 100_000) -> None:
    """A table of each size: nanoseconds a key for a fetch and an update, in turns, and bytes a row."""
    rng = np.random.default_rng(1)
    payload = 4 * (dim + 1)
    stores: dict[int, RowStore] = {}
    per_key: dict[str, float] = {}
    per_row: dict[str, float] = {}
    resident: dict[str, float] = {}
    for size in sizes:
        gc.collect()
        before, start = _resident_bytes(), time.perf_counter()
        store = stores[size] = RowStore(Table(name="growth", dim=dim))
        for first in range(0, size, 250_000):
            store.fetch(arbitrary_keys(0, np.arange(first, min(first + 250_000, size))), 0)
        per_key[f"{size} insert"] = round((time.perf_counter() - start) / size * 1e9, 1)
        per_row[f"{size}"] = round(store.bytes / size - payload, 2)
        resident[f"{size}"] = round((_resident_bytes() - before) / size - payload, 2)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for step in range(30):
        for size, store in stores.items():
            keys = np.unique(arbitrary_keys(0, rng.integers(0, size, batch)))
            rng.shuffle(keys)
            seconds[size].append(_fetch_and_update(store, keys, step) / len(keys))
    for size in sizes:
        per_key[f"{size}"] = round(float(np.median(seconds[size][2:])) * 1e9, 1)
    least, most = str(sizes[0]), str(sizes[-1])
    add(
        report,
        "store.bytes_per_row",
        max(*per_row.values(), resident[most]),
        "bytes",
        must=32,
        aim=16,
        better="lower",
        ours={"accounted": per_row, "resident": resident, "dim": dim},
        note="beyond values and optimizer state; the largest of the sizes, or of resident memory at the last",
    )
    if len(sizes) == 3:
        growth = per_key[most] / per_key[least]
        ours = {"ns_a_key": per_key, "dim": dim, "batch": batch}
        add(
            report,
            "store.growth",
            growth,
            "x",
            must=2,
            aim=1.5,
            better="lower",
            ours=ours,
            note=f"{least} to {most} rows",
        )
    else:
        missing(report, "store.growth", "left out by --quick")


def _fetch_and_update(store: RowStore, keys: Keys, step: int) -> float:
    rows = np.empty(len(keys) * store.table.dim, np.float32)
    start = time.perf_counter()
    slots = fetch([store], [keys], [None], rows, [0], step)
    update([store], [keys], [None], rows, [0], [LR], slots)
    return time.perf_counter() - start


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
