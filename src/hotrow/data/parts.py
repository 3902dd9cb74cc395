"""`PartsWriter`: Parquet files of equal row groups, whatever sizes of tables they are made from.

Files are zstd, and the same rows give the same bytes however they were chunked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from hotrow.files import flush, sha256
from hotrow.settings import Settings


class Part(Settings):
    """One Parquet file of a split."""

    file: str
    samples: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str
    row_groups: tuple[int, ...] = Field(description="samples in each row group")


class PartsWriter:
    """Cuts what it is given into row groups and parts of the same size, whatever size it comes in."""

    def __init__(self, folder: Path, name: str, columns: pa.Schema, row_group: int, part: int) -> None:
        self._folder, self._name, self._columns = folder, name, columns
        self._row_group, self._part = row_group, part
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._parts: list[Part] = []
        self._file: Any = None
        self._sink: Any = None
        self._groups: list[int] = []

    def write(self, samples: pa.RecordBatch | pa.Table) -> None:
        table = pa.Table.from_batches([samples]) if isinstance(samples, pa.RecordBatch) else samples
        self._waiting.append(table.select(self._columns.names).cast(self._columns))
        self._waiting_rows += len(table)
        if self._waiting_rows >= self._row_group:
            self._flush(self._row_group)

    def finish(self) -> tuple[Part, ...]:
        self._flush(1)
        self._close_part()
        return tuple(self._parts)

    def abandon(self) -> None:
        if self._file is not None:
            self._file.is_open = False  # no footer: the file is about to be deleted, and the disk may be full
            self._sink.close()
            self._file = None

    def _flush(self, least: int) -> None:
        """Writes row groups while at least `least` samples wait."""
        if self._waiting_rows < least:
            return
        table = pa.concat_tables(self._waiting)
        at = 0
        while len(table) - at >= least:
            group = table.slice(at, self._row_group)
            self._write_group(group)
            at += len(group)
        rest = table.slice(at)
        self._waiting, self._waiting_rows = ([rest] if len(rest) else []), len(rest)

    def _write_group(self, group: pa.Table) -> None:
        if self._file is None:
            self._sink = pa.OSFile(str(self._path()), "wb")
            self._file = pq.ParquetWriter(self._sink, self._columns, compression="zstd")
        self._file.write_table(group, row_group_size=self._row_group)
        self._groups.append(len(group))
        if sum(self._groups) >= self._part:
            self._close_part()

    def _path(self) -> Path:
        return self._folder / f"{self._name}-{len(self._parts):05d}.parquet"

    def _close_part(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._sink.close()
        self._file = None
        path = self._path()
        flush(path)
        self._parts.append(
            Part(
                file=path.name,
                samples=sum(self._groups),
                bytes=path.stat().st_size,
                sha256=sha256(path),
                row_groups=tuple(self._groups),
            )
        )
        self._groups = []
