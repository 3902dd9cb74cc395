"""Any Parquet, CSV or TSV, one file or a folder of them, through a schema.

A folder may bring its own `schema.toml` or `schema.json`, and `log.json` with what its maker knows: how it
wants to be split, and facts for the manifest. `hotrow synth` writes such folders.

The first file says of what kind each column is: numbers, text, times, or lists of these. A Parquet file in which a
column is of another kind cannot be used: a time in seconds among timestamps would sort wrong without a word. Row
groups that cannot be read are set aside, or end the job, from the first chunk that fails to their end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.convert import BadRows, Chunk
from hotrow.data.schema import Schema
from hotrow.data.sources import source
from hotrow.data.sources.source import CHUNK_BYTES, CHUNK_ROWS, Pieces, Slice, Source, files_of
from hotrow.data.sources.text import TEXT_ENDINGS, Dialect, TextSource, first_line, header, read_text
from hotrow.errors import DataError, SettingsError, nearest

LOG = "log.json"
SCHEMAS = ("schema.toml", "schema.json")


def table_files(path: Path) -> list[Path]:
    """The files of a tabular log, all of one kind."""
    files = files_of(path, (".parquet", *TEXT_ENDINGS))
    if len({file.suffix == ".parquet" for file in files}) > 1:
        raise DataError(f"The folder {path} holds both Parquet and text files; name one kind of them.")
    return files


def schema_of(path: Path) -> Schema:
    """The schema that a folder brings."""
    own = next((path / name for name in SCHEMAS if path.is_dir() and (path / name).is_file()), None)
    if own is None:
        raise SettingsError(
            f"{path} does not say what its columns mean. Write a schema (label, dense, features) as "
            f"a TOML file and give it as --schema FILE."
        )
    return Schema.read(own)


def known_of(path: Path) -> dict[str, Any]:
    """What the maker of a log folder says of it in `log.json`."""
    file = path / LOG
    if not path.is_dir() or not file.is_file():
        return {}
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from None
    if not isinstance(known, dict):
        raise DataError(f"{file} must hold a JSON object.")
    return known


class TextTable(TextSource):
    """Columns as the schema names them; others are not read."""

    def __init__(self, files: Sequence[Path], schema: Schema) -> None:
        self.schema = schema
        first = next((file for file in files if file.stat().st_size), files[0])
        super().__init__(files, Dialect("\t" if "\t" in first_line(first) else ",", quoted=True))

    def usable(self, bad: BadRows) -> tuple[Path, ...]:
        files = super().usable(bad)
        for file in files:
            _check_names(file, header(file, self.dialect), self.schema)
        return files

    def chunks(self, part: Slice, bad: BadRows) -> Iterator[Chunk]:
        return read_text(part, self.dialect, bad)


class ParquetTable(Source):
    """The same for Parquet, whose columns have types."""

    def __init__(self, files: Sequence[Path], schema: Schema) -> None:
        super().__init__(files)
        self.schema = schema

    def usable(self, bad: BadRows) -> tuple[Path, ...]:
        kinds: dict[str, tuple[str, Path]] = {}
        return tuple(file for file in self.files if not self._set_aside(file, kinds, bad))

    def _set_aside(self, file: Path, kinds: dict[str, tuple[str, Path]], bad: BadRows) -> bool:
        try:
            with pq.ParquetFile(file) as parquet:
                columns, rows = parquet.schema_arrow, parquet.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            empty = file.stat().st_size == 0
            sentence = f"{file} is not a whole Parquet file: {str(error).rstrip('.')}. Is it cut short?"
            bad.refuse_or_skip_file(f"{file} is empty." if empty else sentence, 0, "unreadable file")
            return True
        _check_names(file, columns.names, self.schema)
        if rows == 0:
            bad.refuse_or_skip_file(f"{file} has no rows.", 0, "empty file")
            return True
        for name in self.schema.columns:
            kind = _kind(columns.field(name).type)
            if kind and kind != kinds.setdefault(name, (kind, file))[0]:
                before, there = kinds[name]
                sentence = f'{file}: column "{name}" holds {kind}, but {before} in {there}.'
                bad.refuse_or_skip_file(sentence, rows, f'column "{name}" of another type')
                return True
        return False

    def slices(self, pieces: Pieces) -> list[Slice]:
        return [part for file in self.files for part in _cut(file)]

    def chunks(self, part: Slice, bad: BadRows) -> Iterator[Chunk]:
        names = list(self.schema.columns)
        with pq.ParquetFile(part.file, pre_buffer=False, buffer_size=1 << 18, page_checksum_verification=True) as file:
            groups = [file.metadata.row_group(i).num_rows for i in range(part.last)]
            share = part.bytes / max(1, sum(groups[part.first :]))
            for group in range(part.first, part.last):
                at, end = sum(groups[:group]), sum(groups[: group + 1])
                most = max(1, CHUNK_BYTES * groups[group] // max(1, file.metadata.row_group(group).total_byte_size))
                wanted = {"batch_size": min(CHUNK_ROWS, most), "row_groups": [group], "columns": names}
                try:
                    for rows in file.iter_batches(**wanted, use_threads=False):
                        rows.validate(full=True)  # text may not be UTF-8
                        place = _Rows(part.file, at)
                        yield Chunk(rows, place, round(share * len(rows)))
                        at += len(rows)
                except (OSError, pa.ArrowException) as error:
                    column = _broken(Path(part.file), group, names)
                    rows_lost = f"{part.file}, rows {at + 1} to {end} (row group {group + 1})"
                    sentence = f"{rows_lost}{column} cannot be read: {str(error).rstrip('.')}."
                    bad.refuse_or_skip(lambda i, said=sentence: said, end - at, "unreadable page", shown=1)  # type: ignore[misc]


class _Rows:
    """How the user finds a row of a Parquet file."""

    def __init__(self, file: str, first: int) -> None:
        self._file, self._first = file, first

    def __call__(self, row: int) -> str:
        return f"{self._file}, row {self._first + row + 1}"


def _cut(file: Path) -> list[Slice]:
    """Row groups in runs of about `SLICE_BYTES` before packing."""
    slices: list[Slice] = []
    with pq.ParquetFile(file) as parquet:
        meta = parquet.metadata
        sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
    first, size, name = 0, 0, str(file)
    for i, bytes_ in enumerate(sizes):
        size += bytes_
        if size >= source.SLICE_BYTES or i + 1 == len(sizes):
            slices.append(Slice(file=name, shown=name, first=first, last=i + 1, bytes=size))
            first, size = i + 1, 0
    return slices


def _broken(file: Path, group: int, names: Sequence[str]) -> str:
    """Which column of a row group cannot be read, for the sentence to the user."""
    with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        for name in names:
            try:
                for rows in parquet.iter_batches(CHUNK_ROWS, row_groups=[group], columns=[name], use_threads=False):
                    rows.validate(full=True)
            except (OSError, pa.ArrowException):
                return f': column "{name}"'
    return ""


def _kind(type_: pa.DataType) -> str:
    """What a column holds, as far as it matters; nothing for one of nothing but nulls."""
    if pa.types.is_dictionary(type_):
        return _kind(type_.value_type)
    if pa.types.is_null(type_):
        return ""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        return f"lists of {_kind(type_.value_type) or 'nothing'}"
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return "times"
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return "text"
    is_number = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean
    return "numbers" if any(check(type_) for check in is_number) else str(type_)


def _check_names(file: Path, names: Sequence[str], schema: Schema) -> None:
    for column in schema.columns:
        if column not in names:
            raise DataError(f'{file}: there is no column "{column}".{nearest(column, names)}')
        if names.count(column) > 1:
            raise DataError(f'{file}: there are two columns "{column}". Give one of them another name.')
