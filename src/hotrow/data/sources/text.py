"""Delimited text in blocks of whole lines, with the line number of every row.

A file is read (and, by its ending, decompressed) 8 MB at a time and cut at the last line end, so that memory
is bounded and a fault can be named by its line. Cells stay text: guessing types from the first block is how
other readers come to fail on the thousandth. A cell that spans lines is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from hotrow.data.convert import BadRows, Chunk
from hotrow.errors import DataError

BLOCK = 8 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
TEXT_ENDINGS = tuple(
    ending + packed for ending in (".csv", ".tsv", ".txt", ".dat", ".data") for packed in ("", *_CODECS)
)


@dataclass(frozen=True)
class Dialect:
    """How lines are cut into cells; `columns` are the names where the file has no header."""

    delimiter: str = ","
    columns: tuple[str, ...] | None = None
    quoted: bool = False


def first_line(file: Path) -> str:
    """For telling kinds of files apart."""
    for block, _ in _blocks(file, 1 << 16):
        return block.split(b"\n", 1)[0].rstrip(b"\r").decode("utf-8", "replace")
    raise DataError(f"{file} is empty.")


def read_text(files: Sequence[Path], dialect: Dialect, bad: BadRows) -> Iterator[Chunk]:
    """Rows of text columns, file after file."""
    before = 0
    for file in files:
        line, names, rows = 1, dialect.columns, 0
        for block, done in _blocks(file, BLOCK):
            if names is None:
                header, _, block = block.partition(b"\n")
                names = tuple(_header(header, dialect, file))
                line += 1
            if block:
                chunk = _parse(block, file, line, names, dialect, bad, before + done)
                line += block.count(b"\n")
                rows += len(chunk.rows)
                yield chunk
        if line == 1 or (dialect.columns is None and line == 2 and rows == 0):
            raise DataError(f"{file} has no lines{' after its header' * (line == 2)}.")
        before += file.stat().st_size


def _blocks(file: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines, about `size` bytes of them at a time, and how much of the file has been read."""
    with file.open("rb") as raw:
        stream: Any = raw
        if file.suffix in _CODECS:
            stream = pa.CompressedInputStream(pa.PythonFile(raw), _CODECS[file.suffix])
        rest = b""
        while True:
            try:
                read = stream.read(size)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{file} cannot be read to its end: {error}. Is it cut short?") from error
            if not read:
                break
            cut = read.rfind(b"\n") + 1
            if cut:
                yield rest + read[:cut], raw.tell()
                rest = read[cut:]
            else:
                rest += read
        if rest:
            yield rest + b"\n", raw.tell()


def _header(line: bytes, dialect: Dialect, file: Path) -> list[str]:
    try:
        text = line.decode("utf-8-sig").rstrip("\r")
    except UnicodeDecodeError:
        raise DataError(f"{file}:1: the header is not UTF-8 text.") from None
    names = [n.strip().strip('"') if dialect.quoted else n.strip() for n in text.split(dialect.delimiter)]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'{file}:1: the header has the column "{name}" twice.')
    return names


def _parse(
    block: bytes, file: Path, line: int, names: tuple[str, ...], dialect: Dialect, bad: BadRows, done: int
) -> Chunk:
    block, lines = _without_blank_lines(block, line)
    delimiter = dialect.delimiter
    if len(delimiter) > 1:
        block, delimiter = block.replace(delimiter.encode(), b"\t"), "\t"
    malformed: list[Any] = []

    def note(row: Any) -> str:
        malformed.append(row)
        return "skip"

    try:
        table = csv.read_csv(
            pa.BufferReader(block),
            csv.ReadOptions(use_threads=False, column_names=names, block_size=len(block) + 1),
            csv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if dialect.quoted else False,
                ignore_empty_lines=False,
                invalid_row_handler=note,
            ),
            csv.ConvertOptions(
                column_types={name: pa.string() for name in names}, null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid as error:
        row = re.search(r"Row #(\d+)", str(error))
        place = f"{file}:{lines[int(row[1]) - 1]}" if row else f"{file}, lines {lines[0]} to {lines[-1]}"
        raise DataError(f"{place}: this is not a line of text in UTF-8 ({str(error).rstrip('.')}).") from None
    if malformed:
        at = np.array([row.number - 1 for row in malformed])

        def sentence(i: int) -> str:
            row = malformed[i]
            shown = row.text if len(row.text) <= 60 else row.text[:57] + "..."
            wanted, found = row.expected_columns, row.actual_columns
            return f"{file}:{lines[at[i]]}: expected {wanted} cells, found {found}: {shown!r}."

        bad.refuse_or_skip(sentence, len(malformed))
        lines = np.delete(lines, at)
    rows = table.combine_chunks().to_batches()
    batch = rows[0] if rows else pa.RecordBatch.from_pylist([], schema=table.schema)
    return Chunk(batch, lambda i: f"{file}:{lines[i]}", done)


def _without_blank_lines(block: bytes, line: int) -> tuple[bytes, np.ndarray]:
    """The block without empty lines, and the line number of each line left."""
    count = block.count(b"\n")
    lines = np.arange(line, line + count)
    if b"\n\n" not in block and b"\n\r\n" not in block and not block.startswith((b"\n", b"\r\n")):
        return block, lines
    split = block.split(b"\n")[:-1]
    kept = [i for i, text in enumerate(split) if text.strip(b"\r")]
    return b"".join(split[i] + b"\n" for i in kept), lines[kept]
