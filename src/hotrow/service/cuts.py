"""Cuts of a shard's tables, read by a client from afar: what snapshots over shards are made of.

A cut is known by its client and the number that the client gave it. Its chunks are numbered and the last one is kept,
so that a repeat of a lost answer gives the same rows again. A client that is not heard of for a minute has given its
cut up: it ends when somebody else wants one.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from hotrow.errors import StoreError
from hotrow.service.protocol import Array
from hotrow.store.store import Columns, Cut, Moment, RowStore

COLUMNS = ("keys", "values", "state", "clocks", "uses", "last")
_PATIENCE_S = 60.0

Name = tuple[bytes, int]


@dataclass
class _Open:
    name: Name
    moment: Moment
    number: int = 0
    chunk: Columns = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)


class Cuts:
    """At most one cut of each table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def begin(self, store: RowStore, name: Name, cut: Cut) -> Moment:
        """Begins a cut, or finds the one that the same request began before."""
        with self._lock:
            here = self._open.get(store.table.name)
            if here is not None and here.name == name:
                return here.moment
            if here is not None and time.monotonic() > here.heard + _PATIENCE_S:
                self._end(store, kept=False)
            moment = store.begin_cut(cut)
            self._open[store.table.name] = _Open(name, moment)
            return moment

    def read(self, store: RowStore, name: Name, number: int, most: int) -> list[Array]:
        """Chunk `number` of a cut, counted from 1: about `most` rows, none when there are no more."""
        with self._lock:
            here = self._mine(store, name)
            here.heard = time.monotonic()
            if number == here.number + 1:
                here.chunk, here.number = here.moment.read_snapshot(most), number
            elif number != here.number or number == 0:
                raise StoreError(f"Table {store.table.name}: chunk {number} does not follow chunk {here.number}.")
            return [here.chunk[column] for column in COLUMNS]

    def end(self, store: RowStore, name: Name, kept: bool) -> bool:
        """Ends a cut; whether the rows it was of are still those that are here."""
        with self._lock:
            here = self._mine(store, name)
            self._end(store, kept)
            return store.is_of(here.moment)

    def _mine(self, store: RowStore, name: Name) -> _Open:
        here = self._open.get(store.table.name)
        if here is None or here.name != name:
            raise StoreError(f"Table {store.table.name}: this snapshot of it is not under way, or was given up.")
        return here

    def _end(self, store: RowStore, kept: bool) -> None:
        self._open.pop(store.table.name).moment.end_snapshot(kept)
