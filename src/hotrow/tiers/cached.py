"""The cached tier: copies of rows that live behind it, on shards or in this process, as stale as a bound allows (HET).

A copy has the clock it was taken over at (start) and its own (current), which counts the updates made to it here. It
is good while `current <= start + s` and `server <= current + s`; a batch whose copies are all good costs no round
trip. Writes stay here until the bound, an eviction or `flush`; those of a young row until it has had more than `drift`
of the updates it began with, for there a few make a difference. With s = 0 a row is what the server has when the batch
is exchanged for, and its update is written back before it is read again. Clocks are compared when a batch is exchanged
for, ahead of its step; what workers in step can do until the read, 2 clocks a worker and batch, is taken off the bound.

What is written back is the change of row and optimizer state. That is equal to
- one worker: the plain table, bit for bit, for every optimizer. It writes rows back as they are, has made the same
  updates in the same order, and counted Adam's steps, which go along. Only if a batch has more keys without a row than
  a bounded table has room for, those that had one before, and a copy here, get it first.
- several: SGD to rounding, for a row is its start minus the sum of all updates. The accumulators of Adagrad and
  RowWiseAdagrad are the sums of all squared gradients; an update is divided by the one its worker saw. With Momentum
  and Adam each worker's moments move on from those it took over, and the moves add up.

Most good copies are not even asked about: the server lists the rows that were written back, and tells each cache with
every answer what others did since, as far as it can matter (`native/ledger.hpp`). A row never updated is not sent.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from hotrow import _native
from hotrow.errors import SettingsError, StoreError
from hotrow.settings import Settings
from hotrow.sizes import parse_size
from hotrow.store.exchange import Blob
from hotrow.store.store import Rows, RowStore, read, update
from hotrow.table import Table
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.cached_rows import CachedRows
from hotrow.tiers.tier import Floats, Gradients, Part, Tier
from hotrow.world import World

Keys = npt.NDArray[np.int64]
_NO_KEYS = np.empty(0, np.int64)
_NO_GRADS = np.empty(0, np.float32)
_POLICIES = ("lru", "lfu", "pinned")
_FLUSHED_AT_ONCE = 64 << 20  # bytes


class Cache(Settings):
    """How large a cache is, which rows it keeps, and how stale they may be."""

    capacity: int | str = Field(
        "256MiB", description="of all tables together: rows, or memory as in 512MiB, state and bookkeeping included"
    )
    policy: Literal["lru", "lfu", "pinned"] = Field(
        "lfu", description="who stays: last used, most used, or popular rows and then those last used"
    )
    popular: int = Field(16, ge=1, description="uses after which policy pinned keeps a row")
    clock: int | Literal["unbounded"] | None = Field(
        None, description="updates by which a copy may differ from its row; as the policy says, else 100, if not given"
    )
    drift: float = Field(
        0.02,
        ge=0,
        le=1,
        description="share of a row's updates by which a copy may differ while `clock` allows more; 0: off",
    )
    ahead: int | None = Field(
        None,
        ge=0,
        le=64,
        description="batches that are exchanged for ahead of their step; as the policy says, else 2, if not given",
    )
    sample: int = Field(64, ge=0, description="of so many rows one is checked at every use, for statistics; 0: none")

    @field_validator("capacity")
    @classmethod
    def _is_a_size(cls, capacity: int | str) -> int | str:
        if (parse_size(capacity, "a capacity") if isinstance(capacity, str) else capacity) < 1:
            raise ValueError("a cache holds at least one row")
        return capacity

    @field_validator("clock")
    @classmethod
    def _is_a_bound(cls, clock: int | str | None) -> int | str | None:
        if isinstance(clock, int) and not 0 <= clock < 2**31:
            raise ValueError('the clock is a number from 0 on, or "unbounded"')
        return clock

    @property
    def bound(self) -> int | None:
        """The clock as a number; None for no bound."""
        if isinstance(self.clock, str):
            return None
        return 100 if self.clock is None else self.clock

    @property
    def depth(self) -> int:
        """Batches that may be exchanged for ahead of their step."""
        return 2 if self.ahead is None else self.ahead


class Backing(Protocol):
    """What a cache needs of the tier behind it."""

    tables: dict[str, Table]

    @property
    def shards(self) -> int: ...
    def exchange(self, requests: Sequence[Blob | None]) -> Sequence[Blob | None]: ...
    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None: ...
    def stores(self) -> Mapping[str, Rows]: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class CachedTier(Tier):
    """Copies of the rows of `backing`, whose seed is `seed`; `world` says how many workers share them.

    A worker's gradient is divided by the number of workers, as everywhere. `checker` watches the clocks of reads, from
    when it is there.
    """

    name = "cached"

    def __init__(
        self,
        backing: Backing,
        settings: Cache | None = None,
        *,
        seed: int = 0,
        world: World | None = None,
        checker: Checker | None = None,
    ) -> None:
        tables = list(backing.tables.values())
        super().__init__(tables)
        self.backing, self.settings, self.world = backing, settings or Cache(), world or World()
        self._numbers = {table.name: t for t, table in enumerate(tables)}
        # The server decides who is admitted and who is forgotten; copies are just there.
        copies = [table.model_copy(update={"admission": None, "eviction": None}) for table in tables]
        self._copies = {table.name: RowStore(table, seed) for table in copies}
        self.cache = self._open()
        self.checker = checker
        self._ahead: dict[int, tuple[Sequence[Part], _native.Trip]] = {}  # by step
        self._lock = threading.Lock()  # of the exchange: one at a time
        self._step = 0
        self._failed: str | None = None
        self._rows = {name: CachedRows(self, name, rows) for name, rows in backing.stores().items()}

    def _open(self) -> _native.Cache:
        s, sole = self.settings, self.world.size == 1
        in_bytes = isinstance(s.capacity, str)
        return _native.Cache(
            stores=[store.native for store in self._copies.values()],
            evicts=[self._checks(table) for table in self.tables.values()],
            capacity=parse_size(s.capacity) if isinstance(s.capacity, str) else s.capacity,
            in_bytes=in_bytes,
            keep=_POLICIES.index(s.policy),
            popular=s.popular,
            bound=s.bound,
            drift=0.0 if sole else s.drift,
            margin=0 if sole else self.margin,
            sole=sole,
            sample=0 if sole else s.sample,
            shards=self.backing.shards,
            client=secrets.randbits(63) | 1,
        )

    def _checks(self, table: Table) -> bool:
        """Whether every use of a copy goes to the server: where that evicts by use."""
        return table.eviction is not None

    @property
    def margin(self) -> int:
        """Clocks by which other workers, in step, can move a row from the exchange of a batch to its read."""
        return 2 * self.world.size * (self.looks_ahead + 1)

    @property
    def looks_ahead(self) -> int:
        """Batches that may be exchanged for ahead of their step: none if the bound is closer than what that costs.

        One worker is exact; so none either where rows are admitted or evicted, which goes by the order of fetches.
        """
        s, ranks = self.settings, self.world.size
        if ranks == 1:
            return 0 if any(t.admission or t.eviction for t in self.tables.values()) else s.depth
        if s.bound is None:
            return s.depth
        return s.depth if s.bound > 2 * ranks * (s.depth + 1) else 0

    def prefetch(self, parts: Sequence[Part], step: int) -> None:
        """Brings the rows of step `step`'s batch, and holds them until its update. To be called in the order of steps.

        They are found by the step: whoever fetches for it, all of these keys or some of them, costs no exchange.
        """
        with self._lock:
            if len(self._ahead) < self.looks_ahead and step not in self._ahead:
                self._ahead[step] = (parts, self._bring(parts, step))

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> Any:
        trip = self._held(parts, step)
        self._read_copies(parts, rows, step)
        if self.checker is not None:
            for part in parts:
                self.checker.read(self.world.rank, part.table, step, part.keys, self._clocks(part))
        return trip

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        """With several workers the rows behind the cache, the freshest there are. One worker's copies are exact."""
        if self.world.size > 1:
            self.backing.read(parts, rows, step)
            return
        with self._lock:  # so that no copy is evicted between two looks
            here = [self.cache.good(self._numbers[part.table], part.keys) != 0 for part in parts]
            away = [_some(part, ~mask) for part, mask in zip(parts, here, strict=True)]
            if any(len(part.keys) for part in away):
                self.backing.read(away, rows, step)
            self._read_copies([_some(part, mask) for part, mask in zip(parts, here, strict=True)], rows, step)

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        trip = ticket if isinstance(ticket, _native.Trip) else self._held(parts, step)
        stores, keys, positions = self._arguments(parts)
        rates = [self.tables[part.table].optimizer.lr_at(step) for part in parts]
        if self.world.size == 1 and grads.places is not None:
            update(stores, keys, positions, _NO_GRADS, [0] * len(parts), rates, None, grads.places.of(parts))
        else:
            flat = grads.flat if self.world.size == 1 else grads.flat / np.float32(self.world.size)
            update(stores, keys, positions, flat, [part.start for part in parts], rates, None)
        if self.checker is not None:
            for part in parts:
                self.checker.updated(self.world.rank, part.table, part.keys, self._clocks(part))
        trip.release()

    def flush(self) -> None:
        """Writes every change back; copies stay, but those of rows that others changed too."""
        with self._lock:
            dirty = self.cache.dirty()
            row_bytes = max(self.cache.row_bytes())
            chunk = max(1, _FLUSHED_AT_ONCE // row_bytes)
            tables = list(range(len(dirty)))
            for begin in range(0, max(map(len, dirty), default=0) or 1, chunk):
                trip = _native.Trip(self.cache)
                trip.plan(self.cache, tables, [keys[begin : begin + chunk] for keys in dirty], self._step, flush=True)
                self._exchange(trip)
        self.backing.flush()

    def stores(self) -> Mapping[str, Rows]:
        """The rows behind the cache; what is changed there is not left here."""
        return self._rows

    def counters(self) -> Mapping[str, Any]:
        counts, behind = self.cache.counts(), self.cache.behind()
        return {
            "bytes_in": counts.pop("received_bytes"),
            "bytes_out": counts.pop("sent_bytes"),
            **counts,
            "rows": sum(self.cache.rows()),
            "staleness": {int(clocks): int(behind[clocks]) for clocks in np.flatnonzero(behind)},
        }

    def close(self) -> None:
        """Writes every change back, and closes what is behind."""
        try:
            if self._failed is None:
                self.flush()
        finally:
            self._ahead.clear()
            self.backing.close()

    def replan(self, keys: Mapping[str, Keys]) -> None:
        with self._lock:
            self._ahead.clear()

    def drop(self, table: str, keys: Keys | None = None) -> None:
        """Forgets copies, all of a table's or those of `keys`, and what was changed in them."""
        with self._lock:
            t = self._numbers[table]
            self._ahead.clear()
            self.cache.drop(t, self.cache.keys()[t] if keys is None else np.ascontiguousarray(keys, np.int64))
            if keys is None:
                self._copies[table].steps = 0
                self.cache.rejoin()

    def set_steps(self, table: str, steps: int) -> None:
        """The updates of a table so far, which Adam's correction goes by."""
        self._copies[table].steps = steps

    def _held(self, parts: Sequence[Part], step: int) -> _native.Trip:
        """The batch's rows, here and held: exchanged for ahead of time, or now."""
        trip = self._brought(parts, step)  # without the lock: a later batch may be on its way
        if trip is not None:
            return trip
        with self._lock:
            return self._brought(parts, step) or self._bring(parts, step)

    def _brought(self, parts: Sequence[Part], step: int) -> _native.Trip | None:
        """What was brought for a step, if these keys are among it; else it holds rows for nobody, and is let go."""
        for past in [s for s in list(self._ahead) if s < step]:
            self._ahead.pop(past, None)
        found = self._ahead.pop(step, None)
        return found[1] if found is not None and _among(parts, found[0]) else None

    def _bring(self, parts: Sequence[Part], step: int) -> _native.Trip:
        self._step = max(self._step, step)
        trip = _native.Trip(self.cache)
        trip.plan(self.cache, [self._numbers[part.table] for part in parts], [part.keys for part in parts], step)
        self._exchange(trip)
        while trip.go_again():
            self._exchange(trip)
        return trip

    def _exchange(self, trip: _native.Trip) -> None:
        """One exchange with every shard. If it fails, changes are on their way and nobody knows how far: no more."""
        if self._failed is not None:
            raise StoreError(f"An exchange of this cache failed before, and its changes are lost: {self._failed}")
        requests = trip.requests
        if all(request is None for request in requests):
            return
        try:
            for shard, answer in enumerate(self.backing.exchange(requests)):
                if answer is not None:
                    trip.absorb(shard, answer)
        except BaseException as error:
            self._failed = str(error)
            raise
        if trip.conflicts:
            self._failed = "another worker changed the rows of a cache that takes itself for the only one"
            raise SettingsError(
                f"{trip.conflicts} rows were changed behind a cache that takes itself for the only one. "
                f"Tell it how many workers there are: world=World(rank, size)."
            )

    def _read_copies(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        read(*self._arguments(parts), rows, [part.start for part in parts], step)

    def _arguments(self, parts: Sequence[Part]) -> tuple[list[RowStore], list[Keys], list[Keys | None]]:
        return [self._copies[p.table] for p in parts], [p.keys for p in parts], [p.positions for p in parts]

    def _clocks(self, part: Part) -> npt.NDArray[np.int64]:
        """The current clocks of a part's copies, -1 where there is none."""
        _, current, _, here = self.cache.clocks(self._numbers[part.table], part.keys)
        return np.where(here, current.astype(np.int64), -1)


def _among(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    """Whether the keys of `parts` are all among those of `others`."""
    keys = {part.table: part.keys for part in others}
    return all(
        part.keys is keys.get(part.table) or np.isin(part.keys, keys.get(part.table, _NO_KEYS)).all() for part in parts
    )


def _some(part: Part, mask: npt.NDArray[np.bool_]) -> Part:
    """The part's keys for which the mask holds."""
    at = np.flatnonzero(mask)
    return part._replace(
        keys=part.keys[at], positions=at if part.positions is None else part.positions[at], lookups=None
    )
