"""`OwnedRows`: a rank's rows of one table, as snapshots, restores and changes of plan see them.

Rows come to every rank that may hold them and each takes its own. Of rows with several copies one rank gives them away,
to snapshots and to other tiers; the others let theirs go silently. So a snapshot holds every row once, whatever the
plan and the number of ranks, and any of them can restore it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.store.store import Columns, Cut, Keys, Moment, RowStore
from hotrow.tiers.device_rows import DeviceRows

Held = RowStore | DeviceRows


class OwnedRows:
    """The rows of `store` that one of `owners` ranks owns: those of keys whose owner is number `owner`.

    `gives` says whether this rank is the one that gives them away.
    """

    def __init__(self, store: Held, owner: int, owners: int, gives: bool) -> None:
        self.store, self.table = store, store.table
        self._owner, self._owners, self._gives = owner, owners, gives

    @property
    def last_cut(self) -> str | None:
        return self.store.last_cut

    @last_cut.setter
    def last_cut(self, cut: str | None) -> None:
        self.store.last_cut = cut

    def __len__(self) -> int:
        return len(self.store)

    @property
    def bytes(self) -> int:
        """Memory of the rows held here."""
        return self.store.bytes

    def begin_cut(self, cut: Cut) -> Moment:
        return self.store.begin_cut(cut) if self._gives else _Nothing(self.store)

    def is_of(self, moment: Moment) -> bool:
        return moment.of is self.store if isinstance(moment, _Nothing) else self.store.is_of(moment)

    def tracks_erased(self) -> bool:
        return not self._gives or self.store.tracks_erased()

    def settle(self, steps: int, cut: str, sketch: npt.NDArray[np.uint8] | None) -> None:
        self.store.settle(steps, cut, sketch)

    def set_steps(self, steps: int) -> None:
        self.store.set_steps(steps)

    def clear(self) -> None:
        self.store.clear()

    def erase(self, keys: Keys) -> int:
        return self.store.erase(keys)

    def take(self, keys: Keys) -> Columns:
        """The rows of those of `keys` that are here and are to be given; none of them is here afterwards."""
        taken = self.store.take(keys)
        return taken if self._gives else {name: column[:0] for name, column in taken.items()}

    def import_(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes those of the rows that this rank owns."""
        if self._owners > 1 and len(columns["keys"]):
            keys = np.ascontiguousarray(columns["keys"]).reshape(-1)
            mine = np.flatnonzero(_native.owners(keys, self._owners) == self._owner)
            columns = {name: column.reshape(len(keys), -1)[mine] for name, column in columns.items()}
        if len(columns["keys"]):
            self.store.import_(columns)


class _Nothing:
    """The cut of rows that another rank gives."""

    def __init__(self, of: Held) -> None:
        self.of, self.cut_steps = of, of.steps

    def read_snapshot(self, most: int) -> Columns:
        return {"keys": np.empty(0, np.int64)}

    def cut_erased(self) -> Keys:
        return np.empty(0, np.int64)

    def cut_sketch(self) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def end_snapshot(self, kept: bool) -> None:
        pass
