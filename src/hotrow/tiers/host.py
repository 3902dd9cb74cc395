"""The host tier: rows in this process's memory, in the native row store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow.store.store import RowStore, fetch, read, update
from hotrow.table import Table
from hotrow.tiers.tier import Part, Tier


class HostTier(Tier):
    """One `RowStore` a table; every call handles all tables at once, on all cores."""

    name = "host"

    def __init__(self, tables: Sequence[Table], seed: int = 0) -> None:
        super().__init__(tables)
        self._stores = {table.name: RowStore(table, seed) for table in tables}

    def stores(self) -> dict[str, RowStore]:
        return self._stores

    def fetch(self, parts: Sequence[Part], rows: npt.NDArray[np.float32], step: int) -> Any:
        return fetch(*self._arguments(parts), rows, [p.start for p in parts], step)

    def read(self, parts: Sequence[Part], rows: npt.NDArray[np.float32], step: int) -> None:
        read(*self._arguments(parts), rows, [p.start for p in parts], step)

    def update(
        self, parts: Sequence[Part], grads: npt.NDArray[np.float32], step: int, ticket: Any = None
    ) -> None:
        rates = [self.tables[p.table].optimizer.lr_at(step) for p in parts]
        update(*self._arguments(parts), grads, [p.start for p in parts], rates, ticket)

    def _arguments(
        self, parts: Sequence[Part]
    ) -> tuple[list[RowStore], list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64] | None]]:
        return [self._stores[p.table] for p in parts], [p.keys for p in parts], [p.positions for p in parts]
