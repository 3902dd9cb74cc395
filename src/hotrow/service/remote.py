"""`RemoteRows`: a table's rows on all shards, as snapshots, checkpoints and changes of plan see those of one store.

A cut begins on all shards at once; while other workers push meanwhile it is one moment for each shard. Rows come and go
in chunks of some megabytes, so that no message grows with the table. Which snapshot the last cut became is remembered
by the shards, for another client may have taken it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import ServiceError, StoreError
from hotrow.service.client import Answer, Client
from hotrow.service.cuts import COLUMNS
from hotrow.service.protocol import Array, Kind, from_json, to_json
from hotrow.store.store import Columns, Cut, Keys, Moment
from hotrow.table import Table

_CHUNK_BYTES = 16 << 20


class RemoteRows:
    """The rows of one table, wherever they are."""

    def __init__(self, client: Client, table: Table, number: int) -> None:
        self.table, self.client, self.number = table, client, number
        width = {"float32": 4, "bfloat16": 2}[table.dtype]
        row_bytes = 20 + width * table.dim + 4 * table.optimizer.state_dim(table.dim)
        self.chunk = max(1, _CHUNK_BYTES // row_bytes)

    def __len__(self) -> int:
        return sum(int(said["rows"]) for said in self._stats())

    @property
    def bytes(self) -> int:
        """Memory of rows, state and index, on the shards."""
        return sum(int(said["bytes"]) for said in self._stats())

    @property
    def last_cut(self) -> str | None:
        """The snapshot that a cut of changes builds on, if it is the same on all shards."""
        names = {said["last_cut"] for said in self._stats()}
        return names.pop() if len(names) == 1 else None

    @last_cut.setter
    def last_cut(self, name: str | None) -> None:
        self.client.change_all(Kind.NAME_CUT, [self.facts(name=name)])

    def tracks_erased(self) -> bool:
        """Whether everything erased since the last cut is known on all shards."""
        return all(said["tracks_erased"] for said in self._stats())

    def begin_cut(self, cut: Cut) -> RemoteMoment:
        """Begins a cut on every shard."""
        return RemoteMoment(self, cut)

    def is_of(self, moment: Moment) -> bool:
        """Whether an ended cut was of the rows that are on the shards now."""
        return isinstance(moment, RemoteMoment) and moment.current

    def settle(self, steps: int, cut: str, sketch: npt.NDArray[np.uint8] | None) -> None:
        """Takes the rows just restored as those of snapshot `cut`, made after `steps` updates."""
        counters = np.empty(0, np.uint8) if sketch is None else sketch
        self.client.change_all(Kind.SETTLE, [self.facts(steps=steps, name=cut), counters])

    def set_steps(self, steps: int) -> None:
        """Takes the table as having had so many updates, on every shard."""
        self.client.change_all(Kind.SETTLE, [self.facts(steps=steps, name=None), np.empty(0, np.uint8)])

    def runs(self) -> dict[str, str]:
        """For the address of each shard that has rows of the table the run they are of; nothing where none said so."""
        said = zip(self.client.addresses, self.client.stats(), strict=True)
        return {address: of["run"] for address, of in said if of["tables"][self.table.name]["rows"]}

    def own(self, run: str) -> None:
        """From now on the shards' rows, of all tables, are those of this run."""
        self.client.change_all(Kind.OWN, [to_json({"run": run})])

    def clear(self) -> None:
        """Forgets every row."""
        self.client.change_all(Kind.CLEAR, [self.facts()])

    def erase(self, keys: Keys) -> int:
        """Removes the rows of `keys`; says how many there were, as far as no answer was lost."""
        erased = [
            self.client.change(shard, Kind.ERASE, [self.facts(), mine])
            for shard, mine in enumerate(self._split(keys))
            if len(mine)
        ]
        return sum(int(from_json(said[0])["erased"]) for answer in erased if (said := answer.result()))

    def take(self, keys: Keys) -> Columns:
        """The rows of those of `keys` that have one; they are gone afterwards. Read first, so that none is lost."""
        found = [self._columns([])]
        for mine in np.array_split(keys, len(keys) // self.chunk + 1):
            asked = [
                self.client.ask(shard, Kind.ROWS, [self.facts(), of_shard])
                for shard, of_shard in enumerate(self._split(mine))
                if len(of_shard)
            ]
            found += [self._columns(answer.result()) for answer in asked]
        self.erase(keys)
        return {column: np.concatenate([part[column] for part in found]) for column in COLUMNS}

    def import_(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes rows as a store exports them, over those that are there."""
        n = len(columns["keys"])
        if n == 0:
            return
        rows = {name: np.ascontiguousarray(column).reshape(n, -1) for name, column in columns.items()}
        if rows["values"].shape[1] != self.table.dim or rows["state"].size != n * self.table.optimizer.state_dim(
            self.table.dim
        ):
            raise StoreError(f"Table {self.table.name}: the columns do not have one row for each key.")
        for begin in range(0, n, self.chunk):
            end = min(n, begin + self.chunk)
            sent: list[Future[Answer]] = []
            for shard, at in enumerate(self._places(rows["keys"][begin:end].reshape(-1))):
                if len(at):
                    mine = [np.ascontiguousarray(rows[name][begin:end][at]).reshape(-1) for name in COLUMNS]
                    sent.append(self.client.change(shard, Kind.IMPORT, [self.facts(), *mine]))
            for answer in sent:
                answer.result()

    def facts(self, **said: Any) -> Array:
        """Facts of a message about this table."""
        return to_json({"table": self.number, **said})

    def _stats(self) -> list[dict[str, Any]]:
        return [said["tables"][self.table.name] for said in self.client.stats()]

    def _places(self, keys: Keys) -> list[npt.NDArray[np.int64]]:
        """For each shard where among `keys` its own are."""
        owners = _native.shards_of(np.ascontiguousarray(keys), self.client.shards)
        return [np.flatnonzero(owners == shard) for shard in range(self.client.shards)]

    def _split(self, keys: Keys) -> list[Keys]:
        return [np.ascontiguousarray(keys[at]) for at in self._places(keys)]

    def _columns(self, arrays: list[Array]) -> Columns:
        value = np.uint16 if self.table.dtype == "bfloat16" else np.float32
        types = (np.int64, value, np.float32, np.uint32, np.uint32, np.uint32)
        arrays = arrays or [np.empty(0, t) for t in types]
        return dict(zip(COLUMNS, arrays, strict=True))


class RemoteMoment:
    """A cut of one table on all shards, read one shard after another."""

    def __init__(self, rows: RemoteRows, cut: Cut) -> None:
        self._rows, self._client = rows, rows.client
        self._name = secrets.randbits(62)
        self._begun: list[int] = []
        self._left: list[int] = list(range(self._client.shards))
        self._chunk = 0
        self.current = False
        erased, sketches, steps = [np.empty(0, np.int64)], [], []
        try:
            facts = [rows.facts(cut=int(cut), begun=self._name)]
            begun = [self._client.ask(shard, Kind.BEGIN_CUT, facts) for shard in self._left]
            for shard, answer in enumerate(begun):
                said, gone, sketch = answer.result()
                self._begun.append(shard)
                steps.append(int(from_json(said)["steps"]))
                erased.append(gone)
                sketches.append(sketch)
        except BaseException:
            self.end_snapshot(kept=False)
            raise
        self.cut_steps = max(steps)
        self._erased = np.concatenate(erased)
        self._sketch: npt.NDArray[np.uint8] = np.maximum.reduce(sketches)

    def cut_erased(self) -> Keys:
        """Keys erased since the base."""
        return self._erased

    def cut_sketch(self) -> npt.NDArray[np.uint8]:
        """Counters of admission. Those of several shards counted different keys: together none is too low."""
        return self._sketch

    def read_snapshot(self, most: int) -> Columns:
        """Some rows of the cut; none when there are no more."""
        while self._left:
            self._chunk += 1
            shard, at_once = self._left[0], min(most, self._rows.chunk)
            said = self._rows.facts(begun=self._name, chunk=self._chunk, most=at_once)
            columns = dict(zip(COLUMNS, self._client.ask(shard, Kind.READ_CUT, [said]).result(), strict=True))
            if len(columns["keys"]):
                return columns
            self._left.pop(0)
            self._chunk = 0
        return self._rows._columns([])

    def end_snapshot(self, kept: bool) -> None:
        """Ends the cut on every shard; one that was started anew since knows nothing of it any more."""
        ended = [
            self._client.change(shard, Kind.END_CUT, [self._rows.facts(begun=self._name, kept=kept)])
            for shard in self._begun
        ]
        self.current = True
        for answer in ended:
            try:
                said = answer.result()
                self.current &= not said or bool(from_json(said[0])["current"])
            except ServiceError:
                self.current = False
