"""The exact cache: for several workers under `Sync`, the same bits as without it, and rows stay where they are used.

Gradients go to the shards at every step, which sum those of all workers and apply the optimizer once. A shard says with
its answer which rows others had a gradient for too. All the others this worker updates in its own copies as well, with
the same gradient, state and count of steps: they are the shard's rows, bit for bit. So a row that nobody else touches
between two uses never comes down again: key and clock of a copy go up at its next use, 12 bytes, and the row comes
back only if its clock is another one by then.

It saves at most half of the bytes, those of reads; rows that all workers use at every step are fetched as without it.
Evaluations read all rows from the shards, as without it.
A worker alone has no need of it: with `CachedTier` it is exact at any bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import SettingsError
from hotrow.store.store import update
from hotrow.tiers.cached import Cache, CachedTier
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Floats, Gradients, Part
from hotrow.world import World


class ExactCachedTier(CachedTier):
    """Copies in front of a served tier whose workers combine their pushes; of `settings` capacity and policy count."""

    margin = 0
    looks_ahead = 0  # rows are those after the last step: nothing can be asked before it is done

    def __init__(
        self, backing: ServedTier, settings: Cache | None = None, *, seed: int = 0, world: World | None = None
    ) -> None:
        if not backing.combines or not backing.exact_wire:
            raise SettingsError(
                "An exact cache needs shards that combine the pushes of several workers, with float32 on the wire."
            )
        exact = (settings or Cache()).model_copy(update={"clock": 0, "ahead": 0, "sample": 0})
        super().__init__(backing, exact, seed=seed, world=world)
        self._served = backing

    def _checks(self, table: Any) -> bool:
        return True

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        """The shards' rows: whether a copy is one of them is only known once it is asked."""
        self._served.read(parts, rows, step)

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        trip = ticket if isinstance(ticket, _native.Trip) else self._held(parts, step)
        flat = grads.flat
        shipments = self._served.ship(parts)
        pushed = self._served.push(parts, flat, step, shipments)
        stores, keys, positions = self._arguments(parts)
        rates = [self.tables[part.table].optimizer.lr_at(step) for part in parts]
        mine = flat / np.float32(self.world.size)
        update(stores, keys, positions, mine, [part.start for part in parts], rates, None)
        trip.release()
        for shipment, answer in zip(shipments, pushed, strict=True):
            self._keep_own(parts, shipment, answer)

    def _keep_own(self, parts: Sequence[Part], shipment: _native.Shipment, answer: Future[Any]) -> None:
        """Copies that were updated as their rows were stay; the others are forgotten."""
        bits = answer.result()
        keys = shipment.keys
        # An answer to a push that came twice does not say it any more.
        shared: npt.NDArray[np.bool_] = (
            np.unpackbits(bits[0], count=len(keys)).astype(np.bool_) if bits else np.ones(len(keys), np.bool_)
        )
        ends = np.cumsum(shipment.counts)
        for part, begin, end in zip(parts, ends - shipment.counts, ends, strict=True):
            table, of_table, others = self._numbers[part.table], keys[begin:end], shared[begin:end]
            self.cache.settle(table, of_table[~others])
            self.cache.drop(table, of_table[others])
