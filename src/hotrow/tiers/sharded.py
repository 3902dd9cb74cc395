"""The sharded tier: each row on one rank of the world, or on one rank of every node (FlexShard's cold and middle rows).

A key's owner is its hash modulo the ranks. What travels for a batch, W ranks on N nodes, row bytes D:

| scope | dedup | fetch | update |
| --- | --- | --- | --- |
| world | none | every lookup's key to its owner, its row back | a gradient for each lookup |
| world | rank | each key of a rank once | a gradient for each |
| world | node | to the node-mate with the owner's place, each key of a node once over the slow link | the node's sum |
| node | | within the node only | summed in the node, then touched rows between the nodes' owners |

"none" is what row-wise sharding of sequences does, kept to compare with: the first lookup of a row carries the rank's
sum, the others zeros. Copies of `scope="node"` exchange touched rows with their keys: on two nodes each sends its sums
to the other; on more the owner's node sums them and spreads the result, 2(N - 1)(8 + D) bytes a row at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from hotrow.errors import SettingsError, nearest
from hotrow.table import Table
from hotrow.tiers.collective import CollectiveTier, Device, NamedKeys, rules
from hotrow.tiers.hops import Route, WireFormat
from hotrow.tiers.lanes import Lanes
from hotrow.tiers.tier import Floats, Gradients, Part
from hotrow.world import LaneKind, World

Scope = Literal["world", "node"]
Dedup = Literal["none", "rank", "node"]


@dataclass(frozen=True)
class Ticket:
    """How a fetch's keys went, so that its update sends none; and what the owner's own tier gave for its update."""

    route: Route
    held: Any


class ShardedTier(CollectiveTier):
    """Row-wise over all ranks (`scope="world"`), or over those of each node, with a copy on every node."""

    def __init__(
        self,
        tables: Sequence[Table],
        world: World,
        scope: Scope = "world",
        *,
        dedup: Dedup = "node",
        wire: WireFormat = "float32",
        seed: int = 0,
        timeout: float = 300.0,
        device: Device | None = None,
        keys: NamedKeys | None = None,
    ) -> None:
        if scope not in get_args(Scope):
            raise SettingsError(f'A sharded tier has no scope "{scope}".{nearest(str(scope), get_args(Scope))}')
        self.name: str = scope
        self._copied = scope == "node" and world.nodes > 1
        self._set_dedup(dedup, world)
        owners = world.node_size if scope == "node" else world.size
        super().__init__(
            tables,
            world,
            kinds=self._kinds(),
            owner=world.rank % owners,
            owners=owners,
            gives=scope == "world" or world.node == 0,
            wire=wire,
            seed=seed,
            timeout=timeout,
            device=device,
            keys=keys,
        )

    def travel_as(self, *, wire: WireFormat, dedup: str | None = None) -> None:
        super().travel_as(wire=wire)
        if dedup is None or dedup == self.dedup:
            return
        self._set_dedup(dedup, self.world)
        self._lanes.close()
        self._lanes = Lanes(self.world, self._kinds(), self._timeout, self._lanes.traffic)

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> Ticket:
        route = self._route(parts, len(rows), "fetch", step)
        held = self._held(route, rows)
        ticket = None
        if self._copied:
            self._read(parts, route.ends, held, step)
        else:
            ticket = self._fetch(parts, route.ends, held, step)
        route.back(self._path("fetch", self._hops), held, rows)
        return Ticket(route, ticket)

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        route = self._route(parts, len(rows), "read", step)
        held = self._held(route, rows)
        self._read(parts, route.ends, held, step)
        route.back(self._path("read", self._hops), held, rows)

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        flat = grads.flat
        route = self._route(parts, len(flat), "update", step) if ticket is None else ticket.route
        lanes = self._path("update", self._hops)
        if self._copied:
            ends, sums = self._over_nodes(route.ends, route.forth(lanes, flat), step)
            self._apply_to_copy(parts, ends, sums, step)
        else:
            sums = route.forth(lanes, flat, self.world.size)
            self._apply(parts, route.ends, sums, step, None if ticket is None else ticket.held)

    def _set_dedup(self, dedup: str, world: World) -> None:
        """Owners are the same whichever it is, so rows stay where they are."""
        if dedup not in get_args(Dedup):
            raise SettingsError(f'A sharded tier has no dedup "{dedup}".{nearest(str(dedup), get_args(Dedup))}')
        if self.name == "node" and dedup == "none":
            raise SettingsError('Within a node keys are deduplicated; dedup "none" is for scope "world".')
        self.dedup = dedup
        self.wants_lookups = dedup == "none"
        self._hops = _hops(world, self.name, dedup)

    def _kinds(self) -> dict[str, tuple[LaneKind, ...]]:
        update: tuple[LaneKind, ...] = (*self._hops, "rail") if self._copied else self._hops
        return {"fetch": self._hops, "read": self._hops, "update": update}

    def _route(self, parts: Sequence[Part], size: int, what: str, step: int) -> Route:
        ends = self._ends(parts, size)
        if self.dedup == "none":
            each = [np.ones(len(p.keys), np.int32) if p.lookups is None else p.lookups for p in parts]
            ends = replace(ends, repeats=each)
        by = rules(self.world)
        lanes = self._path(what, self._hops)
        return Route(lanes, [by[kind] for kind in self._hops], ends, self._wire, what, step)

    def _held(self, route: Route, rows: Floats) -> Floats:
        """Room for the rows that this rank answers; the batch's own where it asks nobody else."""
        return np.empty(route.ends.size, np.float32) if route.hops else rows


def _hops(world: World, scope: str, dedup: str) -> tuple[LaneKind, ...]:
    """The lanes to a key's owner, those left out that have one member."""
    if scope == "node":
        return ("node",) if world.node_size > 1 else ()
    if world.size == 1:
        return ()
    return ("node", "rail") if dedup == "node" and world.nodes > 1 and world.node_size > 1 else ("world",)
