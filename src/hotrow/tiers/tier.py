"""A tier takes keys and gives rows; takes keys and gradients and makes them so.

Every tier answers for whole batches and all its tables at once, and writes straight into the batch's rows: no
merge afterwards. `Tier` here is the interface; a tier that needs no hook inherits the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow.store.store import RowStore
from hotrow.table import Table


@dataclass(frozen=True)
class Part:
    """One table's share of a batch, for one tier: unique keys, and which of the batch's rows they are.

    The row of `keys[i]` is row `positions[i]` of the table's, or row i where positions are None. The table's rows
    begin at `start` of the batch's flat array of rows.
    """

    table: str
    keys: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None
    start: int


class Tier:
    """Where rows live. `step` is the count of completed steps: last uses and schedules go by it."""

    name = "tier"

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    def fetch(self, parts: Sequence[Part], rows: npt.NDArray[np.float32], step: int) -> Any:
        """Writes the rows to train on, new ones included. What it returns is handed to `update`."""
        raise TypeError(f"{type(self).__name__} does not say how it fetches")

    def read(self, parts: Sequence[Part], rows: npt.NDArray[np.float32], step: int) -> None:
        """Writes the rows as they are and changes nothing."""
        raise TypeError(f"{type(self).__name__} does not say how it reads")

    def update(
        self, parts: Sequence[Part], grads: npt.NDArray[np.float32], step: int, ticket: Any = None
    ) -> None:
        """Applies each table's optimizer to the rows of its part; gradients lie where the rows lay."""
        raise TypeError(f"{type(self).__name__} does not say how it updates")

    def stores(self) -> dict[str, RowStore]:
        """The row stores in this process that hold the tier's rows, for snapshots; none if rows are elsewhere."""
        return {}

    def flush(self) -> None:
        """Returns when every update given to the tier has been applied."""

    def close(self) -> None:
        """Frees what the tier holds."""
