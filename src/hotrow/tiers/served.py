"""The served tier: rows on shards, processes of this or other machines that apply the optimizer themselves.

A key belongs to the shard that its hash names. A step sends one request to each shard, for all tables at once and to
all shards at the same time; a shard gets its request even if no key is its own, so that every shard counts the same
steps. Rows and gradients are paired by key, never by order of arrival.

With several workers and `combine` (what `Sync` means) a step is one update: a shard waits for the pushes of all
ranks, sums each row's gradients in rank order and applies the optimizer once. Without it every push is applied when
it comes. Either way a worker pushes its gradient divided by the number of workers: the gradient of the mean loss over
all of them.

What nobody waits for (`update_behind`), and from then on fetches, which run ahead, have a line of their own: small
requests do not queue behind them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotrow import _native
from hotrow.errors import SettingsError
from hotrow.service.client import Answer, Client, OnWait
from hotrow.service.curve import KeyFile
from hotrow.service.protocol import Array, Kind, Wire
from hotrow.service.remote import RemoteRows
from hotrow.store.exchange import Blob
from hotrow.table import Table
from hotrow.tiers.tier import Floats, Gradients, Part, Tier, Wait
from hotrow.world import World

_PIECES = 3
WireName = Literal["float32", "bfloat16", "float16"]


class ServedTier(Tier):
    """Rows on the shards at `addresses`; every process names the same ones in the same order.

    `group` is any text that is the same for all ranks and new whenever they are started: it tells a shard the pushes of
    one start from those of an earlier one. It is needed where several ranks combine their pushes.

    A worker that keeps an `id` of 16 bytes and the number of its acknowledged pushes in a file, and gives both when it
    is started again, repeats the push that it died in: that one too is then applied once. Only pushes may be counted.
    """

    name = "served"
    remote = True

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Sequence[Table],
        *,
        seed: int = 0,
        world: World | None = None,
        combine: bool = True,
        group: str = "",
        wire: WireName = "float32",
        key: Path | str | None = None,
        timeout: float = 60.0,
        retry: float = 1.0,
        on_wait: OnWait | None = None,
        id: bytes | None = None,
        pushed: int = 0,
    ) -> None:
        super().__init__(tables)
        if not addresses:
            raise SettingsError("A served tier needs the address of a shard, as tcp://127.0.0.1:7700.")
        self.world = world or World()
        self._combine = combine and self.world.size > 1
        if self._combine and not group:
            raise SettingsError("Ranks that combine their pushes need a group: a text that is new at every start.")
        self._group = hashlib.blake2b(group.encode(), digest_size=16).digest() if self._combine else b""
        self._pushes = 0
        self._wire = Wire[wire.upper()]
        self._numbers = {table.name: i for i, table in enumerate(tables)}
        self._connect = partial(
            Client,
            addresses,
            tables,
            seed=seed,
            key=None if key is None else KeyFile.load(key, "trainer"),
            group=self._group,
            timeout=timeout,
            retry=retry,
            on_wait=on_wait,
        )
        self.client = self._connect(id=id, changes=pushed)
        self._behind: Client | None = None  # for what is large and can wait, once there is something
        self._stores = {table.name: RemoteRows(self.client, table, i) for i, table in enumerate(tables)}

    def stores(self) -> dict[str, RemoteRows]:
        """The rows on the shards; of several ranks one is enough to take them from there and put them back."""
        return self._stores if self.world.rank == 0 else {}

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> Any:
        shipments = self.ship(parts)
        self._bring(self._behind or self.client, Kind.FETCH, shipments, parts, rows, step)
        return shipments

    def fetch_late(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        self._bring(self.client, Kind.FETCH, self.ship(parts), parts, rows, step)

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        self._bring(self.client, Kind.READ, self.ship(parts), parts, rows, step)

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        for pushed in self.push(parts, grads.flat, step, ticket):
            pushed.result()

    def push(
        self, parts: Sequence[Part], grads: Floats, step: int, shipments: Sequence[_native.Shipment] | None = None
    ) -> list[Future[Answer]]:
        """Sends gradients on their way; what is returned is done when they have been applied."""
        shipments = shipments or self.ship(parts)
        keys = [self._keys(shipment, parts) for shipment in shipments]
        return self._push(
            self.client, [[*k, *self._encode(s, grads)] for k, s in zip(keys, shipments, strict=True)], step
        )

    def update_then_fetch(
        self, parts: Sequence[Part], grads: Gradients, step: int, wanted: Sequence[Part], rows: Floats
    ) -> Wait:
        """In pieces by key, so that rows of the first come while gradients of the next go."""
        begun: list[tuple[_native.Shipment | None, Future[Answer]]] = []
        for piece in range(_PIECES):
            mine, theirs = self._piece(parts, piece), self._piece(wanted, piece)
            if not mine:
                continue
            late = self.ship(theirs) if any(len(part.keys) for part in theirs) else []
            messages = [[*self._keys(s, mine), *self._encode(s, grads.flat)] for s in self.ship(mine)]
            for message, shipment in zip(messages, late, strict=False):
                message += self._keys(shipment, theirs)
            pushed = self._push(self.client, messages, step)
            begun += [(late[s] if late else None, answer) for s, answer in enumerate(pushed)]

        def wait() -> None:
            for shipment, future in begun:
                answer = future.result()
                if shipment is not None:
                    self._decode(shipment, answer[1:] if self._combine else answer, rows)

        return wait

    def _piece(self, parts: Sequence[Part], piece: int) -> list[Part]:
        """One of `_PIECES` parts of the keys, the same keys on every rank; tables that count updates are all in one."""
        pieces = []
        for part in parts:
            if self.tables[part.table].optimizer.name == "adam":
                pieces += [part] if piece == 0 else []
                continue
            at = np.flatnonzero(_native.shards_of(part.keys, self.shards * _PIECES) // self.shards == piece)
            positions = at if part.positions is None else part.positions[at]
            pieces.append(part._replace(keys=part.keys[at], positions=positions, lookups=None))
        return pieces

    def update_behind(self, parts: Sequence[Part], grads: Gradients, step: int) -> Wait:
        if self._behind is None:
            self._behind = self._connect()
        messages = [[*self._keys(s, parts), *self._encode(s, grads.flat)] for s in self.ship(parts)]
        pushed = self._push(self._behind, messages, step)

        def wait() -> None:
            for answer in pushed:
                answer.result()

        return wait

    def _push(self, client: Client, messages: Sequence[Sequence[Array]], step: int) -> list[Future[Answer]]:
        """Sends each shard its push. Ranks that combine number theirs alike, so all of them push in the same order."""
        self._pushes += 1
        if not self._combine:
            return [client.change(s, Kind.PUSH, m, step=step, wire=self._wire) for s, m in enumerate(messages)]
        header = {"client": self._group, "sequence": self._pushes, "rank": self.world.rank, "workers": self.world.size}
        return [client.ask(s, Kind.PUSH, m, step=step, wire=self._wire, **header) for s, m in enumerate(messages)]

    @property
    def combines(self) -> bool:
        """Whether the pushes of all workers are one update."""
        return self._combine

    @property
    def exact_wire(self) -> bool:
        """Whether values travel as they are."""
        return self._wire == Wire.FLOAT32

    @property
    def shards(self) -> int:
        return self.client.shards

    def exchange(self, requests: Sequence[Blob | None]) -> list[Blob | None]:
        """Carries what a cache in front of this tier asks to the shards, to all at once, and their answers back."""
        asked = [
            None if request is None else self.client.change(shard, Kind.EXCHANGE, [request])
            for shard, request in enumerate(requests)
        ]
        return [None if answer is None else answer.result()[0] for answer in asked]

    def counters(self) -> Mapping[str, Any]:
        clients = self._clients()
        return {
            "bytes_in": sum(client.received_bytes for client in clients),
            "bytes_out": sum(client.sent_bytes for client in clients),
            "retries": sum(client.retries for client in clients),
            "waited_seconds": sum(client.waited for client in clients),
        }

    def close(self) -> None:
        for client in self._clients():
            client.close()

    def _clients(self) -> list[Client]:
        return [self.client] if self._behind is None else [self.client, self._behind]

    def ship(self, parts: Sequence[Part]) -> list[_native.Shipment]:
        """The parts' keys by shard."""
        return _native.ship(
            [p.keys for p in parts],
            [p.positions for p in parts],
            [p.start for p in parts],
            [self.tables[p.table].dim for p in parts],
            self.client.shards,
        )

    def _keys(self, shipment: _native.Shipment, parts: Sequence[Part]) -> list[Array]:
        heads, packed = shipment.pack()
        numbers = np.array([self._numbers[p.table] for p in parts], np.int64)
        return [np.column_stack([numbers, heads.reshape(-1, 3)]), packed]

    def _bring(
        self,
        client: Client,
        kind: Kind,
        shipments: Sequence[_native.Shipment],
        parts: Sequence[Part],
        rows: Floats,
        step: int,
    ) -> None:
        asked = [
            client.ask(shard, kind, self._keys(shipment, parts), step=step, wire=self._wire)
            for shard, shipment in enumerate(shipments)
        ]
        for shipment, answer in zip(shipments, asked, strict=True):
            self._decode(shipment, answer.result(), rows)

    def _encode(self, shipment: _native.Shipment, grads: Floats) -> list[Array]:
        return list(shipment.encode(grads, self._wire, float(self.world.size)))

    def _decode(self, shipment: _native.Shipment, arrays: Sequence[Array], rows: Floats) -> None:
        values, *exponents = arrays
        if self._wire == Wire.FLOAT32:
            shipment.decode(values, rows)
        else:
            shipment.decode_halves(values, exponents[0] if exponents else None, self._wire, rows)
