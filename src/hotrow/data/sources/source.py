"""`Source`: a raw log that says what its columns mean and can be read slice by slice, in any order.

A slice is some row groups of a Parquet file or some lines of a text file: enough to be worth a task, little enough that
losing one costs little. A packed text file can only be read from its beginning, so it is unpacked into pieces first,
and the pieces are sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from hotrow.data.convert import BadRows, Chunk
from hotrow.data.schema import Schema
from hotrow.data.split import AnySplit, Last
from hotrow.errors import DataError
from hotrow.settings import Settings

CHUNK_ROWS, CHUNK_BYTES = 1 << 14, 4 << 20
SLICE_BYTES = 64 << 20
"""About how much of a file a slice takes, before packing."""


class EmptyFile(DataError):
    """A file of a log in which nothing stands."""


class Slice(Settings):
    """A part of a file, from `first` up to `last`: row groups of Parquet, bytes of text."""

    file: str
    shown: str = Field(description="the file as the user knows it, where `file` is an unpacked piece of it")
    first: int
    last: int
    line: int | None = Field(None, description="the number of its first line, where that needs no counting")
    bytes: int = Field(description="before packing")


Pieces = Mapping[str, Sequence[Slice]]
"""For each packed file, what it was unpacked into."""


class Source:
    """Files of one log, in order. `schema`, `slices` and `chunks` are what a kind of log defines."""

    schema: Schema

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    @property
    def split(self) -> AnySplit:
        """How the log is divided if nobody says otherwise."""
        return Last(value=0.1)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the log beforehand; goes to the manifest."""
        return {}

    @property
    def converted(self) -> Schema:
        """The schema of what `chunks` gives: that of the log, less what can only be made of all of it."""
        return self.schema

    @property
    def packed(self) -> tuple[Path, ...]:
        """The files that must be unpacked before they can be sliced."""
        return ()

    def usable(self, bad: BadRows) -> tuple[Path, ...]:
        """The files without those that cannot be used as a whole, which are `bad`'s to decide."""
        raise NotImplementedError

    def slices(self, pieces: Pieces) -> list[Slice]:
        """The log in slices, in order."""
        raise NotImplementedError

    def chunks(self, part: Slice, bad: BadRows) -> Iterator[Chunk]:
        """A slice, chunk by chunk; rows that cannot even be read are `bad`'s to decide."""
        raise NotImplementedError


def files_of(path: Path | str, endings: Sequence[str] = ()) -> list[Path]:
    """The file itself, or the files of a folder in order of their names; hidden ones left out."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no {path}. Name a file, or a folder of files, with the log.")
    if path.is_file():
        return [path]
    files = [
        f
        for f in sorted(path.iterdir())
        if f.is_file() and not f.name.startswith((".", "_")) and (not endings or f.name.endswith(tuple(endings)))
    ]
    if not files:
        kinds = f" that ends in {', '.join(endings)}" if endings else ""
        raise DataError(f"The folder {path} has no file{kinds}.")
    return files
