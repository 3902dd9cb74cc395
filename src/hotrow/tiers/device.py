"""The device tier: rows that the plan names, with their optimizer state, in accelerator memory (FAE's hot rows).

Rows have fixed slots in flat storage (`hotrow.kernels.Tables`); keys find them through a map on the host, so the device
holds values, state, clock and last use and nothing else. Every key the plan names has a slot from the beginning and
counts as admitted; a row that was never updated is what it starts from, and no snapshot holds it. Nothing is evicted.
`capabilities` says which tables can have rows here; those of all others are staged only, whatever they are.

Where results are computed on the device (`DeviceLookup`), rows are read and updated in place and never copied. The
calls of every tier, `fetch`, `read` and `update`, work too; they carry rows between device and host.

On a CPU the same code runs on dense arrays, with the kernels' plain twins: what CI tests.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow import _native, kernels
from hotrow.capabilities import kept_in_words, refused
from hotrow.errors import SettingsError
from hotrow.store.optimizers import Adagrad, Adam, Momentum, RowWiseAdagrad
from hotrow.store.store import RowStore
from hotrow.table import Table
from hotrow.tiers.device_rows import DeviceRows
from hotrow.tiers.router import Router
from hotrow.tiers.tier import Floats, Gradients, Part, Tier

Keys = npt.NDArray[np.int64]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_KEYS = np.empty(0, np.int64)
_SHAPES = 16  # of batches that are kept


class Placed(NamedTuple):
    """The slot of every lookup of a batch, the numbers of its rows that are here, and each table's other keys."""

    slots: npt.NDArray[np.int32]
    held: npt.NDArray[np.int32]
    others: list[Keys]
    hits: int


class DeviceTier(Tier):
    """Rows of `keys[table]`, in the order of their keys, on `device`."""

    name = "device"

    def __init__(
        self,
        tables: Sequence[Table],
        keys: Mapping[str, Keys] | None = None,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__(tables)
        self.device, self.seed, self.steps = torch.device(device), seed, 0
        self.stream: Any = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.hits = self.lookups = 0  # of the batches trained on
        self._stores: dict[str, DeviceRows] = {}
        self.replan(keys or {})

    def replan(self, keys: Mapping[str, Keys]) -> None:
        tables = list(self.tables.values())
        self.maps = [_native.KeyMap(np.unique(keys.get(table.name, _NO_KEYS))) for table in tables]
        counts = list(map(len, self.maps))
        held = [table for table, n in zip(tables, counts, strict=True) if n]
        if wrong := refused(held):
            raise SettingsError(f"{kept_in_words(wrong)} Name no key of theirs for it.")
        room = (2**31 - 2 - sum(counts)) // len(tables)  # numbers for rows of other tiers, which cost nothing
        schedules = list(dict.fromkeys(table.optimizer.schedule for table in tables))
        specs = [
            kernels.TableSpec(n, t.dim, _rule(t, schedules.index(t.optimizer.schedule)), room)
            for n, t in zip(counts, tables, strict=True)
        ]
        self._free()
        self.storage = kernels.Tables(specs, self.device, _DTYPES[held[0].dtype if held else "float32"])
        # One more than there are rows: a place for counts that are only padding.
        self.clock = torch.zeros(sum(counts) + 1, dtype=torch.int32, device=self.device)
        self.last = torch.zeros(sum(counts) + 1, dtype=torch.int32, device=self.device)
        self._rates: list[float] | None = None
        self._rest: tuple[Router, Router] | None = None
        # Batches are often alike, so the last shapes are kept; training and an evaluation ask from two threads.
        self.shape = functools.lru_cache(_SHAPES)(functools.partial(kernels.BatchShape, self.storage))
        begins = np.cumsum([0, *counts]).tolist()
        cuts = {name: rows.cuts for name, rows in self._stores.items()}
        self._stores = {
            table.name: DeviceRows(self, t, table, begins[t], cuts.get(table.name)) for t, table in enumerate(tables)
        }
        for rows in self._stores.values():
            rows.start()

    @property
    def segments(self) -> list[list[int]]:
        """Tables, by number, whose rows lie together: staged rows lie in the same order."""
        segment_of = self.storage.segment_of
        return [[t for t, own in enumerate(segment_of) if own == s] for s in range(max(segment_of) + 1)]

    def place(self, grouping: _native.Grouping) -> Placed:
        """Where the rows of a batch are."""
        s = self.storage
        behind = [s.staged_first[tables[0]] for tables in self.segments]
        return Placed(*grouping.place(self.maps, s.first, s.segment_of, behind))

    def _free(self) -> None:
        """Lets the old rows go before room is made for new ones."""
        self.__dict__.pop("storage", None)
        self.__dict__.pop("clock", None)
        self.__dict__.pop("last", None)
        self.__dict__.pop("shape", None)

    def rest(self, router: Router) -> Router:
        """How `router` routes keys that are not here."""
        if self._rest is None or self._rest[0] is not router:
            names = [name for name, tier in router.tiers.items() if tier is self]
            self._rest = (router, router.without(names[0]) if names else router)
        return self._rest[1]

    def counters(self) -> Mapping[str, Any]:
        return {"hits": self.hits, "misses": self.lookups - self.hits}

    def stores(self) -> Mapping[str, DeviceRows]:
        return self._stores

    @property
    def bytes(self) -> int:
        """Accelerator memory of the rows: values, state, clocks and last uses."""
        held = (self.storage.values, self.storage.state, self.clock, self.last)
        return sum(t.numel() * t.element_size() for t in held)

    def initial(self, table: int, keys: Keys) -> Tensor:
        """What the rows of `keys` start from, on the host."""
        settings = list(self.tables.values())[table]
        return torch.from_numpy(RowStore(settings, self.seed).initial(keys)).to(self.storage.dtype)

    def begin_step(self, step: int) -> None:
        """Sets the learning rates of step `step`, counted from 0, and counts the update that is about to come."""
        self.steps += 1
        rates = [table.optimizer.lr_at(step) for table in self.tables.values()]
        adam = any(table.optimizer.name == "adam" for table in self.tables.values())
        if adam or rates != self._rates:
            self.storage.set_step(self.steps, rates)
            self._rates = rates

    def count(self, held: Tensor, step: int | Tensor) -> None:
        """Counts one update of the rows numbered `held`."""
        self.clock[held] += 1
        self.last[held] = step

    def fetch(self, parts: Sequence[Part], rows: Floats, step: int) -> Any:
        self.read(parts, rows, step)
        return None

    def read(self, parts: Sequence[Part], rows: Floats, step: int) -> None:
        names = list(self.tables)
        for part in parts:
            t, dim = names.index(part.table), self.tables[part.table].dim
            numbers = torch.from_numpy(self.maps[t].find(part.keys)).long().to(self.device)
            found = self.storage.rows_of(t)[numbers].float().cpu().numpy()
            into = rows[part.start :]
            if part.positions is None:
                into[: found.size] = found.reshape(-1)
            else:
                into[: len(into) // dim * dim].reshape(-1, dim)[part.positions] = found

    def update(self, parts: Sequence[Part], grads: Gradients, step: int, ticket: Any = None) -> None:
        names = list(self.tables)
        specs, slots, each, held = [], [], [], []
        for part in parts:
            t, dim = names.index(part.table), self.tables[part.table].dim
            numbers = self.maps[t].find(part.keys)
            at = np.arange(len(numbers)) if part.positions is None else part.positions
            flat = grads.flat[part.start :]
            each.append(flat[: len(flat) // dim * dim].reshape(-1, dim)[at].reshape(-1))
            slots.append(numbers + self.storage.first[t])
            held.append(numbers.astype(np.int64) + self._stores[part.table].begin)
            specs.append(kernels.GroupSpec([kernels.FeatureSpec(t, "sequence", len(numbers))], 0, len(numbers)))
        self.begin_step(step)
        if not sum(map(len, slots)):
            return
        shape = kernels.BatchShape(self.storage, specs)
        here = torch.from_numpy(np.concatenate(slots).astype(np.int32)).to(self.device)
        offsets = torch.zeros(len(specs), dtype=torch.int64, device=self.device)
        grouping = kernels.group(self.storage, shape, here, offsets)
        kernels.update(
            self.storage, shape, grouping, torch.from_numpy(np.concatenate(each)).to(self.device), seed=self.random()
        )
        self.count(torch.from_numpy(np.concatenate(held)).to(self.device), step)

    def random(self) -> Tensor:
        """What stochastic rounding draws from at this step."""
        return torch.tensor([self.steps], dtype=torch.int64, device=self.device)


def _rule(table: Table, schedule: int) -> kernels.Rule:
    o = table.optimizer
    if isinstance(o, Momentum):
        return kernels.Rule(kind="sgd")  # it has no row here: others are staged, and their owner updates them
    return kernels.Rule(
        kind=o.name,
        lr=o.lr,
        eps=o.eps if isinstance(o, Adagrad | RowWiseAdagrad | Adam) else 0.0,
        weight_decay=o.weight_decay,
        clip_value=o.clip_value or 0.0,
        clip_norm=o.clip_norm or 0.0,
        bound=o.bound or 0.0,
        beta1=o.beta1 if isinstance(o, Adam) else 0.0,
        beta2=o.beta2 if isinstance(o, Adam) else 0.0,
        initial=o.initial if isinstance(o, Adagrad | RowWiseAdagrad) else 0.0,
        schedule=schedule,
    )
