"""`Source`: a raw log that is read in chunks of bounded size and says what its columns mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrow.data.convert import BadRows, Chunk
from hotrow.data.schema import Schema
from hotrow.data.split import AnySplit, Last
from hotrow.errors import DataError

CHUNK_ROWS = 1 << 16


class Source:
    """Files of one log, in order. `schema` and `chunks` are what a kind of log defines."""

    schema: Schema

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    @property
    def bytes(self) -> int:
        """The size of the files as they are on disk."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def split(self) -> AnySplit:
        """How the log is divided if nobody says otherwise."""
        return Last(value=0.1)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the log beforehand; goes to the manifest."""
        return {}

    def chunks(self, bad: BadRows) -> Iterator[Chunk]:
        """The log, chunk by chunk; rows that cannot even be read are `bad`'s to decide."""
        raise NotImplementedError


def files_of(path: Path | str, endings: Sequence[str] = ()) -> list[Path]:
    """The file itself, or the files of a folder in order of their names; hidden ones left out."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no {path}. Name a file, or a folder of files, with the log.")
    if path.is_file():
        files = [path]
    else:
        files = [
            f
            for f in sorted(path.iterdir())
            if f.is_file() and not f.name.startswith((".", "_")) and (not endings or f.name.endswith(tuple(endings)))
        ]
        if not files:
            kinds = f" that ends in {', '.join(endings)}" if endings else ""
            raise DataError(f"The folder {path} has no file{kinds}.")
    for file in files:
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty.")
    return files
