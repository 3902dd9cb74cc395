"""Plans a data set for a topology: its use by ranks, the choice, what each exchange will carry, and why.

Counts come as for a budget: from the profile beside the data set, or from a sample. How uses of a row come together
is read off the first steps in the reader's own order. What is told is plain data, for `--json`, the terminal and the
picture alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hotrow.data.dataset import DataSet
from hotrow.data.reader import Reader
from hotrow.data.steps import Step
from hotrow.errors import SettingsError
from hotrow.plan.budget import Counted
from hotrow.plan.cost import HOT, UNUSED, Ints, TableUse, column_wise, expected_traffic, row_seconds, table_wise
from hotrow.plan.plan import Plan, row_bytes
from hotrow.plan.shard import TIERS, Sharding, fullest, shard
from hotrow.plan.topology import Topology, time_text
from hotrow.plan.traffic import Dedup, Traffic, Wire, wire_bytes
from hotrow.plan.uses import Use, measured_bursts
from hotrow.profile.counts import KeyCounts
from hotrow.profile.sample import Chunk
from hotrow.table import Feature, Table

READ = 200_000
"""Samples that are read to see how uses of a row come together."""
_POINTS = 200


def key_batches(dataset: DataSet, split: str, batch: int, steps: Sequence[Step] = ()) -> Iterator[Mapping[str, Ints]]:
    """The keys of each table in successive batches of an epoch, in the order training reads them."""
    reader = Reader(dataset, split, batch, steps=steps)
    table_of = {f.name: f.table for f in reader.schema.features}
    for read in reader:
        yield Chunk.of(read, table_of).keys


def used_tables(
    dataset: DataSet,
    tables: Sequence[Table],
    counted: Counted,
    topology: Topology,
    batch: int,
    *,
    split: str = "train",
    steps: Sequence[Step] = (),
    features: Sequence[Feature] = (),
) -> list[TableUse]:
    """How each table is used in a step in which every rank takes `batch` samples."""
    samples = dataset.samples(split)
    if counted.sampled:
        raise SettingsError("A plan for a topology counts all keys: a sample misses the rare ones. Leave out --sample.")
    if samples < batch * topology.size:
        raise SettingsError(
            f"A step of {topology.size:,} ranks with {batch:,} samples each takes {batch * topology.size:,}, but the "
            f'split "{split}" of {dataset.path} has {samples:,}. Give a smaller --batch-size.'
        )
    some = max(1, min(READ, samples) // batch)
    read = [keys for _, keys in zip(range(some), key_batches(dataset, split, batch, steps), strict=False)]
    known = {table.name: counted.counts[table.name] for table in tables}
    if not any(counts.total for counts in known.values()):
        raise SettingsError("The profile has counted no access of any table, so there is nothing to plan.")
    bursts = measured_bursts(read, known, samples, batch, topology)
    pooled = {f.name for f in features if f.pooling != "sequence"}
    of_bags = _pooled(dataset, split, batch, steps, pooled)
    out = []
    for table in tables:
        counts, keys = _classes(known[table.name])
        use = Use.of_counts(counts, samples, batch, topology, bursts[table.name])
        hot, _ = known[table.name].hottest(HOT)
        out.append(TableUse(table, row_bytes(table), counts, keys, use, *of_bags[table.name], hot=hot))
    return out


def _pooled(
    dataset: DataSet, split: str, batch: int, steps: Sequence[Step], pooled: Collection[str]
) -> dict[str, tuple[float, float]]:
    """For each table a rank's pooled bags in a step, and the share of its lookups in them: as in the first batch."""
    reader = Reader(dataset, split, batch, steps=steps, threads=0)
    first = next(iter(reader)).expand()
    bags: dict[str, float] = {}
    lookups: dict[tuple[str, bool], int] = {}
    for feature in reader.schema.features:
        table, is_pooled = feature.table, feature.name in pooled
        bags[table] = bags.get(table, 0.0) + batch * is_pooled
        lookups[table, is_pooled] = lookups.get((table, is_pooled), 0) + len(first[feature.name].values)
    return {
        table: (n, lookups.get((table, True), 0) / max(1, sum(lookups.get((table, p), 0) for p in (True, False))))
        for table, n in bags.items()
    }


def _classes(known: KeyCounts) -> tuple[Ints, Ints]:
    """Counts and keys of a table; keys that a summary no longer keeps are alike, and share what it lost."""
    counts, keys = known.histogram()
    if len(counts) == 0:
        return UNUSED
    missing, lost = known.distinct - known.kept, known.total - int((counts * keys).sum())
    if missing > 0:
        counts, keys = np.append(counts, max(1, lost // missing)), np.append(keys, missing)
    return counts, keys


def plan_for_topology(
    tables: Sequence[TableUse],
    counts: Mapping[str, KeyCounts],
    topology: Topology,
    *,
    extra: int | None = None,
    wire: Wire = "float32",
    dedups: Sequence[Dedup] = ("node", "rank"),
    compare: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan, and all that is known of it as plain data; `dedups` are the ways of deduplicating it may choose."""
    chosen = shard(tables, topology, extra=extra, wire=wire, dedups=dedups)
    told = {**(facts or {}), **told_sharding(chosen)}
    plan = chosen.plan(lambda name, rows: counts[name].hottest(rows)[0], told)
    shown = {**told, "curve": {t.table.name: _curve(t) for t in tables}}
    if compare:
        shown["compare"] = compared(chosen)
    return plan, shown


def told_sharding(chosen: Sharding) -> dict[str, Any]:
    """What a choice of tiers comes to."""
    topology, traffic = chosen.topology, chosen.traffic
    return {
        "topology": topology.model_dump(),
        "wire": chosen.wire,
        "dedup": chosen.dedup,
        "memory": {
            "row_wise": chosen.row_wise_memory,
            "plan": chosen.memory,
            "extra": chosen.extra,
            "limit": topology.memory,
        },
        "traffic": told_traffic(traffic, topology),
        "exchanges": [
            {
                "tier": e.tier,
                "name": e.name,
                "within": round(e.within),
                "between": round(e.between),
                "seconds": e.seconds(topology),
            }
            for e in traffic.exchanges
        ],
        "tables": {t.table.name: _told_table(chosen, at) for at, t in enumerate(chosen.tables)},
    }


def told_traffic(traffic: Traffic, topology: Topology) -> dict[str, float]:
    """Bytes of a step over each kind of link, what they take, and how unevenly they fall."""
    return {
        "within": round(traffic.within),
        "between": round(traffic.between),
        "seconds": traffic.seconds(topology),
        "imbalance": traffic.imbalance(topology),
    }


def compared(chosen: Sharding) -> list[dict[str, Any]]:
    """The plan beside what others would do, each with bytes a step, time, memory of the fullest rank and imbalance."""
    tables, topology, wire = chosen.tables, chosen.topology, chosen.wire
    row_wise = fullest(tables, [{"world": t.keys} for t in tables], topology)
    dedups: tuple[tuple[str, Dedup], ...] = (
        ("row-wise", "none"),
        ("rank dedup", "rank"),
        ("node dedup", "node"),
    )
    found = [
        (name, expected_traffic(tables, [{f"world/{dedup}": t.keys} for t in tables], topology, wire), row_wise)
        for name, dedup in dedups
    ]
    for name, (traffic, memory) in (
        ("table-wise", table_wise(tables, topology, wire)),
        ("column-wise", column_wise(tables, topology, wire)),
    ):
        found.append((name, traffic, round(memory)))
    found.append(("this plan", chosen.traffic, chosen.memory))
    first = found[0][1]
    return [
        {
            "name": name,
            **told_traffic(traffic, topology),
            "memory": memory,
            "saved": 1 - traffic.between / first.between if first.between else 0.0,
            "faster": first.seconds(topology) / max(traffic.seconds(topology), 1e-12),
        }
        for name, traffic, memory in found
    ]


def _told_table(chosen: Sharding, at: int) -> dict[str, Any]:
    table, held = chosen.tables[at], chosen.held[at]
    lookups = max(table.lookups, 1e-300)
    tiers = {}
    for tier in TIERS:
        here = np.flatnonzero(held[tier])
        tiers[tier] = {
            "rows": int(held[tier].sum()),
            "least": int(table.counts[here[-1]]) if len(here) else None,
            "share": float((held[tier] * table.use.lookups).sum()) / lookups,
        }
    return {
        "rows": table.rows,
        "row_bytes": table.row_bytes,
        "lookups": table.lookups,
        "tiers": tiers,
        "why": why(chosen, at),
    }


def why(chosen: Sharding, at: int) -> str:
    """In a sentence, what decided over a table's cuts."""
    table, held, topology = chosen.tables[at], chosen.held[at], chosen.topology
    if not table.rows:
        return "No access of it was counted."
    row = wire_bytes(table.table, chosen.wire)
    names = {"world": f"world/{chosen.dedup}", "node": "node", "replicated": "replicated"}
    seconds = {tier: row_seconds(name, table.use, row, topology) for tier, name in names.items()}
    copied = held["replicated"] + held["node"]
    last = np.flatnonzero(copied)
    if len(last):
        tier = "replicated" if held["replicated"][last[-1]] else "node"
        edge, saved = last[-1], seconds["world"] - seconds[tier]
        full = copied.sum() < table.keys[saved > 0].sum()
        end = "there the memory ends" if full else "below that a copy costs more than it saves"
        return (
            f"{int(copied.sum()):,} rows pay for copies: the last of them is used by {_users(table, edge, topology)} "
            f"and saves {saved[edge] * 1e9:,.1f} ns a step; {end}."
        )
    if topology.size == 1:
        return "There is one rank, so nothing is exchanged."
    best = min(("replicated", "node"), key=lambda tier: float(seconds[tier][0]))
    saved = np.maximum(seconds["world"] - np.minimum(seconds["node"], seconds["replicated"]), 0.0)
    if saved[0] <= 0:
        return (
            f"No row pays for a copy: the most used, by {_users(table, 0, topology)}, takes "
            f"{seconds['world'][0] * 1e9:,.1f} ns a step here and {seconds[best][0] * 1e9:,.1f} on {best}."
        )
    if chosen.extra < table.row_bytes / topology.ranks:
        return (
            f"Copies would save up to {time_text(float(saved @ table.keys))} a step, but there is no memory for them."
        )
    return (
        f"Copies would save at most {time_text(float(saved @ table.keys))} a step; with all tables' that is less than "
        f"what the exchanges of their gradients take more."
    )


def _users(table: TableUse, at: int, topology: Topology) -> str:
    ranks, nodes = topology.size * table.use.rank[at], topology.nodes * table.use.node[at]
    return f"{ranks:.2g} of {topology.size} ranks and {nodes:.2g} of {topology.nodes} nodes a step"


def _curve(table: TableUse) -> dict[str, list[float]]:
    """As many points of a table's access curve as an eye can tell apart."""
    rows, taken = np.cumsum(table.keys), np.cumsum(table.keys * table.use.lookups)
    at = np.unique(
        np.minimum(np.searchsorted(rows, np.geomspace(max(rows[0], 1), max(rows[-1], 1), _POINTS)), len(rows) - 1)
    )
    return {"rows": rows[at].tolist(), "share": (taken[at] / max(taken[-1], 1e-300)).tolist()}
