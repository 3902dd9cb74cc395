"""`RowGroup`: what a data set is read by: some whole sessions, with everything their samples refer to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.dedup import renumber
from hotrow.data.parts import Part
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
                opened = pq.ParquetFile(path, metadata=footers.get(path))
                footers[path] = opened.metadata
                with opened:
                    columns = [name for name in opened.schema_arrow.names if name not in without]
                    read[file.table] = opened.read_row_group(self.number, columns, use_threads=False)
            except (OSError, KeyError, pa.ArrowException) as error:
                raise DataError(f"{path}, row group {self.number}, cannot be read: {error}.") from error
        return renumber(read, schema, {file.table: -sum(file.rows[: self.number]) for file in self.part.files})
