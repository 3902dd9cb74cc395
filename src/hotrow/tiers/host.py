"""The host tier: rows in this process's memory, in the native row store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.store.exchange import Blob, Exchange
from hotrow.store.store import RowStore, fetch, read, update
from hotrow.table import Table
from hotrow.tiers.tier import Floats, Gradients, Part, Places, Tier

_NONE = np.empty(0, np.float32)
Arguments = tuple[list[RowStore], list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64] | None]]


def table_folder(folder: Path | None, table: Table) -> Path | None:
    """Where in a folder of many tables one keeps its rows."""
    return None if folder is None else folder / f"table-{quote(table.name, safe='')}"


class HostTier(Tier):
    """One `RowStore` a table; every call handles all tables at once, on all cores.

    With a `folder` each table's rows are in a folder of its own there, and outlive the process.
    """

    name = "host"
    shards = 1
    pools = True

    def __init__(self, tables: Sequence[Table], seed: int = 0, folder: Path | None = None) -> None:
        super().__init__(tables)
        self._seed = seed
        self.lr: dict[str, float] = {}  # instead of tables' own, where someone set another
        self._stores = {table.name: RowStore(table, seed, table_folder(folder, table)) for table in tables}
        self._exchange = Exchange(list(self._stores.values()))
        self._optimizers = list({table.optimizer: None for table in tables})  # many tables have the same
        self._optimizer_of = {table.name: self._optimizers.index(table.optimizer) for table in tables}

    def stores(self) -> dict[str, RowStore]:
        return self._stores

    def copy(self) -> HostTier:
        """Another tier with copies of all rows, in memory."""
        other = HostTier(list(self.tables.values()), self._seed)
        for name, store in self._stores.items():
            store.copy_to(other._stores[name])
        other.lr = dict(self.lr)
        return other

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> Any:
        return fetch(*self._arguments(parts), rows, [p.start for p in parts], step)

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        read(*self._arguments(parts), rows, [p.start for p in parts], step)

    def fetch_results(self, parts: Sequence[Part], results: Places, step: int) -> Any:
        return _native.fetch_results([self._stores[p.table].native for p in parts], results.of(parts), step)

    def read_results(self, parts: Sequence[Part], results: Places, step: int) -> None:
        _native.read_results([self._stores[p.table].native for p in parts], results.of(parts), step)

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        rate_of = [optimizer.lr_at(step) for optimizer in self._optimizers]
        rates = [rate_of[self._optimizer_of[p.table]] for p in parts]
        for i, part in enumerate(parts if self.lr else ()):
            if part.table in self.lr:
                rates[i] = self.lr[part.table] * self.tables[part.table].optimizer.schedule.factor(step)
        places = grads.places
        if places is None:
            update(*self._arguments(parts), grads.flat, [p.start for p in parts], rates, ticket)
        elif places.all_in(parts):
            _native.update_results([self._stores[p.table].native for p in parts], places.of(parts), rates, ticket)
        else:
            update(*self._arguments(parts), _NONE, [0] * len(parts), rates, ticket, places.of(parts))

    def exchange(self, requests: Sequence[Blob | None]) -> list[Blob | None]:
        """Answers a cache in front of this tier."""
        return [None if request is None else self._exchange.answer(request) for request in requests]

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _arguments(self, parts: Sequence[Part]) -> Arguments:
        return [self._stores[p.table] for p in parts], [p.keys for p in parts], [p.positions for p in parts]
