"""The shard planner: which rows are copied to every rank or node, so that a step's exchanges take least time.

Every row begins row-wise over the world, in one copy. A copy on each node, or on each rank, saves a class of rows some
seconds a step and costs each rank some bytes. The best steps from one to the next, for each class the lower hull of
seconds over bytes, are taken by what they save a byte until the memory is full: no other choice takes less time, but
for less than the last step that did not fit. Latencies are paid by tiers and not by rows, so the choice is made for
each set of tiers, with keys deduplicated per rank and per node, and the quickest is kept.

Tables are classes of rows counted alike, never rows: 1,000 tables of 10^6 rows take seconds. Memory is that of the
fullest rank, hashing's chance included; without `extra` bytes it is what row-wise takes, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow.errors import SettingsError
from hotrow.plan.cost import NAME_BYTES, Ints, TableUse, expected_traffic, row_seconds
from hotrow.plan.plan import Plan, Share
from hotrow.plan.topology import Topology
from hotrow.plan.traffic import Dedup, Traffic, Wire, wire_bytes
from hotrow.plan.uses import Floats
from hotrow.sizes import size_text

TIERS = ("replicated", "node", "world")
_NODE, _ON, _STRAIGHT = 0, 1, 2
"""Steps: from the world to the node, from the node to every rank, from the world to every rank."""


@dataclass(frozen=True)
class Sharding:
    """Rows of each class on each tier, table by table, and what that comes to."""

    topology: Topology
    wire: Wire
    dedup: Dedup
    tables: tuple[TableUse, ...]
    held: tuple[dict[str, Ints], ...]
    extra: int
    """Bytes a rank that copies might take beside what row-wise takes."""

    @property
    def traffic(self) -> Traffic:
        """What a step is expected to exchange."""
        return expected_traffic(self.tables, _named(self.held, self.dedup), self.topology, self.wire)

    @property
    def seconds(self) -> float:
        """What a step's exchanges are expected to take."""
        return self.traffic.seconds(self.topology)

    @property
    def memory(self) -> int:
        """Bytes of the fullest rank."""
        return fullest(self.tables, self.held, self.topology)

    @property
    def row_wise_memory(self) -> int:
        """Bytes of the fullest rank with everything row-wise."""
        return fullest(self.tables, [{"world": t.keys} for t in self.tables], self.topology)

    def rows(self, tier: str) -> dict[str, int]:
        """Rows of each table on a tier."""
        return {t.table.name: int(held[tier].sum()) for t, held in zip(self.tables, self.held, strict=True)}

    def plan(self, hottest: Callable[[str, int], Ints], facts: Mapping[str, Any] | None = None) -> Plan:
        """The plan that names the copied rows; `hottest` gives a table's so many most used keys, in classes' order."""
        shares: dict[str, tuple[Share, ...]] = {}
        for table, held in zip(self.tables, self.held, strict=True):
            copied = np.flatnonzero(held["replicated"] + held["node"])
            upto = int(copied[-1]) + 1 if len(copied) else 0
            keys = hottest(table.table.name, int(table.keys[:upto].sum()))
            each = np.stack([held[tier][:upto] for tier in TIERS], axis=1).reshape(-1)
            tier_of = np.repeat(np.tile(np.arange(len(TIERS)), upto), each)
            named = [Share(tier, np.sort(keys[tier_of == at])) for at, tier in enumerate(TIERS[:2])]
            shares[table.table.name] = (*(s for s in named if s.keys is not None and len(s.keys)), Share("world"))
        about = {"dedup": self.dedup, "wire": self.wire, "topology": self.topology.model_dump(), **(facts or {})}
        return Plan(shares, {t.table.name: t.row_bytes for t in self.tables}, about)


def shard(
    tables: Sequence[TableUse],
    topology: Topology,
    *,
    extra: int | None = None,
    wire: Wire = "float32",
    dedups: Sequence[Dedup] = ("node", "rank"),
) -> Sharding:
    """The quickest choice with at most `extra` bytes a rank beside what row-wise takes; None: all the memory left."""
    everything = tuple({"world": t.keys, "node": t.keys * 0, "replicated": t.keys * 0} for t in tables)
    row_wise = Sharding(topology, wire, dedups[0], tuple(tables), everything, 0)
    room = _room(row_wise, extra)
    seconds = {
        way: [row_seconds(way, t.use, wire_bytes(t.table, wire), topology) for t in tables]
        for way in ("replicated", "node", *(f"world/{dedup}" for dedup in dedups))
    }
    best, least = row_wise, math.inf
    for dedup in dedups:
        for tiers in _sets(topology):
            choose = partial(copied, tables, topology, seconds[f"world/{dedup}"], {t: seconds[t] for t in tiers})
            held = _within(row_wise, room, choose)
            made = Sharding(topology, wire, dedup, tuple(tables), held, room)
            if tiers and not any(rows[tier].any() for rows in held for tier in tiers):
                continue  # the same as without copies
            taken = made.seconds
            if taken < least:
                best, least = made, taken
    return best


def copied(
    tables: Sequence[TableUse],
    topology: Topology,
    world: Sequence[Floats],
    costs: Mapping[str, Sequence[Floats]],
    room: float,
) -> tuple[dict[str, Ints], ...]:
    """Rows of each class on each tier: the steps that save most, within `room` bytes a rank in the mean.

    `world` are the seconds of each table's classes without copies, `costs` those on each tier that copies.
    """
    steps = _steps(tables, topology, world, costs)
    return _spread(tables, steps, _take(steps, room))


def fullest(tables: Sequence[TableUse], held: Sequence[Mapping[str, Ints]], topology: Topology) -> int:
    """Bytes of the rank that holds most: rows that hashing spreads are not spread evenly."""
    mean = variance = 0.0
    for table, rows in zip(tables, held, strict=True):
        count = {tier: int(keys.sum()) for tier, keys in rows.items()}
        named = count.get("replicated", 0) + count.get("node", 0)
        mean += named * NAME_BYTES + count.get("replicated", 0) * table.row_bytes
        for tier, places in (("node", topology.ranks), ("world", topology.size)):
            mean += count.get(tier, 0) * table.row_bytes / places
            variance += count.get(tier, 0) * table.row_bytes**2 / places * (1 - 1 / places)
    above = NormalDist().inv_cdf((topology.size - 0.375) / (topology.size + 0.25)) if topology.size > 1 else 0.0
    return math.ceil(mean + above * math.sqrt(variance))


def _room(row_wise: Sharding, extra: int | None) -> int:
    """What copies may take on each rank."""
    needed, memory = row_wise.memory, row_wise.topology.memory
    if needed > memory:
        raise SettingsError(
            f"The rows take {size_text(needed)} on each of {row_wise.topology.size} ranks even in one copy, but the "
            f"topology gives each {size_text(memory)}. Give more ranks or memory, or smaller rows."
        )
    if extra is None:
        return memory - needed
    if extra < 0:
        raise SettingsError(f"Copies cannot take {extra:,} bytes; give 0 for row-wise's own memory, or more.")
    if needed + extra > memory:
        raise SettingsError(
            f"Copies of {size_text(extra)} do not fit: rows take {size_text(needed)} of the {size_text(memory)} that "
            f"the topology gives each rank. Give at most --extra {memory - needed}."
        )
    return extra


def _sets(topology: Topology) -> list[tuple[str, ...]]:
    """The sets of tiers that copy. On one node a copy a node is the world's one; with one rank a node it is every's."""
    if topology.size == 1:
        return [()]
    if topology.nodes == 1 or topology.ranks == 1:
        return [(), ("replicated",)]
    return [(), ("replicated",), ("node",), ("replicated", "node")]


def _named(held: Sequence[Mapping[str, Ints]], dedup: Dedup) -> list[dict[str, Ints]]:
    """Rows by the names of `traffic.TIERS`; tiers without rows are left out, but for the open share's."""
    return [
        {
            f"world/{dedup}" if tier == "world" else tier: keys
            for tier, keys in rows.items()
            if tier == "world" or keys.any()
        }
        for rows in held
    ]


@dataclass
class _Steps:
    """Steps that save time: seconds and bytes a row, rows, whose, and of which kind; the best first."""

    saved: Floats
    bytes: Floats
    rows: Ints
    owner: Ints
    """The class, all tables' classes one after another."""
    kind: npt.NDArray[np.int8]


def _steps(
    tables: Sequence[TableUse], topology: Topology, world: Sequence[Floats], costs: Mapping[str, Sequence[Floats]]
) -> _Steps:
    """The steps that pay, by what they save a byte; `world` and `costs` are the seconds of each table's classes."""
    parts: list[tuple[Any, ...]] = []
    begin = 0
    for at, table in enumerate(tables):
        mine = {tier: seconds[at] for tier, seconds in costs.items()}
        for kind, saved, size in _hull(world[at], mine, table.row_bytes, topology) if mine else ():
            pays = np.flatnonzero((saved > 0) & (table.keys > 0))
            n = len(pays)
            parts.append((saved[pays], np.full(n, size), table.keys[pays], pays + begin, np.full(n, kind, np.int8)))
        begin += len(table.keys)
    if not parts:
        return _Steps(np.empty(0), np.empty(0), *(np.empty(0, np.int64),) * 2, np.empty(0, np.int8))
    gains, sizes, rows, owners, kinds = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    by = np.lexsort((kinds, -(gains / sizes)))
    return _Steps(gains[by], sizes[by], rows[by], owners[by], kinds[by])


def _hull(world: Floats, costs: Mapping[str, Floats], row: int, topology: Topology) -> list[tuple[int, Floats, float]]:
    """Steps on the lower hull of seconds over bytes: kind, seconds saved (0 where it is no step), bytes."""
    everywhere = row * (1 - 1 / topology.size) + NAME_BYTES
    if set(costs) == {"replicated"}:
        return [(_STRAIGHT, world - costs["replicated"], everywhere)]
    on_node = row * (1 / topology.ranks - 1 / topology.size) + NAME_BYTES
    first = world - costs["node"]
    if "replicated" not in costs:
        return [(_NODE, first, on_node)]
    second, both = costs["node"] - costs["replicated"], world - costs["replicated"]
    turns = first / on_node >= second / (everywhere - on_node)
    return [
        (_NODE, np.where(turns, first, 0.0), on_node),
        (_ON, np.where(turns & (first > 0), second, 0.0), everywhere - on_node),
        (_STRAIGHT, np.where(turns, 0.0, both), everywhere),
    ]


def _within(
    row_wise: Sharding, room: int, choose: Callable[[float], tuple[dict[str, Ints], ...]]
) -> tuple[dict[str, Ints], ...]:
    """What `choose` finds for the room; for less where hashing leaves one rank fuller than the others."""
    left, limit = float(room), row_wise.memory + room
    while True:
        held = choose(left)
        over = fullest(row_wise.tables, held, row_wise.topology) - limit
        if over <= 0:
            return held
        left = max(0.0, left - over)


def _take(steps: _Steps, room: float) -> Ints:
    """How many rows take each step, best first; what the next no longer fits into may still hold smaller ones."""
    taken, rows = np.zeros_like(steps.rows), steps.rows.copy()
    left = np.arange(len(rows))
    while len(left):
        small = steps.bytes[left] <= room
        _forbid(steps, rows, left[~small], 0)
        left = left[small]
        sizes = rows[left] * steps.bytes[left]
        whole = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
        taken[left[:whole]] = rows[left[:whole]]
        room -= float(sizes[:whole].sum())
        if whole < len(left):
            at = left[whole]
            taken[at] = min(int(rows[at]), int(room // steps.bytes[at]))
            room -= float(taken[at] * steps.bytes[at])
            _forbid(steps, rows, left[whole : whole + 1], int(taken[at]))
        left = left[whole + 1 :]
    return taken


def _forbid(steps: _Steps, rows: Ints, skipped: Ints, most: int) -> None:
    """No more than `most` rows go on from a node to every rank where they did not come to the node before."""
    first = skipped[steps.kind[skipped] == _NODE]
    if len(first):
        after = (steps.kind == _ON) & np.isin(steps.owner, steps.owner[first])
        rows[after] = np.minimum(rows[after], most)


def _spread(tables: Sequence[TableUse], steps: _Steps, taken: Ints) -> tuple[dict[str, Ints], ...]:
    """Rows of each class on each tier once these steps are taken."""
    begins = np.cumsum([0, *(len(t.keys) for t in tables)])
    by_kind = {
        kind: np.bincount(steps.owner[steps.kind == kind], taken[steps.kind == kind], begins[-1]).astype(np.int64)
        for kind in (_NODE, _ON, _STRAIGHT)
    }
    replicated, node = by_kind[_ON] + by_kind[_STRAIGHT], by_kind[_NODE] - by_kind[_ON]
    held = []
    for table, begin in zip(tables, begins, strict=False):
        here = slice(begin, begin + len(table.keys))
        copies = {"replicated": replicated[here], "node": node[here]}
        held.append({**copies, "world": table.keys - copies["replicated"] - copies["node"]})
    return tuple(held)
