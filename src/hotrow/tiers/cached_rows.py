"""`CachedRows`: a table's rows behind a cache, as snapshots, checkpoints and changes of plan see them.

Whoever changes rows behind the cache goes through here, and their copies are forgotten; whoever takes rows away gets
them with what was changed in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotrow.store.store import Columns, Cut, Keys, Moment, Rows
from hotrow.table import Table

if TYPE_CHECKING:
    from hotrow.tiers.cached import CachedTier


class CachedRows:
    """The rows of one table, where they live; `tier` holds copies of some."""

    def __init__(self, tier: CachedTier, name: str, rows: Rows) -> None:
        self._tier, self._name, self._rows = tier, name, rows
        self.table: Table = rows.table

    @property
    def behind(self) -> Rows:
        """The rows without the cache."""
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Memory of the rows behind the cache."""
        return self._rows.bytes

    @property
    def last_cut(self) -> str | None:
        """The snapshot that a cut of changes builds on."""
        return self._rows.last_cut

    @last_cut.setter
    def last_cut(self, name: str | None) -> None:
        self._rows.last_cut = name

    def begin_cut(self, cut: Cut) -> Moment:
        """A cut of the rows behind the cache: `CachedTier.flush` comes first."""
        return self._rows.begin_cut(cut)

    def is_of(self, moment: Moment) -> bool:
        return self._rows.is_of(moment)

    def tracks_erased(self) -> bool:
        return self._rows.tracks_erased()

    def settle(self, steps: int, cut: str, sketch: npt.NDArray[np.uint8] | None) -> None:
        self._rows.settle(steps, cut, sketch)
        self._tier.set_steps(self._name, steps)

    def set_steps(self, steps: int) -> None:
        self._rows.set_steps(steps)
        self._tier.set_steps(self._name, steps)

    def clear(self) -> None:
        self._tier.drop(self._name)
        self._rows.clear()

    def erase(self, keys: Keys) -> int:
        self._tier.drop(self._name, keys)
        return self._rows.erase(keys)

    def take(self, keys: Keys) -> Columns:
        self._tier.flush()
        self._tier.drop(self._name, keys)
        return self._rows.take(keys)

    def import_(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._tier.drop(self._name, columns["keys"].reshape(-1))
        self._rows.import_(columns)
