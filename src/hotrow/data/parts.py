"""Parts: the Parquet files a split is made of, written one part at a time or as many as it takes.

A part is a set of files with one stem: the samples, and for each group of columns that repeat together the files that
keep them once (see `dedup`). All are zstd, and row group i of one belongs to row group i of the others.

Row groups end where a session ends, as late as `row_group` samples allow; only a session larger than that is cut. Where
they end depends on the samples alone, not on the sizes they were written in, so the same samples give the same bytes.
Samples that repeat take less room than flat ones, so a row group of them may hold more: that spares dictionaries and
seeks. They are still encoded `row_group` flat samples at a time, which is what writing holds in memory.

`PartWriter` writes one part: what a task of `prepare` uses, in any process. `PartsWriter` writes a split in one go.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from hotrow.data.checks import Checks, checks_of
from hotrow.data.dedup import SAMPLES, columns_of, encode, file_name, renumber, session_begins, tables, window_names
from hotrow.data.flat import arrow_schema
from hotrow.data.schema import Schema
from hotrow.files import flush, sha256
from hotrow.settings import Settings

ROW_GROUP = 1 << 16
"""Samples a row group holds at most, unless told otherwise."""

LEVEL = 3
"""zstd's level, for every column of every file."""

DELTA = "DELTA_BINARY_PACKED"


class File(Settings):
    """One Parquet file of a part."""

    table: str = Field(description='what it holds: "" the samples, "G" the rows of group G, "G.F" what F slides along')
    file: str
    rows: tuple[int, ...] = Field(description="rows in each row group")
    bytes: int = Field(ge=0)
    sha256: str
    checks: Checks | None = Field(None, description="of what is read of it; None in data sets of versions 1 and 2")


class Part(Settings):
    """One part of a split, as the manifest holds it: its files, the one with the samples first."""

    files: tuple[File, ...] = Field(min_length=1)

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Samples in each row group."""
        return self.files[0].rows

    @property
    def samples(self) -> int:
        return sum(self.row_groups)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """The checksums of all files, one after the other."""
        return "".join(file.sha256 for file in self.files)


class PartWriter:
    """Writes one part of a split: files `STEM*.parquet` in `folder`, which must exist.

        writer = PartWriter(folder, "train-00003", prepared_schema)
        for table in clustered:                # flat samples (`arrow_schema`), any sizes, each session's samples
            writer.write(table)                # together and in order of time
        part = writer.finish()                 # the manifest's entry, or None if there was no sample

    `schema` is a prepared one, whose `groups` say what is kept once; None or () writes flat samples. With `most`, a row
    group goes on to so many samples, while it takes no more room deduplicated than `row_group` samples do flat. Files
    of the same name, left by a task that was killed, are overwritten, and the bytes depend on samples, schema and these
    two alone. The files are seen to the disk by `finish`, but a set of files cannot appear at once: a part is there
    when whoever asked for it has noted what `finish` gave (`Part.model_dump_json()`, `Part.model_validate_json`). Holds
    a row group or two in memory. `dataset.write_manifest` makes a data set of the parts.
    """

    def __init__(
        self, folder: Path, stem: str, schema: Schema, *, row_group: int = ROW_GROUP, most: int | None = None
    ) -> None:
        self._row_groups = _RowGroups(schema, row_group)
        self._files = _Files(folder, stem, schema, most or 0)

    def write(self, samples: pa.RecordBatch | pa.Table) -> None:
        """Adds flat samples; columns that the schema does not have are left out."""
        for group in self._row_groups.add(samples):
            self._files.write(group)

    def finish(self) -> Part | None:
        """Ends the files; None, and no files, if no sample was written."""
        for group in self._row_groups.rest():
            self._files.write(group)
        return self._files.finish()

    def abandon(self) -> None:
        """Closes the files as they are, to be deleted: the disk may be full, or the task was stopped."""
        self._files.abandon()


class PartsWriter:
    """Writes a whole split, in parts of at most `part` samples; what it takes is what `PartWriter` takes.

    An Arrow schema instead of a `Schema` writes rows of any columns as they are: what a synthetic log is.
    """

    def __init__(self, folder: Path, name: str, schema: Schema | pa.Schema, row_group: int, part: int) -> None:
        self._folder, self._name, self._schema = folder, name, schema
        self._row_group, self._part = row_group, part
        self._row_groups = _RowGroups(schema, row_group)
        self._parts: list[Part] = []
        self._files: _Files | None = None

    def write(self, samples: pa.RecordBatch | pa.Table) -> None:
        """Adds flat samples."""
        for group in self._row_groups.add(samples):
            self._write_group(group)

    def finish(self) -> tuple[Part, ...]:
        """Ends the last part, and gives all of them."""
        for group in self._row_groups.rest():
            self._write_group(group)
        self._finish_part()
        return tuple(self._parts)

    def abandon(self) -> None:
        """Closes the files as they are, to be deleted."""
        if self._files is not None:
            self._files.abandon()

    def _write_group(self, group: pa.Table) -> None:
        if self._files is None:
            self._files = _Files(self._folder, f"{self._name}-{len(self._parts):05d}", self._schema)
        self._files.write(group)
        if self._files.samples + self._row_group > self._part:
            self._finish_part()

    def _finish_part(self) -> None:
        if self._files is not None:
            made = self._files.finish()
            if made is not None:
                self._parts.append(made)
            self._files = None


class _RowGroups:
    """Cuts flat samples into row groups, the same ones whatever sizes they come in."""

    def __init__(self, schema: Schema | pa.Schema, most: int) -> None:
        self._columns = arrow_schema(schema) if isinstance(schema, Schema) else schema
        self._session = schema.session if isinstance(schema, Schema) else None
        self._most = most
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def add(self, samples: pa.RecordBatch | pa.Table) -> Iterator[pa.Table]:
        """The row groups that are whole once these samples are there."""
        table = pa.Table.from_batches([samples]) if isinstance(samples, pa.RecordBatch) else samples
        self._waiting.append(table.select(self._columns.names).cast(self._columns))
        self._rows += len(table)
        # One sample more than a row group holds tells whether its last session has ended.
        yield from self._cut(self._most + int(self._session is not None))

    def rest(self) -> Iterator[pa.Table]:
        """The row groups of what still waits."""
        yield from self._cut(1)

    def _cut(self, least: int) -> Iterator[pa.Table]:
        if self._rows < least:
            return
        table, at = pa.concat_tables(self._waiting), 0
        while len(table) - at >= least:
            count = self._end(table.slice(at, self._most + 1))
            yield table.slice(at, count)
            at += count
        self._waiting, self._rows = ([table.slice(at)] if at < len(table) else []), len(table) - at

    def _end(self, table: pa.Table) -> int:
        """How many of these samples form the next row group: whole sessions, unless one alone is too many."""
        if len(table) <= self._most or self._session is None:
            return min(len(table), self._most)
        begins = np.flatnonzero(session_begins(table.column(self._session).to_numpy()))
        return int(begins[-1]) or self._most


class _Files:
    """The files of one part, a row group at a time. None is there before the first one."""

    def __init__(self, folder: Path, stem: str, schema: Schema | pa.Schema, most: int = 0) -> None:
        self._folder, self._stem, self._schema, self._most = folder, stem, schema, most
        self._shapes = tables(schema) if isinstance(schema, Schema) else {SAMPLES: schema}
        self._encodings = Encodings(schema)
        self._open: dict[str, tuple[Any, Any]] = {}
        self._rows: dict[str, list[int]] = {table: [] for table in self._shapes}
        self._counts = dict.fromkeys(self._shapes, 0)
        self._next: dict[str, list[pa.Table]] = {table: [] for table in self._shapes}
        self._room = 0

    @property
    def samples(self) -> int:
        return self._counts[SAMPLES]

    def write(self, samples: pa.Table) -> None:
        """Adds flat samples, to the next row group if it has room for them, else as the one after it."""
        made = {SAMPLES: samples}
        if isinstance(self._schema, Schema):
            made = renumber(encode(samples, self._schema), self._schema, self._counts)
        taken = sum(map(_bytes, made.values()))
        if taken > self._room or sum(map(len, self._next[SAMPLES])) + len(samples) > self._most:
            self._write_row_group()
            self._room = _bytes(samples)
        self._room -= taken
        for name, table in made.items():
            self._next[name].append(table)
            self._counts[name] += len(table)

    def _write_row_group(self) -> None:
        if not self._next[SAMPLES]:
            return
        for name, waiting in self._next.items():
            table = pa.concat_tables(waiting)
            if name not in self._open:
                sink = pa.OSFile(str(self._folder / file_name(self._stem, name)), "wb")
                self._open[name] = sink, pq.ParquetWriter(sink, table.schema, **self._encodings.of(name, table))
            self._open[name][1].write_table(table, row_group_size=max(1, len(table)))
            self._rows[name].append(len(table))
            waiting.clear()

    def finish(self) -> Part | None:
        """Ends every file and sees it to the disk."""
        self._write_row_group()
        for sink, writer in self._open.values():
            writer.close()
            sink.close()
        files = []
        for name in self._open:
            path = self._folder / file_name(self._stem, name)
            flush(path)
            files.append(
                File(
                    table=name,
                    file=path.name,
                    rows=tuple(self._rows[name]),
                    bytes=path.stat().st_size,
                    sha256=sha256(path),
                    checks=checks_of(path),
                )
            )
        self._open = {}
        return Part(files=tuple(files)) if files else None

    def abandon(self) -> None:
        for sink, writer in self._open.values():
            writer.is_open = False  # no footer: the file is about to be deleted, and the disk may be full
            sink.close()
        self._open = {}


class Encodings:
    """How Parquet encodes the columns of a data set's tables, as measured on synthetic logs (bytes, then time to read):

    - row numbers, begins of windows and times: DELTA_BINARY_PACKED, an eighth of a dictionary's bytes where most deltas
      are 0 or 1, and half of them for times;
    - sessions that stand together: PLAIN, whose repeats zstd finds: three quarters of a dictionary's bytes;
    - any other: a dictionary where values come back often enough to pay for it, else PLAIN for integers and
      BYTE_STREAM_SPLIT for floats, two thirds of the bytes for dense values that are all different.
    """

    def __init__(self, schema: Schema | pa.Schema) -> None:
        self._fixed: dict[str, dict[str, str]] = {}
        if isinstance(schema, Schema):
            numbers = {g.name: DELTA for g in schema.groups or ()}
            if schema.session is not None and schema.groups:
                numbers[schema.session] = "PLAIN"
            self._fixed[SAMPLES] = numbers | ({schema.time: DELTA} if schema.time is not None else {})
            for group in schema.groups or ():
                names = columns_of(group, schema).slides
                self._fixed[group.name] = {window_names(name)[0]: DELTA for name in names}

    def of(self, name: str, table: pa.Table) -> dict[str, Any]:
        """The writer's options for a table, judged by its first row group."""
        dictionary, encodings = [], {}
        for field in table.schema:
            nested = pa.types.is_list(field.type)
            path = f"{field.name}.list.element" if nested else field.name
            if field.name in self._fixed.get(name, {}):
                encodings[path] = self._fixed[name][field.name]
                continue
            column = table.column(field.name)
            values = pc.list_flatten(column) if nested else column
            if not pa.types.is_primitive(values.type) or _dictionary_pays(values):
                dictionary.append(path)
            else:
                encodings[path] = "BYTE_STREAM_SPLIT" if pa.types.is_floating(values.type) else "PLAIN"
        return {
            "compression": "zstd",
            "compression_level": LEVEL,
            "use_dictionary": dictionary or False,
            "column_encoding": encodings or None,
        }


def _bytes(table: pa.Table) -> int:
    """What the values of a table take, nulls or not."""
    total = 0
    for column in table.columns:
        if pa.types.is_list(column.type):
            column = pc.list_flatten(column)
            total += 4 * len(table)
        total += len(column) * column.type.bit_width // 8 if pa.types.is_primitive(column.type) else column.nbytes
    return total


def _dictionary_pays(values: pa.ChunkedArray) -> bool:
    width, distinct = values.type.bit_width, pc.count_distinct(values).as_py()
    bits = width * distinct + len(values) * max(1, distinct - 1).bit_length()
    return bool(bits < 0.9 * width * len(values))
