"""The replicated tier: a copy of each row on every rank (FAE's replicas, FlexShard's hottest rows).

Fetching asks nobody. An update sums touched rows in three strides: to the node-mate who stands for the key's owner, who
sums for the node; between the nodes, as the copies of a node-wide tier do; and from there to all node-mates. Row bytes
D, g ranks on each of N nodes, a row touched everywhere: 2N(g - 1)(8 + D) bytes within nodes and 2(N - 1)(8 + D) between
them. All ranks apply the same sums in the same order, so copies never differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotrow.table import Table
from hotrow.tiers.collective import CollectiveTier, Device, NamedKeys, rules
from hotrow.tiers.hops import Hop, WireFormat, spread
from hotrow.tiers.tier import Floats, Gradients, Part
from hotrow.world import LaneKind, World


class ReplicatedTier(CollectiveTier):
    """Every row on every rank; rank 0 gives them to snapshots."""

    name = "replicated"

    def __init__(
        self,
        tables: Sequence[Table],
        world: World,
        *,
        wire: WireFormat = "float32",
        seed: int = 0,
        timeout: float = 300.0,
        device: Device | None = None,
        keys: NamedKeys | None = None,
    ) -> None:
        kinds: list[LaneKind] = ["node"] if world.node_size > 1 else []
        kinds += ["rail"] if world.nodes > 1 else []
        super().__init__(
            tables,
            world,
            kinds={"update": tuple(kinds)},
            owner=0,
            owners=1,
            gives=world.rank == 0,
            wire=wire,
            seed=seed,
            timeout=timeout,
            device=device,
            keys=keys,
        )

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        self.read(parts, rows, step)

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        self._read(parts, self._ends(parts, len(rows)), rows, step)

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        w, sums = self.world, grads.flat
        ends = self._ends(parts, len(sums))
        if w.node_size > 1:
            lane = self._lanes.of("update", "node")
            hop = Hop(lane, ends, rules(w)["node"], self._wire)
            sums = hop.push(lane, "update", step, sums, w.size if w.nodes == 1 else 1.0)
            ends = hop.merged()
        if w.nodes > 1:
            ends, sums = self._over_nodes(ends, sums, step)
        if w.node_size > 1:
            ends, sums = spread(self._lanes.of("update", "node"), ends, sums, self._wire, "update", step)
        self._apply_to_copy(parts, ends, sums, step)
