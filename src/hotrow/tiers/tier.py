"""A tier takes keys and gives rows; takes keys and gradients and makes them so.

Every tier answers for whole batches and all its tables at once, and writes straight into the batch's rows: no
merge afterwards. Gradients come as `Gradients`: a tier whose rows are at hand sums a row's gradient while it updates
the row; one that sends them elsewhere takes them summed. `Tier` here is the interface; a tier that needs no
hook inherits the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.store.store import Rows
from hotrow.table import Table

Floats = npt.NDArray[np.float32]
Wait = Callable[[], None]
"""Returns when what was begun has ended, and raises if it failed."""


def done() -> None:
    """Waits for nothing."""


class Part(NamedTuple):
    """One table's share of a batch, for one tier: unique keys, and which of the batch's rows they are.

    The row of `keys[i]` is row `positions[i]` of the table's, or row i where positions are None. The table has
    `number` in the batch's grouping, and its rows begin at `start` of the batch's flat array of rows. `lookups` says
    how often each key is looked up, where a tier wants to know it.
    """

    table: str
    number: int
    keys: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None
    start: int
    lookups: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Places:
    """A batch's result matrices, or their gradients, and the grouping that says whose place is where."""

    grouping: _native.Grouping
    matrices: list[Floats | None]

    def of(self, parts: Sequence[Part]) -> _native.Places:
        """The same for some parts' tables, as the native core takes it."""
        return _native.Places(self.grouping, [p.number for p in parts], self.matrices)

    def all_in(self, parts: Sequence[Part]) -> bool:
        """Whether the parts are all keys of all tables of the batch."""
        return len(parts) == len(self.grouping.starts) - 1 and all(p.positions is None for p in parts)


class Gradients:
    """Gradients of a batch's rows: given as such, or to be summed from the gradients of the batch's results."""

    def __init__(self, flat: Floats | None = None, places: Places | None = None) -> None:
        self.places = places
        self._flat = flat

    @property
    def flat(self) -> Floats:
        """One for each unique row, where the rows lay in the batch's flat array; summed when first asked for."""
        if self._flat is None:
            assert self.places is not None
            self._flat = np.empty(self.places.grouping.starts[-1], np.float32)
            self.places.grouping.backward(self.places.matrices, self._flat)
        return self._flat


class Tier:
    """Where rows live. `step` is the count of completed steps: last uses and schedules go by it."""

    name = "tier"
    wants_lookups: bool = False  # whether parts are to say how often keys are looked up
    remote = False
    """Whether its rows come over a network: remote tiers are asked all at once, beside the local ones."""
    collective = False
    """Whether all ranks ask it together: then each of them makes the same calls in the same order."""
    pools = False
    """Whether it pools rows itself, where it has all of a batch: `fetch_results`, `read_results`, `update` with places.
    Parts then say which tables there are; the keys are those of the grouping."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    @property
    def looks_ahead(self) -> int:
        """How many coming batches it makes use of being told of."""
        return 0

    def prefetch(self, parts: Sequence[Part], step: int) -> None:
        """Says what a coming fetch will ask for, with these very parts, so that it finds the rows at hand."""

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> Any:
        """Writes the rows to train on, new ones included. What it returns is handed to `update`."""
        raise TypeError(f"{type(self).__name__} does not say how it fetches")

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        """Writes the rows as they are and changes nothing."""
        raise TypeError(f"{type(self).__name__} does not say how it reads")

    def fetch_results(self, parts: Sequence[Part], results: Places, step: int) -> Any:
        """As `fetch`, of all keys of a batch; what is written are the batch's results."""
        raise TypeError(f"{type(self).__name__} does not pool rows")

    def read_results(self, parts: Sequence[Part], results: Places, step: int) -> None:
        """As `read`, of all keys of a batch; what is written are the batch's results."""
        raise TypeError(f"{type(self).__name__} does not pool rows")

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        """Applies each table's optimizer to the rows of its part."""
        raise TypeError(f"{type(self).__name__} does not say how it updates")

    def fetch_late(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        """As `fetch`, of rows that were left out of it and are waited for now."""
        self.fetch(parts, rows, step)

    def update_then_fetch(
        self, parts: Sequence[Part], grads: Gradients, step: int, wanted: Sequence[Part], rows: Floats
    ) -> Wait:
        """Applies gradients, then fetches rows of the batch after it. What it returns waits for both."""
        self.update(parts, grads, step)
        if any(len(part.keys) for part in wanted):
            self.fetch_late(wanted, rows, step + 1)
        return done

    def update_behind(self, parts: Sequence[Part], grads: Gradients, step: int) -> Wait:
        """Begins to apply gradients that nobody is waiting for. What it returns waits until they are applied."""
        self.update(parts, grads, step)
        return done

    def stores(self) -> Mapping[str, Rows]:
        """Who holds the tier's rows in this process, table by table, for snapshots; none if rows are elsewhere."""
        return {}

    def replan(self, keys: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """From now on the tier holds these keys' rows of shared tables; those it held were taken away before."""

    def counters(self) -> Mapping[str, Any]:
        """What the tier did so far in this process, for metrics and the report; only what it knows.

        hits, misses: rows that were at hand or not. bytes_in, bytes_out: received and sent; links: the same for each
        link by name, where there are several. staleness: how many reads saw a copy so many clocks old.
        """
        return {}

    def flush(self) -> None:
        """Returns when every update given to the tier has been applied."""

    def close(self) -> None:
        """Frees what the tier holds."""
