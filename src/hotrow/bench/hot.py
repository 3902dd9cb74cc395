"""`hotrow bench hot`: DLRM on a GPU with hot rows there, against tables that are not.

26 tables with the published cardinalities of Criteo's Kaggle set (33.76M rows), keys drawn by Zipf's law with the
exponent that gives as many distinct keys in 80,000 draws as the Criteo sample has, batch 4096, row-wise Adagrad, fresh
batches. Every side trains the same DLRM on the same batches through the pipeline, reading left out: group, fetch,
forward, backward, dense step, update. The hot rows are planned within a budget from other draws than are trained on.
Every side has all its rows before the first step, as in the midst of a long run; FBGEMM's tables are always so.

    ours       hot rows in the budget on the device, the others in the host's row store (split mode, exact)
    cpu        everything on the host, all cores
    cpu_gpu    tables on the host, looked up, pooled and updated there by all cores; the dense part on the device
    staged     ours without hot rows: unique rows are staged on the device for a step, and pooled there
    fbgemm     tables in managed memory with FBGEMM's device cache of the same bytes (UVM)

Sides take turns, with a pause before each, in which the threads of the last one come to rest; a turn is timed from its
first step to the end of the last one on the device. Products on the device are TF32 on every side.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotrow import _native
from hotrow.bench import hot_auc
from hotrow.bench.hot_sides import DENSE, MODEL, Drawn, OnDevice, OnHost, Trains, fbgemm
from hotrow.bench.report import Report, add, missing, new_report
from hotrow.data.batch import Batch
from hotrow.embeddings import Embeddings
from hotrow.plan.hot import HotRows, hot_rows
from hotrow.profile.counts import KeyCounts
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.store.store import RowStore
from hotrow.table import Table

Keys = npt.NDArray[np.int64]

CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
EXPONENTS = (
    1.869, 1.685, 1.023, 1.109, 2.345, 3.0, 1.123, 2.143, 0.0, 1.193, 1.252, 1.032, 1.228, 0.0, 1.281, 1.063, 0.0,
    1.415, 1.545, 0.0, 1.044, 0.0, 3.0, 1.208, 2.973, 1.246,
)  # fmt: skip
BATCH, BUDGET, LR = 4096, 512 << 20, 0.01


def run(quick: bool = False) -> Report:
    """Takes every figure that this machine can."""
    report = new_report(
        "hot",
        {
            "tables": len(CARDINALITIES),
            "rows": sum(CARDINALITIES),
            "batch": BATCH,
            "budget_bytes": BUDGET,
            "model": f"DLRM bottom {MODEL.bottom}, top {MODEL.top}, TF32 products",
            "keys": "Zipf, exponents fitted to the Criteo sample",
            "quick": quick,
        },
        ("triton", "fbgemm-gpu"),
    )
    if not torch.cuda.is_available():
        for id in ("hot.vs_cpu", "hot.vs_cpu_gpu", "hot.vs_fbgemm_uvm"):
            missing(report, id, "there is no CUDA device here")
        hot_auc.measure(report, quick)
        return report
    missing(report, "hot.auc_gap", "hotrow bench hot_auc gives it, on a CPU")
    report["machine"]["device"] = torch.cuda.get_device_name()
    torch.set_float32_matmul_precision("high")
    for dim, suffix in ((16, ""),) if quick else ((16, ""), (64, ".dim64")):
        _measure(
            report, dim, suffix, steps=20 if quick else 60, rounds=2 if quick else 4, profiled=200 if quick else 1000
        )
    return report


def _measure(report: Report, dim: int, suffix: str, steps: int, rounds: int, profiled: int) -> None:
    draw = Draws(seed=1)
    names = [f"c{t}" for t in range(len(CARDINALITIES))]
    tables = [Table(name=name, dim=dim, optimizer=RowWiseAdagrad(lr=LR)) for name in names]
    planned = _plan(tables, draw, profiled)
    batches = [draw.batch(names) for _ in range(steps * (rounds + 1))]
    ours = OnDevice(tables, planned.plan)
    sides: dict[str, Trains] = {
        "ours": ours,
        "staged": OnDevice(tables, None),
        "cpu_gpu": OnHost(tables, "cuda", BATCH),
        "cpu": OnHost(tables, "cpu", BATCH),
    }
    for trained in (side.embeddings for side in sides.values() if isinstance(side, OnDevice | OnHost)):
        _make_rows(trained)
    try:
        sides["fbgemm"] = fbgemm(tables, CARDINALITIES, planned.memory, BATCH, LR)
    except ImportError:
        missing(report, f"hot.vs_fbgemm_uvm{suffix}", "fbgemm_gpu is not installed")
    rates = _take_turns(sides, batches, steps, rounds)
    for id, side, must, aim in (
        ("hot.vs_cpu", "cpu", 2.3, 10.0),
        ("hot.vs_cpu_gpu", "cpu_gpu", 1.52, 4.0),
        ("hot.vs_fbgemm_uvm", "fbgemm", 1.0, 1.5),
        ("hot.vs_staged", "staged", None, None),
    ):
        if side in rates:
            ratio = statistics.median(rates["ours"]) / statistics.median(rates[side])
            add(
                report,
                id + suffix,
                ratio,
                "x",
                must=must,
                aim=aim,
                ours=_said(rates["ours"]),
                baseline=_said(rates[side]),
            )
    _tell_plan(report, suffix, planned, ours)
    del sides, ours
    gc.collect()
    torch.cuda.empty_cache()


class Draws:
    """Keys of all tables, drawn by Zipf's law; which rows are hot is a fixed shuffle of each table."""

    def __init__(self, seed: int, sizes: Sequence[int] = CARDINALITIES) -> None:
        self._rng = np.random.default_rng(seed)
        self._sizes, self._cumulative = sizes, []
        for rows, exponent in zip(sizes, EXPONENTS, strict=True):
            cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
            self._cumulative.append(cumulative / cumulative[-1])

    def numbers(self, samples: int) -> list[Keys]:
        """Row numbers for each table, spread over it by a multiplication that loses none."""
        drawn = []
        for rows, cumulative in zip(self._sizes, self._cumulative, strict=True):
            ranks = np.searchsorted(cumulative, self._rng.random(samples)).astype(np.int64)
            drawn.append(np.minimum(ranks, rows - 1) * _spread(rows) % rows)
        return drawn

    def keys(self, steps: int, batch: int) -> Keys:
        """The keys of some batches: `[steps, batch, tables]`."""
        numbers = self.numbers(steps * batch)
        return np.stack([keys_of(n) for n in numbers], axis=1).reshape(steps, batch, len(numbers))

    def hottest(self, count: int) -> list[Keys]:
        """Row numbers of each table, of the `count` most probable rows over all tables."""
        chances = [np.diff(cumulative, prepend=0.0) for cumulative in self._cumulative]
        least = np.partition(np.concatenate(chances), -count)[-count]
        found = [np.flatnonzero(chance >= least).astype(np.int64) for chance in chances]
        return [ranks * _spread(rows) % rows for ranks, rows in zip(found, self._sizes, strict=True)]

    def chances(self) -> list[npt.NDArray[np.float64]]:
        """For each row of each table, by its number, how probable it is."""
        found = []
        for rows, cumulative in zip(self._sizes, self._cumulative, strict=True):
            by_number = np.empty(rows)
            by_number[np.arange(rows) * _spread(rows) % rows] = np.diff(cumulative, prepend=0.0)
            found.append(by_number)
        return found

    def batch(self, names: Sequence[str]) -> Drawn:
        numbers = self.numbers(BATCH)
        dense = torch.from_numpy(self._rng.standard_normal((BATCH, DENSE), dtype=np.float32))
        labels = torch.from_numpy((self._rng.random(BATCH) < 0.25).astype(np.float32))
        features = {name: torch.from_numpy(keys_of(n)) for name, n in zip(names, numbers, strict=True)}
        return Drawn(numbers, Batch.plain(features, dense=dense, labels=labels))


def _spread(rows: int) -> int:
    """A number without a divisor in common with `rows`, near the golden part of it."""
    spread = max(1, int(rows * 0.618))
    while np.gcd(spread, rows) != 1:
        spread += 1
    return spread


def keys_of(numbers: Keys) -> Keys:
    """Arbitrary keys for row numbers: Hotrow hashes them, where FBGEMM has dense tables."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _plan(tables: Sequence[Table], draw: Draws, batches: int) -> HotRows:
    counts = {table.name: KeyCounts() for table in tables}
    for _ in range(max(1, batches // 50)):
        for table, numbers in zip(tables, draw.numbers(50 * BATCH), strict=True):
            counts[table.name].add(keys_of(numbers))
    return hot_rows(tables, counts, BUDGET)


def _make_rows(embeddings: Embeddings) -> None:
    """Makes every row that the host may be asked for."""
    hot = embeddings.router.plan.keys_on("device")
    for (name, store), rows in zip(embeddings.router.tiers["host"].stores().items(), CARDINALITIES, strict=True):
        elsewhere = _native.KeyMap(hot.get(name, np.empty(0, np.int64)))
        for part in np.array_split(np.arange(rows), max(1, rows // 500_000)):
            keys = keys_of(part)
            assert isinstance(store, RowStore)
            store.fetch(keys[elsewhere.find(keys) < 0], 0)


def _take_turns(sides: dict[str, Trains], batches: Sequence[Drawn], steps: int, rounds: int) -> dict[str, list[float]]:
    """Samples a second of each side in each round; the first round only warms up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        mine = batches[turn * steps : (turn + 1) * steps]
        for name, train in sides.items():
            if name == "cpu" and len(mine) > 20:
                mine_now: Sequence[Drawn] = mine[:20]  # the slow side has the same batches, but not all of them
            else:
                mine_now = mine
            time.sleep(0.4)
            train(mine_now[:2])
            mine_now = mine_now[2:]
            torch.cuda.synchronize()
            start = time.perf_counter()
            train(mine_now)
            torch.cuda.synchronize()
            if turn:
                rates[name].append(len(mine_now) * BATCH / (time.perf_counter() - start))
    return rates


def _said(rates: Sequence[float]) -> dict[str, Any]:
    return {"samples_per_second": round(statistics.median(rates)), "rounds": [round(rate) for rate in rates]}


def _tell_plan(report: Report, suffix: str, planned: HotRows, ours: OnDevice) -> None:
    """How much of the budget the device took, and what share of the accesses it answered."""
    tier = ours.tier
    add(
        report,
        f"hot.budget{suffix}",
        tier.bytes / planned.memory,
        "of the budget",
        must=1.0,
        better="lower",
        ours={"device_bytes": tier.bytes, "budget_bytes": planned.memory},
        note="values, optimizer state, clocks and last uses on the device",
    )
    share = tier.hits / max(tier.lookups, 1)
    add(
        report,
        f"hot.hit_share{suffix}",
        share,
        "of accesses",
        ours={"measured": round(share, 4), "in_the_profiled_draws": round(planned.share.value, 4)},
        note="training draws keys the profile has not seen; hotrow plan predicts from held-out chunks instead",
    )
