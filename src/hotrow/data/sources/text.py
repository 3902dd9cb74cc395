"""Delimited text in blocks of whole lines, with the line number of every row.

A plain file is cut into slices anywhere: a slice has the lines that begin in it. A packed file is unpacked into pieces
first (its size again on disk, for as long as it takes to convert them), so that all cores convert what only one can
unpack. Slices are read 4 MB at a time and cut at the last line end, so that memory is bounded; a fault is named by its
line, which is counted only then. Cells stay text: guessing types from the first block is how other readers come to fail
on the thousandth. A cell that spans lines is not supported.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from hotrow.data.convert import BadRows, Chunk
from hotrow.data.sources import source
from hotrow.data.sources.source import EmptyFile, Pieces, Slice, Source
from hotrow.errors import DataError

BLOCK = 4 << 20
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


class TextSource(Source):
    """A log of text files that are all written the same way."""

    def __init__(self, files: Sequence[Path], dialect: Dialect) -> None:
        super().__init__(files)
        self.dialect = dialect

    @property
    def packed(self) -> tuple[Path, ...]:
        return tuple(file for file in self.files if file.suffix in _CODECS)

    def usable(self, bad: BadRows) -> tuple[Path, ...]:
        return tuple(file for file in self.files if not self._set_aside(file, bad))

    def _set_aside(self, file: Path, bad: BadRows) -> bool:
        with file.open("rb") as raw:
            blocks = _blocks(raw, file, 1 << 16)
            first = next(blocks, b"")
            _, _, rest = first.partition(b"\n")
            if not first.strip():
                bad.refuse_or_skip_file(f"{file} is empty.", 0, "empty file")
            elif self.dialect.columns is None and not rest.strip() and next(blocks, None) is None:
                bad.refuse_or_skip_file(f"{file} has no lines after its header.", 0, "empty file")
            else:
                return False
        return True

    def slices(self, pieces: Pieces) -> list[Slice]:
        return [part for file in self.files for part in pieces.get(str(file)) or _cut(file)]


def first_line(file: Path) -> str:
    """For telling kinds of files apart; without the mark that some editors put before UTF-8."""
    with file.open("rb") as raw:
        for block in _blocks(raw, file, 1 << 16):
            return block.split(b"\n", 1)[0].rstrip(b"\r").decode("utf-8-sig", "replace")
    raise EmptyFile(f"{file} is empty.")


def header(file: Path, dialect: Dialect) -> tuple[str, ...]:
    """The names of the columns, as the first line has them."""
    line = first_line(file)
    if "\ufffd" in line:
        raise DataError(f"{file}:1: the header is not UTF-8 text.")
    cells = line.split(dialect.delimiter)
    if dialect.quoted:
        try:
            (cells,) = csv.reader([line], delimiter=dialect.delimiter, skipinitialspace=True)
        except csv.Error as error:
            raise DataError(f"{file}:1: the header cannot be read: {error}.") from None
    names = tuple(cell.strip() for cell in cells)
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'{file}:1: the header has the column "{name}" twice.')
    return names


def unpack(file: Path, folder: Path, prefix: str, report: Callable[[int], None]) -> list[Slice]:
    """Writes the content of a packed file to `folder` in pieces of whole lines; `report` gets bytes read of it."""
    made: list[Slice] = []
    line, read = 1, 0
    with file.open("rb") as raw:
        blocks = _blocks(raw, file, BLOCK)
        block = next(blocks, b"")
        while block:
            path = folder / f"{prefix}-{len(made):06d}.txt"
            lines = length = 0
            with path.open("wb") as out:
                while block and length < source.SLICE_BYTES:
                    out.write(block)
                    lines, length = lines + block.count(b"\n"), length + len(block)
                    report(raw.tell() - read)
                    read = raw.tell()
                    block = next(blocks, b"")
            made.append(Slice(file=str(path), shown=str(file), first=0, last=length, line=line, bytes=length))
            line += lines
    return made


def read_text(part: Slice, dialect: Dialect, bad: BadRows) -> Iterator[Chunk]:
    """The rows of a slice, every column text."""
    shown, names, begins = Path(part.shown), dialect.columns, _Begins(part)
    skip = names is None and part.line == 1
    if names is None:
        names = header(shown, dialect)
    line = 0
    with Path(part.file).open("rb") as file:
        end = _line_start(file, part.last)
        file.seek(begins.byte)
        for block in _blocks(file, Path(part.file), BLOCK, end - begins.byte):
            if skip:
                skip, (_, _, block) = False, block.partition(b"\n")
                line += 1
            filled, lines = _without_blank_lines(block, line)
            if filled:
                yield _parse(filled, begins, lines, names, dialect, bad)
            line += block.count(b"\n")


class _Begins:
    """Where the first line of a slice stands."""

    def __init__(self, part: Slice) -> None:
        self._part = part
        with Path(part.file).open("rb") as file:
            self.byte = _line_start(file, part.first)

    @cached_property
    def line(self) -> int:
        """Its number; counted where nobody knows it, which only a fault asks for."""
        if self._part.line is not None:
            return self._part.line
        count, left = 1, self.byte
        with Path(self._part.file).open("rb") as file:
            while left > 0:
                block = file.read(min(left, BLOCK))
                count, left = count + block.count(b"\n"), left - len(block)
        return count

    def place(self, line: int) -> str:
        """How the user finds the line that is `line` lines further."""
        return f"{self._part.shown}:{self.line + line}"


def _cut(file: Path) -> list[Slice]:
    size, name, step = file.stat().st_size, str(file), source.SLICE_BYTES
    return [
        Slice(file=name, shown=name, first=at, last=end, line=None if at else 1, bytes=end - at)
        for at, end in ((at, min(size, at + step)) for at in range(0, size, step))
    ]


def _line_start(file: BinaryIO, at: int) -> int:
    """Where the first line begins that begins at byte `at` or later."""
    if at == 0:
        return 0
    file.seek(at - 1)
    file.readline()
    return file.tell()


def _blocks(raw: BinaryIO, file: Path, size: int, left: int | None = None) -> Iterator[bytes]:
    """Whole lines from where `raw` stands, about `size` bytes of them at a time, `left` bytes or to the end."""
    stream: Any = raw
    if file.suffix in _CODECS:
        stream = pa.CompressedInputStream(pa.PythonFile(raw), _CODECS[file.suffix])
    rest = b""
    while left is None or left > 0:
        try:
            read = stream.read(size if left is None else min(size, left))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file} cannot be read to its end: {error}. Is it cut short?") from error
        if not read:
            break
        left = None if left is None else left - len(read)
        cut = read.rfind(b"\n") + 1
        if cut:
            yield rest + read[:cut]
            rest = read[cut:]
        else:
            rest += read
    if rest:
        yield rest + b"\n"


def _parse(
    block: bytes, begins: _Begins, lines: np.ndarray, names: tuple[str, ...], dialect: Dialect, bad: BadRows
) -> Chunk:
    read = len(block)
    delimiter = dialect.delimiter
    if len(delimiter) > 1:
        block, delimiter = block.replace(delimiter.encode(), b"\t"), "\t"
    malformed: list[Any] = []

    def note(row: Any) -> str:
        malformed.append(row)
        return "skip"

    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(block),
            arrow_csv.ReadOptions(use_threads=False, column_names=names, block_size=len(block) + 1),
            arrow_csv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if dialect.quoted else False,
                ignore_empty_lines=False,
                invalid_row_handler=note,
            ),
            arrow_csv.ConvertOptions(
                column_types={name: pa.string() for name in names}, null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid as error:
        row = re.search(r"Row #(\d+)", str(error))
        place = begins.place(lines[int(row[1]) - 1] if row else lines[0])
        raise DataError(f"{place}: this is not a line of text in UTF-8 ({str(error).rstrip('.')}).") from None
    if malformed:
        at = np.array([row.number - 1 for row in malformed])

        def sentence(i: int) -> str:
            row = malformed[i]
            shown = row.text if len(row.text) <= 60 else row.text[:57] + "..."
            wanted, found = row.expected_columns, row.actual_columns
            return f"{begins.place(lines[at[i]])}: expected {wanted} cells, found {found}: {shown!r}."

        bad.refuse_or_skip(sentence, len(malformed), "malformed line")
        lines = np.delete(lines, at)
    rows = table.combine_chunks().to_batches()
    batch = rows[0] if rows else pa.RecordBatch.from_pylist([], schema=table.schema)
    return Chunk(batch, lambda i: begins.place(lines[i]), read)


def _without_blank_lines(block: bytes, line: int) -> tuple[bytes, np.ndarray]:
    """The block without empty lines, and the number of each line left, counted from the slice's first."""
    count = block.count(b"\n")
    lines = np.arange(line, line + count)
    if b"\n\n" not in block and b"\n\r\n" not in block and not block.startswith((b"\n", b"\r\n")):
        return block, lines
    split = block.split(b"\n")[:-1]
    kept = [i for i, text in enumerate(split) if text.strip(b"\r")]
    return b"".join(split[i] + b"\n" for i in kept), lines[kept]
