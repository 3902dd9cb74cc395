"""What travels in a step: the exchanges of each tier, over which links they go, and how long they take.

One function, `legs`, says what the tiers do; the cost model puts expected counts into it and the simulation counts of
real batches, so the two differ by chance alone. With N nodes of g ranks, G = N g, a row has one owner among the
world's ranks, and a mate on each node: the rank whose number in its node is the owner's.

    lookups   a rank's every lookup, to the owner                       (row-wise, nothing deduplicated)
    ranks     a rank's every distinct key, to the owner
    mates     a rank's every distinct key, to the mate on its node      (within nodes only)
    owners    a node's every distinct key, from the mate to the owner   (between nodes only)
    sums      a node's every distinct key, from the mate to all others  (between nodes only)
    copies    a key that anyone used, from the owner to all its mates   (between nodes only)
    spread    a key that anyone used, from each mate to its node        (within nodes only)

The first two go over a lane of the world, those within nodes over lanes of nodes, those between nodes over rails
(`LANES`). From that follow the links whose time an exchange takes.

A key is 8 bytes, a row or gradient dim times the width on the wire (2 bytes more in float16, its exponent). Ahead of
each list of keys go, from every rank to every other, what is done, the step and a count for each table: 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.plan.topology import Topology
from hotrow.table import Table
from hotrow.world import LaneKind

Ints = npt.NDArray[np.int64]
Wire = Literal["float32", "bfloat16", "float16"]
Dedup = Literal["none", "rank", "node"]
Route = Literal["lookups", "ranks", "mates", "owners", "sums", "copies", "spread"]

LANES: dict[Route, LaneKind] = {
    "lookups": "world",
    "ranks": "world",
    "mates": "node",
    "owners": "rail",
    "sums": "rail",
    "copies": "rail",
    "spread": "node",
}
"""The kind of lane that each route goes over."""
KEY_BYTES = 8
COUNT_BYTES = 8
HEAD = 2
"""Numbers that go ahead of the counts of each table."""


class Leg(NamedTuple):
    """One exchange of a tier: the route it goes, and what each entry carries. `back` is against the route."""

    name: str
    route: Route
    key: bool = False
    row: bool = False
    counts: bool = False
    back: bool = False

    @property
    def lane(self) -> LaneKind:
        return LANES[self.route]

    def entry_bytes(self, row: int) -> int:
        """Bytes of one entry, with rows of `row` bytes on the wire."""
        return KEY_BYTES * self.key + row * self.row


def _asked(route: Route) -> tuple[Leg, ...]:
    """Keys go out over one route, rows come back and gradients go out."""
    return (
        Leg("counts", route, counts=True),
        Leg("keys", route, key=True),
        Leg("rows", route, row=True, back=True),
        Leg("gradients", route, row=True),
    )


_BY_NODE = (
    Leg("counts in nodes", "mates", counts=True),
    Leg("keys in nodes", "mates", key=True),
    Leg("counts", "owners", counts=True),
    Leg("keys", "owners", key=True),
    Leg("rows", "owners", row=True, back=True),
    Leg("rows in nodes", "mates", row=True, back=True),
    Leg("gradients in nodes", "mates", row=True),
    Leg("gradients", "owners", row=True),
)
_SWAPPED = (
    Leg("counts of sums", "sums", counts=True),
    Leg("sums", "sums", key=True, row=True),
)
_SUMMED = (
    Leg("counts", "owners", counts=True),
    Leg("keys and gradients", "owners", key=True, row=True),
    Leg("counts of sums", "copies", counts=True),
    Leg("sums", "copies", key=True, row=True),
)
_TO_MATES = (
    Leg("counts in nodes", "mates", counts=True),
    Leg("keys and gradients in nodes", "mates", key=True, row=True),
)
_FROM_MATES = (
    Leg("counts of sums in nodes", "spread", counts=True),
    Leg("sums in nodes", "spread", key=True, row=True),
)
_WORLD: dict[str, tuple[Leg, ...]] = {
    "world/none": _asked("lookups"),
    "world/rank": _asked("ranks"),
    "world/node": _BY_NODE,
}
WAYS = (*_WORLD, "node", "replicated")
"""How a row can be reached from other ranks: the tiers, "world/..." by how its keys are deduplicated."""


def legs(tier: str, topology: Topology) -> tuple[Leg, ...]:
    """The exchanges of a tier in a step, fetch and update.

    Two nodes swap their sums; of more, the owner's sums for all, which is less.
    """
    over_nodes = _SWAPPED if topology.nodes == 2 else _SUMMED
    if tier == "node":
        return (*(leg._replace(name=f"{leg.name} in nodes") for leg in _asked("mates")), *over_nodes)
    if tier == "replicated":
        return (*_TO_MATES, *over_nodes, *_FROM_MATES)
    return _WORLD[tier]


def owners(keys: Ints, ranks: int) -> Ints:
    """The rank that owns each key's row in a world of so many, as `native/owners.hpp` has it."""
    hashed = _native.hash_keys(np.ascontiguousarray(keys, np.int64))
    return (hashed >> np.uint64(12)).astype(np.uint32).astype(np.int64) % ranks


def wire_bytes(table: Table, wire: Wire) -> int:
    """What one row or gradient of `table` takes on the wire."""
    return {"float32": 4 * table.dim, "bfloat16": 2 * table.dim, "float16": 2 * (table.dim + 1)}[wire]


def count_bytes(route: Route, tables: int, topology: Topology) -> tuple[float, float]:
    """Bytes of the counts that go ahead of a list of keys over a route: within nodes, and between them."""
    within, between = _pairs(route, topology)
    each = COUNT_BYTES * (HEAD + tables)
    return float(each * within), float(each * between)


def _pairs(route: Route, topology: Topology) -> tuple[int, int]:
    """Pairs of ranks that exchange over a route: those of one node, and those of two."""
    n, g, all_ranks = topology.nodes, topology.ranks, topology.size
    lane = LANES[route]
    within = 0 if lane == "rail" else all_ranks * (g - 1)
    return within, {"world": all_ranks * (all_ranks - g), "node": 0, "rail": all_ranks * (n - 1)}[lane]


@dataclass(frozen=True)
class Exchange:
    """One exchange of all ranks: bytes over each kind of link, and those of the busiest rank and node."""

    tier: str
    name: str
    lane: LaneKind
    within: float
    between: float
    busiest_rank: float
    """The most that one rank sends to, or takes from, the others of its node."""
    busiest_node: float
    """The most that one node sends to, or takes from, the others."""

    def seconds(self, topology: Topology) -> float:
        return topology.seconds(self.busiest_rank, self.busiest_node, self.lane)

    def between_with_headers(self, topology: Topology) -> float:
        """Bytes between nodes as the interfaces count them."""
        _, far = topology.links(self.lane)
        return self.between * (1 + far.overhead) if far is not None else 0.0


@dataclass(frozen=True)
class Traffic:
    """All exchanges of a step."""

    exchanges: tuple[Exchange, ...]

    @property
    def within(self) -> float:
        """Bytes that ranks send to others of their node."""
        return sum(e.within for e in self.exchanges)

    @property
    def between(self) -> float:
        """Bytes that nodes send to others."""
        return sum(e.between for e in self.exchanges)

    def between_with_headers(self, topology: Topology) -> float:
        """Bytes that nodes send to others, as their interfaces count them."""
        return sum(e.between_with_headers(topology) for e in self.exchanges)

    def seconds(self, topology: Topology) -> float:
        """What the exchanges take one after the other."""
        return sum(e.seconds(topology) for e in self.exchanges)

    def imbalance(self, topology: Topology) -> float:
        """How much more the busiest node, or with one node the busiest rank, has than all have on average."""
        if topology.nodes > 1:
            return _ratio(sum(e.busiest_node for e in self.exchanges), self.between / topology.nodes)
        return _ratio(sum(e.busiest_rank for e in self.exchanges), self.within / topology.size)

    @staticmethod
    def mean(steps: Iterable[Traffic]) -> Traffic:
        """The mean of several steps with the same exchanges."""
        seen = list(steps)
        rows = zip(*(t.exchanges for t in seen), strict=True)
        return Traffic(tuple(_mean(row) for row in rows))


def _mean(row: tuple[Exchange, ...]) -> Exchange:
    n = len(row)
    within, between = sum(e.within for e in row) / n, sum(e.between for e in row) / n
    rank, node = sum(e.busiest_rank for e in row) / n, sum(e.busiest_node for e in row) / n
    return Exchange(row[0].tier, row[0].name, row[0].lane, within, between, rank, node)


def _ratio(busiest: float, mean: float) -> float:
    return busiest / mean if mean else 1.0
