"""`DeviceRows`: one table's rows on a device, as snapshots and changes of plan see them.

A row counts as there once it was updated or imported. A cut copies the table's rows on the device, which is fast and
takes as much device memory again until it is written; incremental cuts hold every row the device has. A change of plan
makes new `DeviceRows`, maybe while a cut of the old ones is still being written: what was cut last (`Cuts`) is theirs
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow.store.optimizers import Adagrad, RowWiseAdagrad
from hotrow.store.store import Columns, Cut, Moment
from hotrow.table import Table

if TYPE_CHECKING:
    from hotrow.tiers.device import DeviceTier

Keys = npt.NDArray[np.int64]


class Cuts:
    """The last snapshot of a table's rows on a device, through changes of plan."""

    last: str | None = None


class DeviceRows:
    """The rows of table number `number`; the tier's clocks have them from `begin` on."""

    def __init__(self, tier: DeviceTier, number: int, table: Table, begin: int, cuts: Cuts | None = None) -> None:
        self.table, self.begin = table, begin
        self.cuts = cuts or Cuts()
        self._tier, self._number = tier, number
        self._keys = tier.maps[number].keys
        # Uses count like clocks, from where a row came with more of them; rows that were imported are there.
        self._more_uses = np.zeros(len(self._keys), np.int64)
        self._imported = np.zeros(len(self._keys), np.bool_)

    def __len__(self) -> int:
        return int(self._there().sum())

    @property
    def steps(self) -> int:
        """Updates applied so far: what Adam corrects its bias by."""
        return self._tier.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._tier.steps = steps

    def set_steps(self, steps: int) -> None:
        """Takes the tables as having had so many updates."""
        self._tier.steps = steps

    @property
    def keys(self) -> Keys:
        """Of all rows that it has room for."""
        return self._keys

    @property
    def last_cut(self) -> str | None:
        """The snapshot that a cut of changes builds on."""
        return self.cuts.last

    @last_cut.setter
    def last_cut(self, cut: str | None) -> None:
        self.cuts.last = cut

    @property
    def bytes(self) -> int:
        """Device memory of the table's rows."""
        held = (self._values, self._state, self._clock, self._last)
        return sum(t.numel() * t.element_size() for t in held)

    def start(self) -> None:
        """Every row as it starts."""
        self._reset(np.arange(len(self._keys)))

    def begin_cut(self, cut: Cut) -> Moment:
        at = np.flatnonzero(self._there())
        return _Copied(self.cuts, self._tier.steps, self._columns(at, copy=True))

    def is_of(self, moment: Moment) -> bool:
        return isinstance(moment, _Copied) and moment.cuts is self.cuts

    def tracks_erased(self) -> bool:
        return True

    def settle(self, steps: int, cut: str, sketch: npt.NDArray[np.uint8] | None) -> None:
        """Takes the rows just restored as those of a snapshot; a device counts no keys for admission."""
        self._tier.steps = steps
        self.last_cut = cut

    def clear(self) -> None:
        """Every row as it starts."""
        self.start()
        self.cuts = Cuts()  # one that is still being written is of rows that are gone

    def erase(self, keys: Keys) -> int:
        """Rows of `keys` as they start; says how many were there."""
        at = self._find(keys)
        there = int(self._there()[at].sum())
        self._reset(at)
        return there

    def take(self, keys: Keys) -> Columns:
        """The rows of those of `keys` that are there; they are as they start afterwards."""
        at = self._find(keys)
        at = at[self._there()[at]]
        columns = _to_host(self._columns(at, copy=False))
        self._reset(at)
        return columns

    def import_(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes rows as `export` of a row store gives them."""
        n = len(columns["keys"])
        numbers = self._tier.maps[self._number].find(np.ascontiguousarray(columns["keys"]).reshape(-1))
        at = torch.from_numpy(numbers).long().to(self._tier.device)
        values = torch.from_numpy(np.ascontiguousarray(columns["values"]).reshape(n, self.table.dim).copy())
        if self.table.dtype == "bfloat16":
            values = values.view(torch.bfloat16)
        self._values[at] = values.to(self._tier.device)
        width = self.table.optimizer.state_dim(self.table.dim)
        state = torch.from_numpy(np.ascontiguousarray(columns["state"]).reshape(n, width).copy())
        self._state[at] = state.to(self._tier.device)
        for into, name in ((self._clock, "clocks"), (self._last, "last")):
            into[at] = torch.from_numpy(columns[name].reshape(-1).astype(np.int32)).to(self._tier.device)
        self._more_uses[numbers] = columns["uses"].reshape(-1).astype(np.int64) - columns["clocks"].reshape(-1)
        self._imported[numbers] = True

    @property
    def _values(self) -> Tensor:
        return self._tier.storage.rows_of(self._number)

    @property
    def _state(self) -> Tensor:
        return self._tier.storage.state_of(self._number)

    @property
    def _clock(self) -> Tensor:
        return self._tier.clock[self.begin : self.begin + len(self._keys)]

    @property
    def _last(self) -> Tensor:
        return self._tier.last[self.begin : self.begin + len(self._keys)]

    def _there(self) -> npt.NDArray[np.bool_]:
        there: npt.NDArray[np.bool_] = (self._clock > 0).cpu().numpy() | self._imported
        return there

    def _find(self, keys: Keys) -> npt.NDArray[np.int64]:
        found = self._tier.maps[self._number].find(np.ascontiguousarray(keys)).astype(np.int64)
        return found[found >= 0]

    def _reset(self, at: npt.NDArray[np.int64]) -> None:
        rows = torch.from_numpy(at).to(self._tier.device)
        self._values[rows] = self._tier.initial(self._number, self._keys[at]).to(self._tier.device)
        o = self.table.optimizer
        self._state[rows] = o.initial if isinstance(o, Adagrad | RowWiseAdagrad) else 0.0
        self._clock[rows] = 0
        self._last[rows] = 0
        self._more_uses[at] = 0
        self._imported[at] = False

    def _columns(self, at: npt.NDArray[np.int64], copy: bool) -> dict[str, Any]:
        """Columns as a row store has them, tensors still on the device."""
        rows = torch.from_numpy(at).to(self._tier.device)
        return {
            "keys": self._keys[at].copy() if copy else self._keys[at],
            "values": self._values[rows],
            "state": self._state[rows],
            "clocks": self._clock[rows],
            "more_uses": self._more_uses[at],
            "last": self._last[rows],
        }


def _to_host(columns: Mapping[str, Any]) -> Columns:
    values = columns["values"].cpu()
    values = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
    clocks = columns["clocks"].cpu().numpy().astype(np.uint32)
    return {
        "keys": columns["keys"],
        "values": values.reshape(-1).numpy(),
        "state": columns["state"].cpu().reshape(-1).numpy(),
        "clocks": clocks,
        "uses": (clocks.astype(np.int64) + columns["more_uses"]).astype(np.uint32),
        "last": columns["last"].cpu().numpy().astype(np.uint32),
    }


class _Copied:
    """A cut: the table's rows copied aside, given out a chunk at a time."""

    def __init__(self, cuts: Cuts, steps: int, columns: dict[str, Any]) -> None:
        self.cuts, self.cut_steps = cuts, steps
        self._columns, self._at = columns, 0

    def read_snapshot(self, most: int) -> Columns:
        chunk = {name: column[self._at : self._at + most] for name, column in self._columns.items()}
        self._at += most
        return _to_host(chunk)

    def cut_erased(self) -> Keys:
        return np.empty(0, np.int64)

    def cut_sketch(self) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def end_snapshot(self, kept: bool) -> None:
        self._columns = {}
