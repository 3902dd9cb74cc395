"""`DataSet`: prepared samples on disk, in Parquet files that any tool can read.

    schema.json          what the columns mean
    train-00000.parquet  samples of a split in parts; zstd, row groups of about 64k samples
    manifest.json        what there must be (samples, bytes and SHA-256 of every part) and what is known of it

The manifest is written last and the folder is renamed into its place, so a folder with a manifest is whole.
Opening checks names and sizes only, which costs nothing; `verify` reads everything again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pydantic import Field

from hotrow.data.folder import NewFolder
from hotrow.data.parts import Part, PartsWriter
from hotrow.data.schema import Schema
from hotrow.errors import DataError, SettingsError, nearest
from hotrow.files import sha256, write_text
from hotrow.settings import Settings, parse

MANIFEST = "manifest.json"
SCHEMA = "schema.json"
FORMAT = "hotrow-dataset"
VERSION = 1


class Manifest(Settings):
    """What a data set must hold. `facts` is free: what its maker knows of it."""

    format: str = FORMAT
    version: int = VERSION
    splits: dict[str, tuple[Part, ...]]
    facts: dict[str, Any] = Field(default_factory=dict)


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of a prepared data set's files, each once."""
    fields: dict[str, pa.DataType] = {schema.label: pa.float32()}
    fields |= {name: pa.float32() for name in schema.dense}
    for f in schema.features:
        fields[f.column] = pa.int64() if f.kind == "key" else pa.list_(pa.int64())
        if f.weights is not None:
            fields[f.weights] = pa.list_(pa.float32())
    fields |= {name: pa.int64() for name in (schema.session, schema.time, schema.user) if name is not None}
    if schema.weight is not None:
        fields[schema.weight] = pa.float32()
    return pa.schema(list(fields.items()))


class DataSet:
    """A prepared data set. `DataSet.open` checks that it is whole."""

    def __init__(self, path: Path, schema: Schema, manifest: Manifest) -> None:
        self.path = path
        self.schema = schema
        self.manifest = manifest

    @staticmethod
    def open(path: Path | str) -> DataSet:
        """The data set in folder `path`; raises `DataError` where something of it is missing."""
        path = Path(path)
        if not path.is_dir():
            raise DataError(f"There is no data set {path}. Make one with: hotrow prepare SOURCE {path}")
        if not (path / MANIFEST).is_file():
            raise DataError(f"{path} has no {MANIFEST}: it is not a data set, or prepare did not finish.")
        manifest = _read_manifest(path / MANIFEST)
        try:
            schema = Schema.read(path / SCHEMA)
        except SettingsError as error:
            raise DataError(str(error)) from None
        dataset = DataSet(path, schema, manifest)
        for part in dataset._all_parts():
            file = path / part.file
            if not file.is_file():
                raise DataError(f"{path}: the part {part.file} is missing. Copy it again or prepare again.")
            if file.stat().st_size != part.bytes:
                raise DataError(
                    f"{file} has {file.stat().st_size:,} bytes, the manifest says {part.bytes:,}: it was cut "
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
        return sum(part.bytes for part in self._all_parts())

    def parts(self, split: str) -> tuple[Part, ...]:
        """The files of a split, in order."""
        if split not in self.manifest.splits:
            raise DataError(f'{self.path} has no split "{split}".{nearest(split, self.splits)}')
        return self.manifest.splits[split]

    def samples(self, split: str) -> int:
        """How many samples a split has."""
        return sum(part.samples for part in self.parts(split))

    def verify(self) -> None:
        """Reads every part again; raises `DataError` naming one that was altered."""
        for part in self._all_parts():
            if sha256(self.path / part.file) != part.sha256:
                raise DataError(f"{self.path / part.file} was altered: its SHA-256 is not the manifest's.")

    def _all_parts(self) -> Iterator[Part]:
        for parts in self.manifest.splits.values():
            yield from parts


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
        row_group: int = 1 << 16,
        part: int = 1 << 22,
    ) -> None:
        if row_group < 1 or part < row_group:
            raise SettingsError(f"A part ({part}) must hold at least one row group ({row_group}) of one sample.")
        self.schema = schema
        self.facts: dict[str, Any] = {}
        self._folder = NewFolder(path, MANIFEST, overwrite)
        self._columns = arrow_schema(schema)
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
            self._splits[name] = PartsWriter(self._folder.work, name, self._columns, self._row_group, self._part)
        return self._splits[name]

    def write(self, split: str, samples: pa.RecordBatch | pa.Table) -> None:
        """Adds samples to a split, in order."""
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
        write_text(self._folder.work / SCHEMA, self.schema.to_json())
        manifest = Manifest(splits=splits, facts=self.facts)
        write_text(self._folder.work / MANIFEST, manifest.model_dump_json(indent=2) + "\n")

    def _abandon(self) -> None:
        for writer in self._splits.values():
            writer.abandon()


def _read_manifest(path: Path) -> Manifest:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DataError(f"{path} is not the manifest of a data set: its format is not {FORMAT}.")
    if data.get("version") != VERSION:
        raise DataError(
            f"{path} is of format version {data.get('version')}, this Hotrow reads version {VERSION}. "
            f"Prepare the data set again, or use the Hotrow that wrote it."
        )
    try:
        return parse(Manifest, data, str(path))
    except SettingsError as error:
        raise DataError(str(error)) from None
