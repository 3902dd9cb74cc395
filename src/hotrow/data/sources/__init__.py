"""Raw logs of several kinds, read in slices; `find_source` finds out which kind it is.

`SourceSettings` is all there is to know of a log before it is read, as plain data: any process makes the same `Source`
of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hotrow.data.schema import Schema
from hotrow.data.sources.avazu import Avazu
from hotrow.data.sources.criteo import Criteo
from hotrow.data.sources.events import Events, looks_like_events
from hotrow.data.sources.source import EmptyFile, Slice, Source, files_of
from hotrow.data.sources.tabular import LOG, SCHEMAS, ParquetTable, TextTable, known_of, schema_of, table_files
from hotrow.data.sources.text import first_line
from hotrow.errors import SettingsError
from hotrow.settings import Settings, parse

__all__ = [
    "Avazu",
    "Criteo",
    "Events",
    "Format",
    "ParquetTable",
    "Slice",
    "Source",
    "SourceSettings",
    "TextTable",
    "find_source",
    "kind_of",
]

Format = Literal["auto", "criteo", "avazu", "events", "table"]


class SourceSettings(Settings):
    """A log: its kind, its files and what its kind needs to know."""

    kind: Literal["criteo", "avazu", "events", "table"]
    files: tuple[str, ...] = Field(min_length=1)
    columns: Schema | None = Field(None, description="what the columns of a table mean")
    threshold: float = 4.0
    history: int = Field(20, gt=0)
    split: str | None = Field(None, description="how the maker of the log wants it to be divided")
    facts: dict[str, Any] = Field(default_factory=dict)

    def source(self) -> Source:
        """The log itself."""
        files = [Path(file) for file in self.files]
        if self.kind == "criteo":
            return Criteo(files)
        if self.kind == "avazu":
            return Avazu(files)
        if self.kind == "events":
            return Events(files, self.threshold, self.history)
        assert self.columns is not None  # `find_source` asks for it
        table = ParquetTable if files[0].suffix == ".parquet" else TextTable
        return table(files, self.columns)


def find_source(
    path: Path | str,
    format: Format = "auto",
    schema: Schema | None = None,
    *,
    threshold: float = 4.0,
    history: int = 20,
) -> SourceSettings:
    """The log at `path`, a file or a folder. `threshold` and `history` are for event logs."""
    path = Path(path)
    kind = kind_of(path, schema) if format == "auto" else format
    if schema is not None and kind != "table":
        raise SettingsError(f"A log in the format {kind} has its own schema; give a schema only with format = table.")
    if kind != "table":
        files = tuple(str(file.absolute()) for file in files_of(path))
        return parse(SourceSettings, {"kind": kind, "files": files, "threshold": threshold, "history": history})
    files = tuple(str(file.absolute()) for file in table_files(path))
    columns = schema if schema is not None else schema_of(path)
    known = {name: value for name, value in known_of(path).items() if name in ("split", "facts")}
    return parse(SourceSettings, {"kind": "table", "files": files, "columns": columns, **known}, str(path / LOG))


def kind_of(path: Path, schema: Schema | None) -> Literal["criteo", "avazu", "events", "table"]:
    """Told by the schema at hand, or the first line."""
    if schema is not None or (path.is_dir() and any((path / name).is_file() for name in SCHEMAS)):
        return "table"
    file = next((file for file in files_of(path) if file.stat().st_size), None)
    if file is None:
        raise EmptyFile(f"{files_of(path)[0]} is empty.")
    if file.suffix == ".parquet":
        return "table"
    line = first_line(file)
    if line.count("\t") == 39:
        return "criteo"
    if line.startswith("id,click,hour"):
        return "avazu"
    if looks_like_events(line):
        return "events"
    return "table"
