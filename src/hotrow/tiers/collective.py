"""What the tiers over torch.distributed share: a row store on each rank, lanes to the others, and the update of rows.

All ranks call a collective tier together, the same calls in the same order; one without data asks for nothing and
still takes part. Each rank hands in the gradients of its own mean loss; the tier sums them over ranks in a fixed order
and divides by their number, so a step of W ranks with batches of b is one of a process with a batch of W x b.

Rows are in host memory, in the native row store: keys grow, are admitted and evicted as on the host tier, the capacity
of a table being shared by the ranks that own its rows. Copies of a row (`replicated`, `node`) see the same updates in
the same order and stay the same bit for bit; what they count of a key, its uses and its admission, they count with
the update, when all of them know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hotrow.errors import SettingsError, nearest
from hotrow.store.store import RowStore, Slots, fetch, read, update
from hotrow.table import Table
from hotrow.tiers.hops import WIRES, Ends, Hop, Rule, WireFormat, spread
from hotrow.tiers.lanes import Lane, Lanes, Traffic
from hotrow.tiers.owned import OwnedRows
from hotrow.tiers.tier import Floats, Part, Tier
from hotrow.world import LaneKind, World


class CollectiveTier(Tier):
    """Rows of `tables` on the ranks of `world`; a subclass says who owns which and how they travel.

    `wire` is the format of rows and gradients on the way; `timeout` is how many seconds an exchange may take.
    """

    collective = True

    def __init__(
        self,
        tables: Sequence[Table],
        world: World,
        *,
        kinds: dict[str, tuple[LaneKind, ...]],
        owner: int,
        owners: int,
        gives: bool,
        wire: WireFormat,
        seed: int,
        timeout: float,
    ) -> None:
        super().__init__(tables)
        if timeout <= 0:
            raise SettingsError(f"A timeout of {timeout} seconds gives no exchange the time to end.")
        self.world, self._timeout = world, timeout
        self._set_wire(wire)
        self._lanes = Lanes(world, kinds, timeout)
        self._stores = {table.name: RowStore(_share_of(table, owners), seed) for table in tables}
        self._rows = {name: OwnedRows(store, owner, owners, gives) for name, store in self._stores.items()}

    def stores(self) -> Mapping[str, OwnedRows]:
        return self._rows

    def travel_as(self, *, wire: WireFormat, dedup: str | None = None) -> None:
        """Changes how rows travel from the next fetch on, on all ranks together; None leaves deduplication as it is.

        Tickets of earlier fetches are void.
        """
        self._set_wire(wire)

    @property
    def traffic(self) -> Mapping[str, Traffic]:
        """What this rank sent so far, for fetch, read and update."""
        return self._lanes.traffic

    def counters(self) -> Mapping[str, Any]:
        sent = self.traffic.values()
        within, between = sum(t.within for t in sent), sum(t.between for t in sent)
        return {
            "bytes_out": within + between,
            "links": {"node": {"bytes_out": within}, "network": {"bytes_out": between}},
            "exchanges": sum(t.exchanges for t in sent),
            "exchange_seconds": sum(t.seconds for t in sent),
        }

    def set_steps(self, steps: int) -> None:
        """Takes the stores as having made `steps` updates: what a tier that joins in mid-run has to know."""
        for store in self._stores.values():
            store.steps = steps

    def close(self) -> None:
        self._lanes.close()

    def _set_wire(self, wire: WireFormat) -> None:
        if wire not in WIRES:
            raise SettingsError(f'There is no wire format "{wire}".{nearest(str(wire), WIRES)}')
        self.wire, self._wire = wire, WIRES.index(wire)

    def _path(self, purpose: str, kinds: Sequence[LaneKind]) -> list[Lane]:
        return [self._lanes.of(purpose, kind) for kind in kinds]

    def _ends(self, parts: Sequence[Part], size: int) -> Ends:
        return Ends.of(parts, [self.tables[p.table].dim for p in parts], size)

    def _stores_of(self, parts: Sequence[Part]) -> list[RowStore]:
        return [self._stores[p.table] for p in parts]

    def _fetch(self, parts: Sequence[Part], ends: Ends, rows: Floats, step: int) -> Slots:
        return fetch(self._stores_of(parts), ends.keys, ends.positions, rows, ends.starts, step)

    def _read(self, parts: Sequence[Part], ends: Ends, rows: Floats, step: int) -> None:
        read(self._stores_of(parts), ends.keys, ends.positions, rows, ends.starts, step)

    def _apply(self, parts: Sequence[Part], ends: Ends, grads: Floats, step: int, slots: Slots | None) -> None:
        rates = [self.tables[p.table].optimizer.lr_at(step) for p in parts]
        update(self._stores_of(parts), ends.keys, ends.positions, grads, ends.starts, rates, slots)

    def _over_nodes(self, ends: Ends, sums: Floats, step: int) -> tuple[Ends, Floats]:
        """A node's sums to the same owner on every node: the keys that any of them has, and the mean over all ranks."""
        rail, divisor = self._lanes.of("update", "rail"), float(self.world.size)
        if rail.size > 2:  # on two nodes each sends the other what it has; on more one node sums for all
            hop = Hop(rail, ends, rules(self.world)["rail"], self._wire)
            sums = hop.push(rail, "update", step, sums, divisor)
            ends, divisor = hop.merged(), 1.0
        return spread(rail, ends, sums, self._wire, "update", step, divisor)

    def _apply_to_copy(self, parts: Sequence[Part], ends: Ends, grads: Floats, step: int) -> None:
        """As `_apply`, on one of several copies: now that all know of the keys they are used, or get their rows."""
        slots = self._fetch(parts, ends, np.empty(ends.size, np.float32), step)
        self._apply(parts, ends, grads, step, slots)


def rules(world: World) -> dict[LaneKind, Rule]:
    """Who answers a key over each kind of lane: its owner in the world, or who stands for the owner on the way."""
    return {"world": Rule(world.size), "node": Rule(world.size), "rail": Rule(world.size, world.node_size)}


def _share_of(table: Table, owners: int) -> Table:
    """The table as one of its owners holds it: with its share of the capacity."""
    eviction = table.eviction
    if owners == 1 or eviction is None or eviction.capacity is None:
        return table
    capacity = -(-eviction.capacity // owners)
    return table.model_copy(update={"eviction": eviction.model_copy(update={"capacity": capacity})})
