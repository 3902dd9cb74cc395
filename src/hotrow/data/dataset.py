"""`DataSet`: prepared samples on disk, in Parquet files that any tool can read.

    schema.json                what the columns mean, and which of them repeat together (`groups`)
    train-00000.parquet        samples of a split in parts; zstd, row groups of about 64k samples
    train-00000.G.parquet      what group G keeps once for samples that repeat; column G of the samples is the row here
    train-00000.G.F.parquet    the keys that the lists of a sliding feature F are windows of: F_length from F_begin on
    manifest.json              what there must be (rows, bytes and checksums of every file) and what is known of it

Rows are numbered within their file, so in any tool a join gives the flat log back (DuckDB's `file_row_number`), and
`DataSet.flat` does. `dedup` says what is a repeat, `parts` how row groups are cut. Without groups only the first kind
of file is there, which is also what version 1 wrote: its data sets are read as they are.

The manifest is written last and the folder is renamed into its place, so a folder with a manifest is whole.
Opening checks names, sizes, schema and manifest; what is read of a Parquet file is compared as it is read (`checks`),
so damage is an error and never another value. `verify` reads everything again. Versions 1 and 2 lack these checksums.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pydantic import Field

from hotrow.data.dedup import SAMPLES, decode, tables
from hotrow.data.flat import PREPARED, arrow_schema
from hotrow.data.folder import NewFolder
from hotrow.data.parts import ROW_GROUP, File, Part, PartsWriter
from hotrow.data.rowgroups import Footers, RowGroup
from hotrow.data.schema import Schema
from hotrow.errors import DataError, SettingsError, nearest
from hotrow.files import sha256, write_text
from hotrow.sealed import read_object, to_text, unsealed
from hotrow.settings import Settings, parse

MANIFEST = "manifest.json"
SCHEMA = "schema.json"
FORMAT = "hotrow-dataset"
VERSION = 3

__all__ = ["DataSet", "DataSetWriter", "arrow_schema", "write_manifest"]


class Manifest(Settings):
    """What a data set must hold. `facts` is free: what its maker knows of it."""

    format: str = FORMAT
    version: int = VERSION
    splits: dict[str, tuple[Part, ...]]
    schema_sha256: str | None = Field(None, description="of the schema's file; None in version 2")
    prepared: str | None = Field(None, description="the digest of the plan of `prepare` that made it")
    facts: dict[str, Any] = Field(default_factory=dict)


class DataSet:
    """A prepared data set. `DataSet.open` checks that it is whole."""

    def __init__(self, path: Path, schema: Schema, manifest: Manifest, which: tuple[int, ...]) -> None:
        self.path = path
        self.schema = schema
        self.manifest = manifest
        self._which = which

    @staticmethod
    def open(path: Path | str) -> DataSet:
        """The data set in folder `path`; raises `DataError` where something of it is missing."""
        path = Path(path)
        if not path.is_dir():
            raise DataError(f"There is no data set {path}. Make one with: hotrow prepare SOURCE {path}")
        if not (path / MANIFEST).is_file():
            raise DataError(f"{path} has no {MANIFEST}: it is not a data set, or prepare did not finish.")
        which = _which(path / MANIFEST)
        manifest = _read_manifest(path / MANIFEST)
        dataset = DataSet(path, _read_schema(path / SCHEMA, manifest.schema_sha256), manifest, which)
        _check_tables(dataset)
        for known in dataset._all_files():
            file = path / known.file
            if not file.is_file():
                raise DataError(f"{path}: the file {known.file} is missing. Copy it again or prepare again.")
            if file.stat().st_size != known.bytes:
                raise DataError(
                    f"{file} has {file.stat().st_size:,} bytes, the manifest says {known.bytes:,}: it was cut "
                    f"short or altered. Copy it again or prepare again."
                )
        return dataset

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its maker knows of it, such as the best AUC reachable."""
        return self.manifest.facts

    @property
    def bytes(self) -> int:
        """What all files together take."""
        return sum(file.bytes for file in self._all_files())

    def parts(self, split: str) -> tuple[Part, ...]:
        """The parts of a split, in order."""
        if split not in self.manifest.splits:
            raise DataError(f'{self.path} has no split "{split}".{nearest(split, self.splits)}')
        return self.manifest.splits[split]

    def samples(self, split: str) -> int:
        """How many samples a split has."""
        return sum(part.samples for part in self.parts(split))

    def rows(self, table: str) -> int:
        """How many rows a table has in all splits: the distinct samples of a group, or the keys of a stretch."""
        return sum(sum(file.rows) for file in self._all_files() if file.table == table)

    def verify(self) -> None:
        """Reads every file again; raises `DataError` naming one that was altered."""
        for file in self._all_files():
            if sha256(self.path / file.file) != file.sha256:
                raise DataError(f"{self.path / file.file} was altered: its SHA-256 is not the manifest's.")

    def row_groups(self, split: str) -> list[RowGroup]:
        """What a split is read by, in order."""
        return [
            RowGroup(self.path, part, number) for part in self.parts(split) for number in range(len(part.row_groups))
        ]

    def flat(self, split: str) -> Iterator[pa.Table]:
        """The samples of a split with every column spelled out, in order, some thousands at a time.

        Exactly what was written: the samples of the log in the order of the data set, whatever it keeps once.
        """
        footers: Footers = {}
        for group in self.row_groups(split):
            with self.reading():
                read = group.read(self.schema, footers)
            yield decode(read, self.schema).replace_schema_metadata(PREPARED)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is read within is of this data set: raises `DataError` if another one has taken its place."""
        try:
            yield
        finally:  # files are opened by name, so only a look behind them says whose they were
            if not self._is_there():
                raise DataError(
                    f"The data set {self.path} was replaced or removed while it was read. Start again on what is there "
                    f"now; give a data set that is in use a new name instead of overwriting it."
                )

    def _is_there(self) -> bool:
        """Whether this data set is still at its path; a copy of it will do."""
        try:
            return _which(self.path / MANIFEST) == self._which or _read_manifest(self.path / MANIFEST) == self.manifest
        except (OSError, DataError):
            return False

    def _all_files(self) -> Iterator[File]:
        for parts in self.manifest.splits.values():
            for part in parts:
                yield from part.files


class DataSetWriter:
    """Takes prepared samples, split by split, and puts a whole data set in place when left without an error.

    with DataSetWriter(path, schema) as writer:
        writer.write("train", samples)
        writer.facts["best_auc"] = 0.8
    dataset = DataSet.open(path)
    """

    def __init__(
        self,
        path: Path | str,
        schema: Schema,
        *,
        overwrite: bool = False,
        row_group: int = ROW_GROUP,
        part: int = 1 << 22,
    ) -> None:
        if row_group < 1 or part < row_group:
            raise SettingsError(f"A part ({part}) must hold at least one row group ({row_group}) of one sample.")
        self.schema = schema
        self.facts: dict[str, Any] = {}
        self._folder = NewFolder(path, MANIFEST, overwrite)
        self._row_group = row_group
        self._part = part - part % row_group
        self._splits: dict[str, PartsWriter] = {}

    def __enter__(self) -> DataSetWriter:
        self._folder.__enter__()
        return self

    @property
    def folder(self) -> Path:
        """Where the data set is being written: a place for what is only needed meanwhile."""
        return self._folder.work

    def split(self, name: str) -> PartsWriter:
        """Makes sure that the split is there, even if nothing is ever written to it."""
        if name not in self._splits:
            self._splits[name] = PartsWriter(self._folder.work, name, self.schema, self._row_group, self._part)
        return self._splits[name]

    def write(self, split: str, samples: pa.RecordBatch | pa.Table) -> None:
        """Adds flat samples to a split, in order; where the schema has groups, a session's samples stand together."""
        self.split(split).write(samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
            except BaseException as failed:
                self._abandon()
                self._folder.__exit__(type(failed), failed, failed.__traceback__)
                raise
        else:
            self._abandon()
        self._folder.__exit__(kind, error, trace)

    def _finish(self) -> None:
        splits = {name: writer.finish() for name, writer in self._splits.items()}
        write_manifest(self._folder.work, self.schema, splits, self.facts)

    def _abandon(self) -> None:
        for writer in self._splits.values():
            writer.abandon()


def write_manifest(
    folder: Path,
    schema: Schema,
    splits: Mapping[str, Sequence[Part]],
    facts: Mapping[str, Any] | None = None,
    prepared: str | None = None,
) -> None:
    """Makes a data set of parts that are in `folder`: writes its schema, and last of all the manifest."""
    write_text(folder / SCHEMA, schema.to_json())
    manifest = Manifest(
        splits={name: tuple(parts) for name, parts in splits.items()},
        schema_sha256=sha256(folder / SCHEMA),
        prepared=prepared,
        facts=dict(facts or {}),
    )
    write_text(folder / MANIFEST, to_text(json.loads(manifest.model_dump_json()), indent=2))


def _which(manifest: Path) -> tuple[int, ...]:
    """What another manifest at this place would have different."""
    about = manifest.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _read_manifest(path: Path) -> Manifest:
    data = read_object(path, "The manifest")
    if data.get("format") != FORMAT:
        raise DataError(f"{path} is not the manifest of a data set: its format is not {FORMAT}.")
    version = data.get("version")
    if version not in (1, 2, VERSION):
        raise DataError(
            f"{path} is of format version {version}, this Hotrow reads versions 1 to {VERSION}. "
            f"Prepare the data set again, or use the Hotrow that wrote it."
        )
    try:
        if version == 1:
            return _as_now(parse(_Manifest1, data, str(path)))
        return parse(Manifest, unsealed(data) if version == VERSION else data, str(path))
    except SettingsError as error:
        raise DataError(str(error)) from None
    except ValueError as error:
        raise DataError(f"{path} was altered: {error}. Copy it again or prepare again.") from None


def _read_schema(path: Path, digest: str | None) -> Schema:
    try:
        schema = Schema.read(path)
        if digest is not None and sha256(path) != digest:
            raise DataError(f"{path} was altered: its SHA-256 is not the manifest's. Copy it again or prepare again.")
        return schema
    except SettingsError as error:
        raise DataError(str(error)) from None


def _check_tables(dataset: DataSet) -> None:
    """Refuses parts of other tables than the schema has, which only data sets without checksums can have."""
    try:
        wanted = list(tables(dataset.schema))
    except SettingsError as error:
        raise DataError(f"{dataset.path / SCHEMA}: {error}") from None
    for part in (part for parts in dataset.manifest.splits.values() for part in parts):
        if [file.table for file in part.files] != wanted or len({len(file.rows) for file in part.files}) > 1:
            raise DataError(
                f"{dataset.path}: the part {part.files[0].file} does not have the files that the schema asks for: "
                f"manifest or schema was altered. Copy them again, or prepare again."
            )


class _Part1(Settings):
    """A part as version 1 listed it: one file of flat samples."""

    file: str
    samples: int
    bytes: int
    sha256: str
    row_groups: tuple[int, ...]


class _Manifest1(Settings):
    format: str
    version: int
    splits: dict[str, tuple[_Part1, ...]]
    facts: dict[str, Any] = Field(default_factory=dict)


def _as_now(old: _Manifest1) -> Manifest:
    def part(p: _Part1) -> Part:
        return Part(files=(File(table=SAMPLES, file=p.file, rows=p.row_groups, bytes=p.bytes, sha256=p.sha256),))

    return Manifest(splits={name: tuple(part(p) for p in parts) for name, parts in old.splits.items()}, facts=old.facts)
