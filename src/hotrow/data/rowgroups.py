"""`RowGroup`: what a data set is read by: some whole sessions, with everything their samples refer to."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.checks import CheckedFile, read_footer
from hotrow.data.dedup import renumber, tables
from hotrow.data.parts import File, Part
from hotrow.data.schema import Schema
from hotrow.errors import DataError

Footers = dict[Path, Any]
"""The footers of the files that were read, so that each is parsed once."""


class RowGroup(NamedTuple):
    """One row group of a part."""

    folder: Path
    part: Part
    number: int

    @property
    def samples(self) -> int:
        return self.part.row_groups[self.number]

    def read(self, schema: Schema, footers: Footers, without: Collection[str] = ()) -> dict[str, pa.Table]:
        """Its tables but for the columns `without`, rows and keys counted from 0 as `decode` takes them."""
        read = {}
        for file in self.part.files:
            path = self.folder / file.file
            try:
                with self._opened(file, footers) as opened:
                    _check_columns(opened.schema_arrow, tables(schema)[file.table], path)
                    columns = [name for name in opened.schema_arrow.names if name not in without]
                    read[file.table] = opened.read_row_group(self.number, columns, use_threads=False)
            except (OSError, KeyError, ValueError, pa.ArrowException) as error:
                raise DataError(f"{path}, row group {self.number}, cannot be read: {error}.") from error
        return renumber(read, schema, {file.table: -sum(file.rows[: self.number]) for file in self.part.files})

    @contextmanager
    def _opened(self, file: File, footers: Footers) -> Iterator[pq.ParquetFile]:
        """The file, whose row group is compared with the manifest as it is read."""
        path = self.folder / file.file
        if file.checks is None:
            with pq.ParquetFile(path, metadata=footers.get(path)) as opened:
                footers[path] = opened.metadata
                yield opened
            return
        footer = footers[path] = footers.get(path) or read_footer(path, file.checks)
        with CheckedFile(path, footer, self.number, file.checks) as source:
            yield pq.ParquetFile(source, metadata=footer)


def _check_columns(found: pa.Schema, expected: pa.Schema, path: Path) -> None:
    """Refuses a file of other columns than the schema has, which only data sets without checksums can have."""
    for field in expected:
        if field.name not in found.names or found.field(field.name).type != field.type:
            raise DataError(
                f'{path} has no column "{field.name}" of type {field.type}, which the schema beside it has: one of the '
                f"two was altered. Copy them again, or prepare again."
            )
