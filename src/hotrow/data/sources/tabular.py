"""Any Parquet, CSV or TSV, one file or a folder of them, through a schema.

A folder may bring its own `schema.toml` or `schema.json`, and `log.json` with what its maker knows: how it
wants to be split, and facts for the manifest. `hotrow synth` writes such folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.convert import BadRows, Chunk
from hotrow.data.schema import Schema
from hotrow.data.sources.source import CHUNK_ROWS, Source, files_of
from hotrow.data.sources.text import TEXT_ENDINGS, Dialect, first_line, read_text
from hotrow.data.split import AnySplit, parse_split
from hotrow.errors import DataError, SettingsError, nearest

LOG = "log.json"
SCHEMAS = ("schema.toml", "schema.json")


class Tabular(Source):
    """Columns as the schema names them; others are not read."""

    def __init__(self, path: Path | str, schema: Schema | None = None) -> None:
        path = Path(path)
        super().__init__(files_of(path, (".parquet", *TEXT_ENDINGS)))
        kinds = {file.suffix == ".parquet" for file in self.files}
        if len(kinds) > 1:
            raise DataError(f"The folder {path} holds both Parquet and text files; name one kind of them.")
        self._parquet = kinds == {True}
        own = next((path / name for name in SCHEMAS if path.is_dir() and (path / name).is_file()), None)
        if schema is None and own is None:
            raise SettingsError(
                f"{path} does not say what its columns mean. Write a schema (label, dense, features) as "
                f"a TOML file and give it as --schema FILE."
            )
        self.schema = schema if schema is not None else Schema.read(own)  # type: ignore[arg-type]
        self._known = _read_log(path / LOG) if path.is_dir() and (path / LOG).is_file() else {}
        for file in self.files:
            self._check_columns(file)

    @property
    def split(self) -> AnySplit:
        return parse_split(self._known["split"]) if "split" in self._known else super().split

    @property
    def facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self._known.get("facts", {})
        return facts

    def chunks(self, bad: BadRows) -> Iterator[Chunk]:
        if not self._parquet:
            yield from read_text(self.files, _dialect(self.files[0]), bad)
            return
        before = 0
        for file in self.files:
            yield from self._parquet_chunks(file, before)
            before += file.stat().st_size

    def _parquet_chunks(self, file: Path, before: int) -> Iterator[Chunk]:
        size = file.stat().st_size
        with _opened(file) as parquet:
            first, total = 0, max(1, parquet.metadata.num_rows)
            try:
                for rows in parquet.iter_batches(CHUNK_ROWS, columns=list(self.schema.columns)):
                    done = before + size * (first + len(rows)) // total
                    yield Chunk(rows, lambda i, first=first: f"{file}, row {first + i + 1}", done)  # type: ignore[misc]
                    first += len(rows)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{file}, after row {first}: cannot be read: {error}.") from error

    def _check_columns(self, file: Path) -> None:
        if self._parquet:
            with _opened(file) as parquet:
                names, empty = parquet.schema_arrow.names, parquet.metadata.num_rows == 0
        else:
            dialect = _dialect(file)
            names, empty = [n.strip().strip('"') for n in first_line(file).split(dialect.delimiter)], False
        for column in self.schema.columns:
            if column not in names:
                raise DataError(f'{file}: there is no column "{column}".{nearest(column, names)}')
        if empty:
            raise DataError(f"{file} has no rows.")


def _opened(file: Path) -> Any:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} is not a whole Parquet file: {error}. Is it cut short?") from error


def _dialect(file: Path) -> Dialect:
    return Dialect("\t" if "\t" in first_line(file) else ",", quoted=True)


def _read_log(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from None
    if not isinstance(known, dict):
        raise DataError(f"{file} must hold a JSON object.")
    return known
