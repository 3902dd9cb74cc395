"""Replays plans: row-wise in its three ways and the plan itself, over the same steps, beside what was expected of each.

What `hotrow simulate` shows, as plain data. Row-wise comes with every lookup, with the distinct keys of a rank and
with those of a node, so that a plan is judged by the best of them and not by the worst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hotrow.data.dataset import DataSet
from hotrow.data.steps import Step as Change
from hotrow.plan.budget import Counted
from hotrow.plan.cluster import key_batches, told_traffic, used_tables
from hotrow.plan.cost import Ints, TableUse, expected_traffic
from hotrow.plan.plan import Plan
from hotrow.plan.shard import TIERS, Sharding, shard
from hotrow.plan.simulate import Simulated, Step, simulate, whole_steps
from hotrow.plan.topology import Topology
from hotrow.plan.traffic import Dedup, Traffic, Wire
from hotrow.plan.zipf import Zipf
from hotrow.table import Table

_ROW_WISE: tuple[tuple[str, Dedup], ...] = (
    ("row-wise", "none"),
    ("rank dedup", "rank"),
    ("node dedup", "node"),
)


def replay_zipf(
    topology: Topology,
    s: float,
    rows: int,
    lookups: int,
    *,
    tables: int = 1,
    dim: int = 64,
    steps: int = 3,
    seed: int = 0,
    wire: Wire = "float32",
    extra: int | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Tables of `rows` rows of which each rank looks up so many keys a step, drawn from Zipf's law."""
    law = Zipf(s, rows)
    known = [Table(name=f"table{at}", dim=dim) for at in range(tables)]
    if plan is not None:
        plan.check(known)
    used = [law.use(table, lookups, topology) for table in known]
    random = np.random.default_rng(seed)
    drawn = [[{t.name: law.draw(random, lookups) for t in known} for _ in range(topology.size)] for _ in range(steps)]
    chosen = shard(used, topology, extra=extra, wire=wire)
    made = plan or chosen.plan(lambda _, count: np.arange(count))
    edges, _ = law.bins()

    def class_of(_: str, keys: Ints) -> Ints:
        return np.searchsorted(edges, keys[(keys >= 0) & (keys < rows)], side="right") - 1

    shown = _replayed(made, topology, drawn, known, wire, used, class_of)
    return {**shown, "keys": f"Zipf {s:g}, {tables} x {rows:,} rows of {dim}"}


def replay_data_set(
    dataset: DataSet,
    tables: Sequence[Table],
    counted: Counted,
    topology: Topology,
    batch: int,
    *,
    split: str = "train",
    changes: Sequence[Change] = (),
    steps: int = 3,
    wire: Wire = "float32",
    extra: int | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """The first steps of a data set, as the reader gives them to ranks that take `batch` samples each."""
    if plan is not None:
        plan.check(tables)
    used = used_tables(dataset, tables, counted, topology, batch, split=split, steps=changes)
    read = list(whole_steps(key_batches(dataset, split, batch, changes), topology, steps))
    chosen = shard(used, topology, extra=extra, wire=wire)
    made = plan or chosen.plan(lambda name, rows: counted.counts[name].hottest(rows)[0])
    classes = {t.table.name: np.argsort(t.counts) for t in used}
    counts = {t.table.name: t.counts for t in used}

    def class_of(name: str, keys: Ints) -> Ints:
        times = counted.counts[name].of(keys)
        at = np.searchsorted(counts[name], times[times > 0], sorter=classes[name])
        return classes[name][at]

    shown = _replayed(made, topology, read, tables, wire, used, class_of)
    return {**shown, "keys": f"{dataset.path}, split {split}, {batch:,} samples a rank"}


def held_rows(
    plan: Plan, used: Sequence[TableUse], class_of: Callable[[str, Ints], Ints]
) -> tuple[dict[str, Ints], ...]:
    """How many rows of each class each tier has in a plan; `class_of` gives the classes of those keys it knows."""
    out = []
    for table in used:
        held = {tier: np.zeros_like(table.keys) for tier in TIERS}
        for share in plan.shares[table.table.name]:
            if share.keys is not None and share.tier in held:
                held[share.tier] = np.bincount(class_of(table.table.name, share.keys), minlength=len(table.keys))
        held["world"] = table.keys - held["replicated"] - held["node"]
        out.append(held)
    return tuple(out)


def _replayed(
    plan: Plan,
    topology: Topology,
    steps: Sequence[Step],
    tables: Sequence[Table],
    wire: Wire,
    used: Sequence[TableUse],
    class_of: Callable[[str, Ints], Ints],
) -> dict[str, Any]:
    dedup_of: Dedup = plan.facts.get("dedup", "node")
    planned = Sharding(topology, wire, dedup_of, tuple(used), held_rows(plan, used, class_of), 0)
    whole = Plan.all_on("world", tables)
    rows = []
    for name, dedup in _ROW_WISE:
        found = simulate(whole, topology, steps, tables, wire=wire, dedup=dedup)
        model = expected_traffic(used, [{f"world/{dedup}": t.keys} for t in used], topology, wire)
        rows.append((name, found, model, planned.row_wise_memory))
    found = simulate(plan, topology, steps, tables, wire=wire, dedup=dedup_of)
    rows.append(("this plan", found, planned.traffic, planned.memory))
    first = rows[0][1]
    copies = {tier: sum(len(k) for k in plan.keys_on(tier).values()) for tier in TIERS[:2]}
    return {
        "topology": topology.model_dump(),
        "wire": wire,
        "steps": len(steps),
        "lookups": float(np.mean([sum(len(k) for k in rank.values()) for step in steps for rank in step])),
        "dedup": dedup_of,
        "copies": copies,
        "memory": {"row_wise": planned.row_wise_memory, "plan": planned.memory, "limit": topology.memory},
        "compare": [_row(*row, first, topology) for row in rows],
    }


def _row(
    name: str, found: Simulated, expected: Traffic, size: int, first: Simulated, topology: Topology
) -> dict[str, Any]:
    told = told_traffic(found.traffic, topology)
    return {
        "name": name,
        **told,
        "seconds": found.seconds,
        "memory": size,
        "saved": 1 - found.traffic.between / first.traffic.between if first.traffic.between else 0.0,
        "faster": first.seconds / max(found.seconds, 1e-12),
        "error": _error(found, expected, topology),
    }


def _error(found: Simulated, expected: Traffic, topology: Topology) -> dict[str, float]:
    def off(said: float, true: float) -> float:
        return said / true - 1 if true else 0.0

    return {
        "between": off(expected.between, found.traffic.between),
        "within": off(expected.within, found.traffic.within),
        "seconds": off(expected.seconds(topology), found.seconds),
    }
