"""The cost model: what a row costs on each tier, and what a whole plan costs, in expectation over the accesses.

FlexShard's cost of a row used c times holds for rows used by everyone; most rows are used by few ranks of a step or
none. So every count of `traffic.legs` is an expectation over `Use`: distinct keys of a rank, of a node, of the world.

Owners are drawn by a hash, so loads differ by chance: the busiest of R ranks is expected at the mean and as many
standard deviations above as the largest of R normal values has. The few hundred hottest rows of a table, which make
most of that deviation, are put on the owners they really have where their keys are known.

What it shows, against the common belief: with keys deduplicated per node a row that t nodes use costs at most
(t - 1)(8 + 2D) bytes between nodes, and the gradients of copies on every node never cost less, for each node's must
reach all others. So copies pay where keys are deduplicated per rank only, or where latency counts more than bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from hotrow.plan.topology import Topology
from hotrow.plan.traffic import (
    KEY_BYTES,
    LANES,
    WAYS,
    Exchange,
    Leg,
    Route,
    Traffic,
    Wire,
    count_bytes,
    legs,
    owners,
    wire_bytes,
)
from hotrow.plan.uses import Floats, Use
from hotrow.table import Table

Ints = npt.NDArray[np.int64]

NAME_BYTES = 18
"""What a key that a plan names takes on every rank, in the router's map: 15 to 18 bytes."""
HOT = 256
"""Most used rows of a table whose owners are looked up."""
COLUMNS = 4
"""Values of a row that a rank holds at least where tables are cut by columns."""


UNUSED = np.ones(1, np.int64), np.zeros(1, np.int64)  # counts and keys of a table that nothing used: a class of no rows


@dataclass(frozen=True)
class TableUse:
    """A table in classes of rows used alike: how many rows each class has, and their use in a step.

    `counts` tells classes apart, the most used first; `bags` are a rank's pooled bags of the table in a step, and
    `pooled` the share of its lookups that are in them. `hot` are the most used keys, in the order of their classes.
    """

    table: Table
    row_bytes: int
    counts: Ints
    keys: Ints
    use: Use
    bags: float = 0.0
    pooled: float = 0.0
    hot: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def rows(self) -> int:
        return int(self.keys.sum())

    @property
    def lookups(self) -> float:
        """A rank's lookups in a step."""
        return float((self.keys * self.use.lookups).sum())


def units(route: Route, use: Use, topology: Topology) -> tuple[Floats, Floats]:
    """Entries that a row of each class adds to a route, all ranks together: within nodes, and between them."""
    n, g, size = topology.nodes, topology.ranks, topology.size
    none = np.zeros_like(use.rank)
    if route == "lookups":
        return size * use.lookups * (1 / n - 1 / size), size * use.lookups * (1 - 1 / n)
    if route == "ranks":
        return size * use.rank * (1 / n - 1 / size), size * use.rank * (1 - 1 / n)
    if route == "mates":
        return size * use.rank * (1 - 1 / g), none
    if route == "owners":
        return none, n * use.node * (1 - 1 / n)
    if route == "sums":
        return none, n * use.node * (n - 1)
    if route == "copies":
        return none, use.world * (n - 1)
    return use.world * n * (g - 1), none


def row_seconds(tier: str, use: Use, row: int, topology: Topology) -> Floats:
    """What one row of each class adds to a step's exchanges, with rows of `row` bytes on the wire."""
    carried: dict[Route, int] = {}
    for leg in legs(tier, topology):
        carried[leg.route] = carried.get(leg.route, 0) + leg.entry_bytes(row)
    total = np.zeros_like(use.rank)
    for route, entry in carried.items():
        times = []
        for link, places, entries in zip(
            topology.links(LANES[route]),
            (topology.size, topology.nodes),
            units(route, use, topology),
            strict=True,
        ):
            if link is not None and entries.any():
                times.append(entries * (link.carrying(entry) / places))
        if times:  # both links carry at once, and which is slower is the same for all rows
            total += np.maximum.reduce(times) if len(times) > 1 else times[0]
    return total


_EVERYWHERE: tuple[Route, ...] = ("mates", "spread", "sums")
"""Routes on which every node does its own part of a row's work."""


class _Entries:
    """Of a table's rows on one route: entries in all, those of hot rows where they are, the variance of the others."""

    def __init__(self, route: Route, table: TableUse, keys: Ints, hot: _Hot, topology: Topology) -> None:
        within, between = units(route, table.use, topology)
        self.at_rank, self.at_node = hot.loads(within, between, route, topology)
        everywhere = topology.nodes if route in _EVERYWHERE else 1
        rest = keys - hot.rows
        self.within, self.rank_variance = _summed(keys, rest, within, topology.size, everywhere)
        self.between, self.node_variance = _summed(keys, rest, between, topology.nodes, everywhere)


class _Load:
    """Bytes of one exchange: as `_Entries`, of all tables."""

    def __init__(self, topology: Topology) -> None:
        self.within = self.between = self.rank_variance = self.node_variance = 0.0
        self.at_rank, self.at_node = np.zeros(topology.size), np.zeros(topology.nodes)

    def add(self, entries: _Entries, each: int) -> None:
        """Adds entries of so many bytes each."""
        self.within += each * entries.within
        self.between += each * entries.between
        self.at_rank += each * entries.at_rank
        self.at_node += each * entries.at_node
        self.rank_variance += each * each * entries.rank_variance
        self.node_variance += each * each * entries.node_variance

    def exchange(self, tier: str, leg: Leg) -> Exchange:
        rank = _busiest(self.within, self.at_rank, self.rank_variance)
        node = _busiest(self.between, self.at_node, self.node_variance)
        return Exchange(tier, leg.name, leg.lane, self.within, self.between, rank, node)


class _Hot:
    """The hottest rows that a tier has of a table: their classes and owners, and how many there are in each class."""

    def __init__(self, table: TableUse, held: Mapping[str, Ints], tier: str, topology: Topology) -> None:
        upto = int(np.searchsorted(np.cumsum(table.keys), len(table.hot), side="left")) + 1
        order = sorted(held, key=lambda name: ("replicated", "node", name).index(name))
        each = np.stack([held[name][:upto] for name in order], axis=1).reshape(-1)
        classes = np.repeat(np.arange(len(table.keys[:upto])), table.keys[:upto])[: len(table.hot)]
        tiers = np.repeat(np.tile(np.arange(len(order)), len(each) // len(order)), each)[: len(table.hot)]
        mine = tiers == order.index(tier)
        self.classes, self.owner = classes[mine], owners(table.hot[mine], topology.size)
        self.rows = np.bincount(self.classes, minlength=len(table.keys))

    def loads(self, within: Floats, between: Floats, route: Route, topology: Topology) -> tuple[Floats, Floats]:
        """Bytes at each rank and each node."""
        near, far = within[self.classes], between[self.classes]
        if route not in _EVERYWHERE:
            at_rank: Floats = np.bincount(self.owner, near, topology.size).astype(np.float64)
            return at_rank, np.bincount(self.owner // topology.ranks, far, topology.nodes).astype(np.float64)
        mates = np.bincount(self.owner % topology.ranks, near / topology.nodes, topology.ranks)
        return np.tile(mates, topology.nodes), np.full(topology.nodes, far.sum() / topology.nodes)


def _summed(keys: Ints, rest: Ints, entries: Floats, places: int, everywhere: int) -> tuple[float, float]:
    """All entries; and the variance of those of `rest` at one of `places`, where rows are, and are used, by chance."""
    if not entries.any():
        return 0.0, 0.0
    each = entries / everywhere
    return float(keys @ entries), float(rest @ (each * each + each)) * everywhere / places


def _busiest(total: float, known: Floats, variance: float) -> float:
    """The most that one place is expected to have: what is `known` of each, and its part of the rest by chance."""
    places = len(known)
    if places == 1:
        return total
    even = (total - float(known.sum())) / places
    above = NormalDist().inv_cdf((places - 0.375) / (places + 0.25)) * math.sqrt(variance * (1 - 1 / places))
    spread = float(known.std())
    return min(total, even + max(float(known.max()), float(known.mean()) + math.hypot(above, spread)))


def expected_traffic(
    tables: Sequence[TableUse], held: Sequence[Mapping[str, Ints]], topology: Topology, wire: Wire
) -> Traffic:
    """What a step is expected to exchange, where `held` says for each table how many rows of each class a tier has.

    Tiers are named as in `traffic.WAYS`. A tier that no table has rows on exchanges nothing.
    """
    loads: dict[tuple[str, int], _Load] = {}
    users: dict[str, int] = {}
    for table, rows in zip(tables, held, strict=True):
        row = wire_bytes(table.table, wire)
        for tier, keys in rows.items():
            users[tier] = users.get(tier, 0) + 1
            hot = _Hot(table, rows, tier, topology)
            routes = {leg.route for leg in legs(tier, topology)}
            entries = {route: _Entries(route, table, keys, hot, topology) for route in routes}
            for at, leg in enumerate(legs(tier, topology)):
                if (tier, at) not in loads:
                    loads[tier, at] = _Load(topology)
                loads[tier, at].add(entries[leg.route], leg.entry_bytes(row))
    return Traffic(
        tuple(
            _exchange(leg, loads[tier, at], tier, users[tier], topology)
            for tier in WAYS
            for at, leg in enumerate(legs(tier, topology) if tier in users else ())
        )
    )


def _exchange(leg: Leg, load: _Load, tier: str, tables: int, topology: Topology) -> Exchange:
    if not leg.counts:
        return load.exchange(tier, leg)
    within, between = count_bytes(leg.route, tables, topology)
    return Exchange(tier, leg.name, leg.lane, within, between, within / topology.size, between / topology.nodes)


def table_wise(tables: Sequence[TableUse], topology: Topology, wire: Wire) -> tuple[Traffic, float]:
    """Each table whole on one rank, the largest load first to the least loaded; and the fullest rank's memory.

    A pooled bag comes back as one row. Keys are not deduplicated.
    """
    loads = {what: np.zeros(topology.size) for what in ("keys", "rows", "memory")}
    least = [(0.0, rank) for rank in range(topology.size)]
    for table in sorted(tables, key=lambda t: -_answer(t, wire)):
        load, rank = heapq.heappop(least)
        heapq.heappush(least, (load + _answer(table, wire), rank))
        loads["rows"][rank] += topology.size * _answer(table, wire)
        loads["keys"][rank] += topology.size * table.lookups * KEY_BYTES
        loads["memory"][rank] += table.rows * table.row_bytes
    exchanges = (
        _owned("keys", loads["keys"], topology),
        _owned("rows", loads["rows"], topology),
        _owned("gradients", loads["rows"], topology),
    )
    return Traffic(exchanges), float(loads["memory"].max())


def _answer(table: TableUse, wire: Wire) -> float:
    """Bytes of rows that one rank is sent of a table in a step: its sequences' rows, and its bags."""
    return (table.lookups * (1 - table.pooled) + table.bags) * wire_bytes(table.table, wire)


def _owned(name: str, loads: Floats, topology: Topology) -> Exchange:
    """An exchange of which each rank has a load of its own, used evenly by all ranks."""
    within = loads * (1 / topology.nodes - 1 / topology.size)
    between = loads.reshape(topology.nodes, topology.ranks).sum(axis=1) * (1 - 1 / topology.nodes)
    near, far = (float(within.sum()), float(within.max())), (float(between.sum()), float(between.max()))
    return Exchange("table", name, "world", near[0], far[0], near[1], far[1])


def column_wise(tables: Sequence[TableUse], topology: Topology, wire: Wire) -> tuple[Traffic, float]:
    """Each table cut by columns over as many ranks as its dim allows; and the memory of a rank.

    Every slice is asked for with all keys, so keys travel as often as there are slices.
    """
    keys = rows = memory = 0.0
    for table in tables:
        slices = min(topology.size, math.ceil(table.table.dim / COLUMNS))
        keys += topology.size * table.lookups * KEY_BYTES * slices
        rows += topology.size * _answer(table, wire)
        index = 16 * (slices - 1)
        memory += table.rows * (table.row_bytes + index) / topology.size
    exchanges = []
    for name, load in (("keys", keys), ("rows", rows), ("gradients", rows)):
        within, between = load * (1 / topology.nodes - 1 / topology.size), load * (1 - 1 / topology.nodes)
        busiest = within / topology.size, between / topology.nodes
        exchanges.append(Exchange("column", name, "world", within, between, *busiest))
    return Traffic(tuple(exchanges)), memory
