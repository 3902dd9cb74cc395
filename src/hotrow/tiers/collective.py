"""What the tiers over torch.distributed share: rows on each rank, lanes to the others, and the update of rows.

All ranks call a collective tier together, the same calls in the same order; one without data asks for nothing and
still takes part. Each rank hands in the gradients of its own mean loss; the tier sums them over ranks in a fixed order
and divides by their number, so a step of W ranks with batches of b is one of a process with a batch of W x b.

A rank's rows are in a tier of its own, behind this one. On the host tier keys grow, are admitted and evicted as ever,
the capacity of a table being shared by the ranks that own its rows. On the device tier are those that the plan names;
rows and gradients pass through host memory on their way to other ranks and back. Copies of a row (`replicated`, `node`)
see the same updates in the same order and stay the same bit for bit; what they count of a key, its uses and its
admission, they count with the update, when all of them know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotrow import _native
from hotrow.errors import SettingsError, nearest
from hotrow.table import Table
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.hops import WIRES, Ends, Hop, Rule, WireFormat, spread
from hotrow.tiers.host import HostTier
from hotrow.tiers.lanes import Lane, Lanes, Traffic
from hotrow.tiers.owned import Held, OwnedRows
from hotrow.tiers.tier import Floats, Gradients, Part, Tier
from hotrow.world import LaneKind, World

NamedKeys = Mapping[str, npt.NDArray[np.int64]]
Device = torch.device | str


class CollectiveTier(Tier):
    """Rows of `tables` on the ranks of `world`; a subclass says who owns which and how they travel.

    `wire` is the format of rows and gradients on the way; `timeout` is how many seconds an exchange may take. With a
    `device` the rows of `keys`, which are the same on all ranks, lie there, and the tier holds no others.
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
        device: Device | None = None,
        keys: NamedKeys | None = None,
    ) -> None:
        super().__init__(tables)
        if timeout <= 0:
            raise SettingsError(f"A timeout of {timeout} seconds gives no exchange the time to end.")
        self.world, self._timeout = world, timeout
        self._set_wire(wire)
        self._lanes = Lanes(world, kinds, timeout)
        self._owner, self._owners, self._gives = owner, owners, gives
        self._here: HostTier | DeviceTier
        if device is None:
            self._here = HostTier([_share_of(table, owners) for table in tables], seed)
        else:
            self._here = DeviceTier(tables, self._owned(keys or {}), device=device, seed=seed)

    @property
    def on_device(self) -> bool:
        """Whether its rows are on a device, so that it holds those only that the plan names."""
        return isinstance(self._here, DeviceTier)

    def stores(self) -> Mapping[str, OwnedRows]:
        return {name: self.owned(rows) for name, rows in self._here.stores().items()}

    def owned(self, rows: Held) -> OwnedRows:
        """Rows as this rank owns them."""
        return OwnedRows(rows, self._owner, self._owners, self._gives)

    def replan(self, keys: NamedKeys) -> None:
        if isinstance(self._here, DeviceTier):
            self._here.replan(self._owned(keys))

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
        for rows in self._here.stores().values():
            rows.set_steps(steps)

    def close(self) -> None:
        self._lanes.close()

    def _owned(self, keys: NamedKeys) -> dict[str, npt.NDArray[np.int64]]:
        """Those of the keys whose rows are this rank's."""
        if self._owners == 1:
            return dict(keys)
        return {
            name: k[_native.owners(np.ascontiguousarray(k), self._owners) == self._owner] for name, k in keys.items()
        }

    def _set_wire(self, wire: WireFormat) -> None:
        if wire not in WIRES:
            raise SettingsError(f'There is no wire format "{wire}".{nearest(str(wire), WIRES)}')
        self.wire, self._wire = wire, WIRES.index(wire)

    def _path(self, purpose: str, kinds: Sequence[LaneKind]) -> list[Lane]:
        return [self._lanes.of(purpose, kind) for kind in kinds]

    def _ends(self, parts: Sequence[Part], size: int) -> Ends:
        return Ends.of(parts, [self.tables[p.table].dim for p in parts], size)

    def _fetch(self, parts: Sequence[Part], ends: Ends, rows: Floats, step: int) -> Any:
        return self._here.fetch(_asked(parts, ends), rows, step)

    def _read(self, parts: Sequence[Part], ends: Ends, rows: Floats, step: int) -> None:
        self._here.read(_asked(parts, ends), rows, step)

    def _apply(self, parts: Sequence[Part], ends: Ends, grads: Floats, step: int, ticket: Any) -> None:
        self._here.update(_asked(parts, ends), Gradients(grads), step, ticket)

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
        ticket = None if self.on_device else self._fetch(parts, ends, np.empty(ends.size, np.float32), step)
        self._apply(parts, ends, grads, step, ticket)


def rules(world: World) -> dict[LaneKind, Rule]:
    """Who answers a key over each kind of lane: its owner in the world, or who stands for the owner on the way."""
    return {"world": Rule(world.size), "node": Rule(world.size), "rail": Rule(world.size, world.node_size)}


def _asked(parts: Sequence[Part], ends: Ends) -> list[Part]:
    """The keys of `ends`, which are of the same tables as the parts."""
    return [
        Part(p.table, p.number, keys, positions, start)
        for p, keys, positions, start in zip(parts, ends.keys, ends.positions, ends.starts, strict=True)
    ]


def _share_of(table: Table, owners: int) -> Table:
    """The table as one of its owners holds it: with its share of the capacity."""
    eviction = table.eviction
    if owners == 1 or eviction is None or eviction.capacity is None:
        return table
    capacity = -(-eviction.capacity // owners)
    return table.model_copy(update={"eviction": eviction.model_copy(update={"capacity": capacity})})
