"""The rows that one shard owns: its tables, opened by the first client that says hello, and what is done with them.

Everything a message says is checked here against the tables before a row is touched: table numbers, lengths, dims. Rows
are read and written by the native store without the GIL; Python's part of a request does not grow with its keys.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from hotrow import _native
from hotrow.errors import StoreError
from hotrow.files import write_text
from hotrow.service.once import Once
from hotrow.service.protocol import LARGEST_FRAME, Array, Message, ProtocolError, Wire
from hotrow.settings import Settings, parse
from hotrow.store.exchange import Exchange
from hotrow.store.journal import Journal
from hotrow.store.store import Floats, Keys, RowStore, fetch, read, update
from hotrow.table import Table

_LONGEST_NAME = 256


class Asked(NamedTuple):
    """The keys of a message, table by table: `keys[i]` is of `stores[i]`, whose rows begin at float `starts[i]`."""

    stores: list[RowStore]
    keys: list[Keys]
    starts: list[int]
    values: int

    @property
    def counts(self) -> list[int]:
        return [len(keys) for keys in self.keys]

    @property
    def dims(self) -> list[int]:
        return [store.table.dim for store in self.stores]


class _Kept(Settings):
    """What `shard.json` says of the rows beside it."""

    shard: int
    shards: int
    tables: list[str]
    run: str = ""


class Holding:
    """A shard's tables. `epoch` is another number whenever a shard process is started."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.epoch = secrets.randbits(63) | 1
        self.stores: list[RowStore] = []
        self.place: tuple[int, int] | None = None
        """Which shard of how many this is, once a client has said so."""
        self.applied: Once | Journal = Once() if folder is None else _journal(folder)
        self.run = ""
        """The run whose rows these are, where one has said so."""
        self._opened: list[dict[str, Any]] = []
        self._tables: list[str] = []
        self._seed = 0
        self._lock = threading.Lock()

    @cached_property
    def exchange(self) -> Exchange:
        """Answers caches; they number tables as the hello does."""
        return Exchange(self.stores)

    @property
    def durable(self) -> bool:
        """Whether rows outlive the process."""
        return self.folder is not None

    def open(self, tables: Sequence[dict[str, Any]], seed: int, shard: int, shards: int) -> None:
        """Opens the tables, or sees that they are those that are open."""
        parsed = [parse(Table, table, "tables") for table in tables]
        said = [table.model_dump(mode="json") for table in parsed]
        if len({table.name for table in parsed}) < len(parsed) or not 0 <= shard < shards <= 65535:
            raise ProtocolError("A client says hello with tables or a place that cannot be.")
        with self._lock:
            if self.place is None:
                kept = self._kept_tables((shard, shards))
                for table in parsed:
                    if table.name in kept and not (self._folder_of(table) / "head").exists():
                        raise _lacks(self._folder_of(table), "head")
                self.stores = [self._store(table, seed) for table in parsed]
                self._tables = sorted(kept.union(table.name for table in parsed))
                self._keep((shard, shards), self._tables)
                self._opened, self._seed, self.place = said, seed, (shard, shards)
                return
            self._check_same(said, seed, (shard, shards))

    def own(self, run: str) -> None:
        """Takes the rows as those of this run."""
        if self.place is None or not 0 < len(run) <= _LONGEST_NAME:
            raise ProtocolError(f"Rows are of a run with a name of up to {_LONGEST_NAME} characters.")
        with self._lock:
            self.run = run
            self._keep(self.place, self._tables)

    def _store(self, table: Table, seed: int) -> RowStore:
        return RowStore(table, seed, None if self.folder is None else self._folder_of(table))

    def _folder_of(self, table: Table) -> Path:
        assert self.folder is not None
        return self.folder / f"table-{quote(table.name, safe='')}"

    def _kept_tables(self, place: tuple[int, int]) -> set[str]:
        """The tables whose rows are here, once it is seen that they are those of this part of the key space."""
        if self.folder is None:
            return set()
        file = self.folder / "shard.json"
        if not file.exists():
            if any(self.folder.glob("table-*/head")):
                raise _lacks(self.folder, file.name)
            self._keep(place, [])  # before the first row, so that rows without it are known to lack it
            return set()
        try:
            there = _Kept.model_validate_json(file.read_bytes(), strict=True)
        except (OSError, ValidationError):
            raise StoreError(
                f"{file} is damaged: it does not say which shard's rows are in its folder. Put it back as it was, or "
                f"restore a checkpoint on shards with empty folders."
            ) from None
        if (there.shard, there.shards) != place:
            raise StoreError(
                f"The rows in {self.folder} are those of shard {there.shard} of {there.shards}, but this is "
                f"shard {place[0]} of {place[1]}. Give an empty folder and restore a checkpoint."
            )
        self.run = there.run
        return set(there.tables)

    def _keep(self, place: tuple[int, int], tables: list[str]) -> None:
        """Keeps beside the rows which part of the key space they are, of which tables, and of which run."""
        if self.folder is None:
            return
        beside = self.folder / ".shard.json.new"
        write_text(beside, _Kept(shard=place[0], shards=place[1], tables=tables, run=self.run).model_dump_json())
        beside.replace(self.folder / "shard.json")

    def close(self) -> None:
        """Lets go of the folder."""
        if self.durable:
            for store in self.stores:
                store.close()
            self.applied.close()  # type: ignore[union-attr]  # beside a folder it is a journal

    def _check_same(self, said: list[dict[str, Any]], seed: int, place: tuple[int, int]) -> None:
        if place != self.place:
            assert self.place is not None
            raise StoreError(
                f"This is shard {self.place[0]} of {self.place[1]}, and was asked to be shard {place[0]} of "
                f"{place[1]}. List the same shards in the same order, or start them anew and restore a checkpoint."
            )
        if seed != self._seed:
            raise StoreError(f"The shard's tables have seed {self._seed}, this client's {seed}. Give both the same.")
        here, there = ({t["name"]: t for t in tables} for tables in (self._opened, said))
        if [t["name"] for t in said] != [t["name"] for t in self._opened]:
            raise StoreError(
                f"The shard has tables {', '.join(here)}, this client {', '.join(there)}. Start the shards anew."
            )
        for name, table in there.items():
            other = [setting for setting in table if table[setting] != here[name].get(setting)]
            if other:
                raise StoreError(
                    f"Table {name} has another {' and '.join(other)} on the shard than in this client's settings. "
                    f"Give both the same, or start the shards anew."
                )

    def store(self, number: int) -> RowStore:
        """A table by its number in the hello."""
        if not 0 <= number < len(self.stores):
            raise ProtocolError(f"There is no table number {number}; there are {len(self.stores)}.")
        return self.stores[number]

    def fetch(self, message: Message) -> list[Array]:
        """Rows to train on, new ones included. Arrays: heads, packed keys; answered by values as `wire` has them.

        One that is asked again, for its answer was lost, counts a use twice; that is all it changes.
        """
        return self._fetch(message, 0, message.step)

    def fetch_after(self, message: Message) -> list[Array]:
        """The rows for the next step that a push asks for besides, if it does."""
        at = _arrays_of_push(message)
        return self._fetch(message, at, message.step + 1) if len(message.arrays) > at else []

    def _fetch(self, message: Message, at: int, step: int) -> list[Array]:
        asked = self._asked(message, at)
        rows = self._room(asked)
        fetch(asked.stores, asked.keys, [None] * len(asked.keys), rows, asked.starts, step)
        return _to_wire(rows, asked, message.wire)

    def read(self, message: Message) -> list[Array]:
        """Rows as they are; arrays as for `fetch`."""
        asked = self._asked(message)
        rows = self._room(asked)
        read(asked.stores, asked.keys, [None] * len(asked.keys), rows, asked.starts, message.step)
        return _to_wire(rows, asked, message.wire)

    def push(self, message: Message) -> tuple[Asked, Floats]:
        """The keys and gradients of a push, checked. Arrays: heads, packed keys, values, exponents with float16.

        Behind them may be heads and packed keys of rows to fetch once it is applied (`fetch_after`).
        """
        asked = self._asked(message)
        if len(message.arrays) > _arrays_of_push(message):
            self._room(self._asked(message, _arrays_of_push(message)))  # refused before anything is applied
        return asked, _from_wire(message, asked)

    def apply(self, asked: Asked, grads: Floats, step: int, push: _native.Push | None = None) -> None:
        """One step of each table's optimizer. `push` says what of it was done before the process died."""
        rates = [store.table.optimizer.lr_at(step) for store in asked.stores]
        update(asked.stores, asked.keys, [None] * len(asked.keys), grads, asked.starts, rates, None, push=push)

    def _asked(self, message: Message, at: int = 0) -> Asked:
        heads = array_of(message, at, np.int64, 2)
        packed = array_of(message, at + 1, np.uint8, 1)
        if heads.shape[1] != 4:
            raise ProtocolError("Keys need a number, a count, a base and a width for each table.")
        numbers = heads[:, 0].tolist()
        stores = [self.store(number) for number in numbers]
        if len(set(numbers)) < len(numbers):
            raise ProtocolError("A table stands twice in one message.")
        try:
            flat = _native.unpack_keys(np.ascontiguousarray(heads[:, 1:]).reshape(-1), packed)
        except ValueError as error:
            raise ProtocolError(f"Keys cannot be unpacked: {error}.") from None
        keys, starts, key, value = [], [], 0, 0
        for store, count in zip(stores, heads[:, 1].tolist(), strict=True):
            keys.append(flat[key : key + count])
            starts.append(value)
            key += count
            value += count * store.table.dim
        return Asked(stores, keys, starts, value)

    def _room(self, asked: Asked) -> Floats:
        if asked.values * 4 > LARGEST_FRAME:
            raise ProtocolError(
                f"The rows asked for take {asked.values * 4:,} bytes; a message holds {LARGEST_FRAME:,}. Ask for fewer."
            )
        return np.empty(asked.values, np.float32)


def _journal(folder: Path) -> Journal:
    """The journal beside the rows; a new one only where there are none, for it would not know what they were given."""
    lacks = not (folder / "journal" / "journal").exists()
    if lacks and ((folder / "shard.json").exists() or any(folder.glob("table-*/head"))):
        raise _lacks(folder, "journal/journal")
    return Journal(folder / "journal")


def _lacks(folder: Path, file: str) -> StoreError:
    return StoreError(
        f"{folder} holds a shard's rows, but lacks {file}. Put it back, or restore a checkpoint on shards with empty "
        f"folders."
    )


def sum_in_order(pushes: Sequence[tuple[Asked, Floats]]) -> tuple[Asked, Floats]:
    """One push of several: each row's gradients added in their order."""
    stores: dict[int, RowStore] = {}
    keys: dict[int, list[Keys]] = {}
    grads: dict[int, list[Floats]] = {}
    for asked, flat in pushes:
        for store, of_table, start in zip(asked.stores, asked.keys, asked.starts, strict=True):
            stores[id(store)] = store
            keys.setdefault(id(store), []).append(of_table)
            grads.setdefault(id(store), []).append(flat[start : start + len(of_table) * store.table.dim])
    summed = [_native.sum_by_key(keys[of], grads[of], store.table.dim) for of, store in stores.items()]
    starts = np.cumsum([0, *(len(g) for _, g in summed)]).tolist()
    all_grads = summed[0][1] if len(summed) == 1 else np.concatenate([np.empty(0, np.float32), *(g for _, g in summed)])
    return Asked(list(stores.values()), [k for k, _ in summed], starts[:-1], starts[-1]), all_grads


def shared_in(pushes: Sequence[Asked]) -> list[Array]:
    """For each push one bit a key, in the order of its keys: whether another push has the key too."""
    keys: dict[int, list[Keys]] = {}
    for asked in pushes:
        for store, of_table in zip(asked.stores, asked.keys, strict=True):
            keys.setdefault(id(store), []).append(of_table)
    found = {of: iter(_native.shared_keys(lists)) for of, lists in keys.items()}
    return [
        np.packbits(np.concatenate([np.empty(0, np.bool_), *(next(found[id(store)]) for store in asked.stores)]))
        for asked in pushes
    ]


def array_of(message: Message, number: int, dtype: npt.DTypeLike, dimensions: int) -> Array:
    """One of a message's arrays, if it is of this type."""
    if number >= len(message.arrays):
        raise ProtocolError(f"A message of kind {message.kind.name.lower()} has too few arrays: {len(message.arrays)}.")
    array = message.arrays[number]
    if array.dtype != dtype or array.ndim != dimensions:
        raise ProtocolError(
            f"Array {number} of a message of kind {message.kind.name.lower()} is {array.dtype} with {array.ndim} "
            f"dimensions, but should be {np.dtype(dtype)} with {dimensions}."
        )
    return array


def _arrays_of_push(message: Message) -> int:
    return 4 if message.wire == Wire.FLOAT16 else 3


def _to_wire(rows: Floats, asked: Asked, wire: Wire) -> list[Array]:
    return [rows] if wire == Wire.FLOAT32 else list(_native.encode_rows(rows, asked.counts, asked.dims, wire))


def _from_wire(message: Message, asked: Asked) -> Floats:
    if message.wire == Wire.FLOAT32:
        values = array_of(message, 2, np.float32, 1)
        if len(values) != asked.values:
            raise ProtocolError(f"The keys need {asked.values} values of gradients, but {len(values)} came.")
        return values
    halves = array_of(message, 2, np.uint16, 1)
    exponents = array_of(message, 3, np.int8, 1) if message.wire == Wire.FLOAT16 else None
    try:
        return _native.decode_rows(halves, exponents, asked.counts, asked.dims, message.wire)
    except ValueError as error:
        raise ProtocolError(f"Gradients cannot be decoded: {error}.") from None
