"""Snapshots: every row of every table at one moment, in Arrow files other tools can read.

    rows/
      000-item.arrow       key, values[dim], state[n], clock, uses, last_used: one row each
      000-item.erased.arrow   keys erased since the base (incremental snapshots only)
      000-item.sketch.arrow   the counters of admission by count
      manifest.json        written last: tables, counts, sizes and sha256 of the files, the base if there is one; sealed

bfloat16 values are stored as their bits (uint16). Taking one costs a moment: `Snapshot` marks the cut, and from
then on a row that changes before it has been written is copied aside first, so memory grows by the rows changed
while `write` runs. An incremental snapshot holds the rows changed and the keys erased since its base; `restore`
follows the chain. It does not matter which tiers or shards the rows came from or go to.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from hotrow.errors import CheckpointError, MissedError, NotFiniteError, ServiceError, SettingsError
from hotrow.files import flush, sha256, write_text
from hotrow.peers import Peers
from hotrow.sealed import read_object, to_text, unsealed
from hotrow.settings import Settings, parse
from hotrow.store.store import Columns, Cut, Moment, Rows
from hotrow.table import ByCount, Table
from hotrow.tiers.router import Router
from hotrow.world import World

FORMAT = "hotrow-rows"
VERSION = 2
"""Manifests of version 1 had no checksum of their own."""
_CHUNK = 1 << 16


class Snapshot:
    """One moment of some stores. Call `write` once, in any thread, or `abort`."""

    def __init__(
        self,
        folder: Path,
        stores: Sequence[tuple[str, Rows]],
        steps: int,
        seed: int,
        base: Path | None = None,
        id: str | None = None,
    ) -> None:
        self.folder, self._cuts = folder, list[tuple[str, Rows, Moment]]()
        self.id = id or uuid.uuid4().hex
        self._beside = folder.with_name(f".{folder.name}.{self.id}")
        if not all(store.tracks_erased() for _, store in stores):
            base = None  # too much was erased since then to know it all: this one stands alone
        self._manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "steps": steps,
            "seed": seed,
        }
        if base is not None:
            self._manifest["base"] = {"path": os.path.relpath(base, folder), "id": read_manifest(base)["id"]}
            _check_base(base, self._manifest["base"]["id"], [store for _, store in stores])
        try:
            for name, store in stores:
                self._cuts.append((name, store, store.begin_cut(Cut.FULL if base is None else Cut.CHANGED)))
        except BaseException:
            self._end(kept=False)
            raise

    def write(self) -> None:
        """Writes the folder, beside its place first; on an error nothing of it is left."""
        beside, kept = self._beside, False
        try:
            beside.mkdir(parents=True)
            self._manifest["tables"] = [
                self._write_store(beside, f"{i:03d}-{quote(name, safe='')}", store.table, cut)
                for i, (name, store, cut) in enumerate(self._cuts)
            ]
            write_text(beside / "manifest.json", to_text(self._manifest))
            beside.rename(self.folder)
            flush(self.folder.parent)
            kept = True
        except ServiceError as error:
            raise MissedError(f"The snapshot {self.folder} was not written: {error} Nothing of it is left.") from error
        except OSError as error:
            raise CheckpointError(
                f"The snapshot {self.folder} could not be written: {error.strerror or error}. Nothing of it is left."
            ) from error
        finally:
            self._end(kept)
            if not kept:
                shutil.rmtree(beside, ignore_errors=True)

    def abort(self) -> None:
        """Gives the snapshot up; what it would have held counts as changed for the next one."""
        self._end(kept=False)

    def _end(self, kept: bool) -> None:
        for _, store, moment in self._cuts:
            moment.end_snapshot(kept)
            if kept and store.is_of(moment):
                store.last_cut = self.id
        self._cuts = []

    def _write_store(self, folder: Path, name: str, table: Table, native: Moment) -> dict[str, Any]:
        said: dict[str, Any] = {
            "name": table.name,
            "dim": table.dim,
            "dtype": table.dtype,
            "optimizer": table.optimizer.name,
            "steps": int(native.cut_steps),
        }
        schema = _schema(table)
        rows = 0
        with _HashedFile(folder / f"{name}.arrow") as file:
            with pa.ipc.new_file(file, schema) as writer:
                while len((columns := native.read_snapshot(_CHUNK))["keys"]):
                    _check_finite(columns, table)
                    writer.write_batch(_to_arrow(columns, table, schema))
                    rows += len(columns["keys"])
            said["rows"] = {"count": rows, **file.said()}
        for what, array in (("erased", native.cut_erased()), ("sketch", native.cut_sketch())):
            if len(array) == 0:
                continue
            with _HashedFile(folder / f"{name}.{what}.arrow") as file:
                batch = pa.record_batch([pa.array(array)], names=[what])
                with pa.ipc.new_file(file, batch.schema) as writer:
                    writer.write_batch(batch)
                said[what] = {"count": len(array), **file.said()}
        return said


def _check_finite(columns: Columns, table: Table) -> None:
    """Refuses rows that training has spoiled, so that no snapshot of them takes the place of a good one."""
    if not (_finite(columns["values"]) and _finite(columns["state"])):
        raise NotFiniteError(
            f"Rows of table {table.name} hold values that are not finite, {_spoiled(columns)} among them, so no "
            f"snapshot of them is kept: training does not converge. Lower the table's learning rate, or set its "
            f"optimizer.clip_norm."
        )


def _spoiled(columns: Columns) -> str:
    """The first keys whose rows are not finite."""
    keys = columns["keys"].reshape(-1)
    rows = zip(*(columns[name].reshape(len(keys), -1) for name in ("values", "state")), strict=True)
    wrong = keys[[not (_finite(values) and _finite(state)) for values, state in rows]].tolist()
    return f"key{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong[:5]))}"


def _finite(values: np.ndarray[Any, Any]) -> bool:
    """Whether all are: a look at them takes 4% of what hashing them does."""
    if values.dtype == np.uint16:  # bfloat16
        return not bool(((values & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())


def _check_base(base: Path, id: str, stores: Sequence[Rows]) -> None:
    """What changed is known since the last snapshot written or restored, and since no other."""
    for store in stores:
        if store.last_cut != id:
            raise CheckpointError(
                f"{base} is not the last snapshot of table {store.table.name} that this process wrote or restored; "
                f"an incremental one can build on no other. Take a full one, without a base."
            )


class _File(Settings):
    """A file of a table, as the manifest knows it."""

    file: str
    count: int
    bytes: int
    sha256: str


class _Table(Settings):
    name: str
    dim: int
    dtype: str
    optimizer: str
    steps: int
    rows: _File
    erased: _File | None = None
    sketch: _File | None = None


class _Base(Settings):
    path: str
    id: str


class _Manifest(Settings):
    format: str
    version: int
    id: str
    steps: int
    seed: int
    base: _Base | None = None
    tables: tuple[_Table, ...]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a snapshot; refuses what is none, is of another version, or was altered."""
    path = folder / "manifest.json"
    if not path.exists():
        raise CheckpointError(f"{folder} holds no snapshot: there is no manifest.json in it.")
    data = read_object(path, "The manifest", CheckpointError)
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a snapshot.")
    if data.get("version") not in (1, VERSION):
        raise CheckpointError(
            f"{path} is of version {data.get('version')}; this release reads versions 1 to {VERSION}."
        )
    try:
        found = parse(_Manifest, unsealed(data) if data["version"] == VERSION else data, str(path))
    except (SettingsError, ValueError) as error:
        raise CheckpointError(f"{path} was altered: {error}.") from None
    return found.model_dump(mode="json", exclude_none=True)


def chain(folder: Path) -> list[Path]:
    """The snapshot and those it builds on, the full one first."""
    folders, manifest = [folder], read_manifest(folder)
    while "base" in manifest:
        below = Path(os.path.normpath(folders[-1] / manifest["base"]["path"]))
        wanted = manifest["base"]["id"]
        manifest = read_manifest(below)
        if manifest["id"] != wanted:
            raise CheckpointError(f"{folders[-1]} builds on a snapshot that is no longer at {below}.")
        if below in folders:
            raise CheckpointError(f"{folders[-1]} builds on a snapshot, {below}, that builds on it.")
        folders.append(below)
    return folders[::-1]


def verify(folder: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The manifest, after every file it names was found whole; or every file of one of several parts."""
    manifest = read_manifest(folder)
    files = [table[what] for table in manifest["tables"] for what in ("rows", "erased", "sketch") if what in table]
    for file in files[part::parts]:
        _verify_file(folder, file)
    return manifest


def restore(folder: Path, router: Router, tables: Sequence[Table], seed: int, peers: Peers | None = None) -> int:
    """Empties the router's stores and fills them from a snapshot; the number of steps it was taken at.

    Everything is checked before anything changes; several ranks check a part each, and raise together.
    """
    folders, manifests = checked(
        folder, peers or Peers(World()), lambda manifest: check_tables(folder, manifest, tables, seed)
    )
    for tier in router.tiers.values():
        for store in tier.stores().values():
            store.clear()
    fill(folders, manifests, router, [table.name for table in tables], lambda said, columns: columns)
    for tier in router.tiers.values():
        for name, store in tier.stores().items():
            entries = [said for said in manifests[-1]["tables"] if said["name"] == name]
            # The sketches of several tiers counted different keys: together they never count one too low.
            sketches = [_read(folders[-1], said["sketch"], "sketch") for said in entries if "sketch" in said]
            steps = max(said["steps"] for said in entries)
            store.settle(steps, manifests[-1]["id"], np.maximum.reduce(sketches) if sketches else None)
    return int(manifests[-1]["steps"])


def fill(
    folders: Sequence[Path],
    manifests: Sequence[dict[str, Any]],
    router: Router,
    tables: Collection[str],
    change: Callable[[dict[str, Any], Columns], Columns],
) -> None:
    """Gives the rows of these tables to the tiers that hold them, changed from what a file of the chain says."""
    for f, manifest in zip(folders, manifests, strict=True):
        said_here = [said for said in manifest["tables"] if said["name"] in tables]
        for said in said_here:  # first, for a key erased on one tier may have a row on another
            _restore_erased(f, said, router)
        for said in said_here:
            with pa.memory_map(str(f / said["rows"]["file"])) as file, pa.ipc.open_file(file) as reader:
                for i in range(reader.num_record_batches):
                    router.give(said["name"], change(said, _from_arrow(reader.get_batch(i))))


def checked(
    folder: Path, peers: Peers, check: Callable[[dict[str, Any]], None]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """The chain of a snapshot and its manifests, once all ranks have found their part of the files whole."""
    folders, manifests, found = list[Path](), list[dict[str, Any]](), {"failure": "", "id": ""}
    try:
        folders = chain(folder)
        manifests = [verify(f, peers.world.rank, peers.world.size) for f in folders]
        check(manifests[-1])
        found["id"] = manifests[-1]["id"]
    except CheckpointError as error:
        found["failure"] = str(error)
    others = [json.loads(text) for text in peers.agree("restore", json.dumps(found))]
    if failures := [other["failure"] for other in others if other["failure"]]:
        raise CheckpointError(failures[0])
    if len({other["id"] for other in others}) > 1:
        raise CheckpointError(f"The ranks found different snapshots at {folder}; all must restore the same.")
    return folders, manifests


def _restore_erased(folder: Path, said: dict[str, Any], router: Router) -> None:
    if "erased" in said:
        keys = _read(folder, said["erased"], "erased")
        for tier, parts in router.route([said["name"]], [keys], [0]):
            if said["name"] in tier.stores():
                tier.stores()[said["name"]].erase(parts[0].keys)


def check_tables(folder: Path, manifest: dict[str, Any], tables: Sequence[Table], seed: int) -> None:
    """Refuses a snapshot of other tables, or of tables with other settings."""
    stored = {said["name"]: said for said in manifest["tables"]}
    if manifest["seed"] != seed:
        raise CheckpointError(
            f"{folder} was made with seed {manifest['seed']}, this run has seed {seed}: rows not in it would start "
            f"differently. Set the seed to {manifest['seed']}."
        )
    for table in tables:
        if table.name not in stored:
            raise CheckpointError(f"{folder} has no table {table.name}; it has {', '.join(stored)}.")
        said = stored[table.name]
        counters = table.admission.bytes // 2 * 2 if isinstance(table.admission, ByCount) else 0
        entries = [other for other in manifest["tables"] if other["name"] == table.name]  # one for each tier
        if max(other.get("sketch", {}).get("count", 0) for other in entries) != counters:
            raise CheckpointError(
                f"Table {table.name} counts keys for admission differently in {folder} and in this run's settings; "
                f"admission by count and the size of its sketch must be the same."
            )
        for what, here in (("dim", table.dim), ("dtype", table.dtype), ("optimizer", table.optimizer.name)):
            if said[what] != here:
                raise CheckpointError(
                    f"Table {table.name} has {what} {said[what]} in {folder}, but {here} in this run's settings."
                )
    for name in stored:
        if name not in {table.name for table in tables}:
            raise CheckpointError(f"{folder} has a table {name} that this run's settings do not have.")


def _schema(table: Table) -> pa.Schema:
    value = pa.uint16() if table.dtype == "bfloat16" else pa.float32()
    state_dim = table.optimizer.state_dim(table.dim)
    return pa.schema(
        [
            ("key", pa.int64()),
            ("values", pa.list_(value, table.dim)),
            ("state", pa.list_(pa.float32(), state_dim)),
            ("clock", pa.uint32()),
            ("uses", pa.uint32()),
            ("last_used", pa.uint32()),
        ],
        metadata={"table": table.name, "dtype": table.dtype, "optimizer": table.optimizer.name},
    )


def _to_arrow(columns: Columns, table: Table, schema: pa.Schema) -> pa.RecordBatch:
    n, state_dim = len(columns["keys"]), table.optimizer.state_dim(table.dim)
    state = (
        pa.FixedSizeListArray.from_arrays(pa.array(columns["state"]), state_dim)
        if state_dim
        else pa.array([[]] * n, schema.field("state").type)
    )
    values = pa.FixedSizeListArray.from_arrays(pa.array(columns["values"]), table.dim)
    meta = [pa.array(columns[c]) for c in ("clocks", "uses", "last")]
    return pa.record_batch([pa.array(columns["keys"]), values, state, *meta], schema=schema)


def _from_arrow(batch: pa.RecordBatch) -> Columns:
    def flat(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(batch.column(name).flatten().to_numpy(zero_copy_only=False))

    meta = {c: batch.column(n).to_numpy() for c, n in (("clocks", "clock"), ("uses", "uses"), ("last", "last_used"))}
    state = flat("state").astype(np.float32, copy=False)
    return {"keys": batch.column("key").to_numpy(), "values": flat("values"), "state": state, **meta}


def _read(folder: Path, said: dict[str, Any], column: str) -> np.ndarray[Any, Any]:
    with pa.memory_map(str(folder / said["file"])) as file, pa.ipc.open_file(file) as reader:
        array: np.ndarray[Any, Any] = reader.read_all().column(column).to_numpy()
    return array


def _verify_file(folder: Path, said: dict[str, Any]) -> None:
    path = folder / said["file"]
    try:
        size = path.stat().st_size
        if size != said["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {said['bytes']}: it is truncated or altered.")
        digest = sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    if digest != said["sha256"]:
        raise CheckpointError(f"{path} was altered: its sha256 is not the one in the manifest.")


class _HashedFile:
    """A file to write that hashes what goes through it and is on disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._hash = path, path.open("wb"), hashlib.sha256()
        self.closed = False

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Arrow closes what it wrote to; the file itself stays open until the block ends."""

    def said(self) -> dict[str, Any]:
        """What the manifest says of the file."""
        return {"file": self._path.name, "bytes": self._file.tell(), "sha256": self._hash.hexdigest()}

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
            self.closed = True
