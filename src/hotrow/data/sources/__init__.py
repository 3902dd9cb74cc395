"""Raw logs of several kinds, read in chunks of bounded size; `open_source` finds out which kind it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hotrow.data.schema import Schema
from hotrow.data.sources.avazu import Avazu
from hotrow.data.sources.criteo import Criteo
from hotrow.data.sources.events import Events, looks_like_events
from hotrow.data.sources.source import Source, files_of
from hotrow.data.sources.tabular import SCHEMAS, Tabular
from hotrow.data.sources.text import first_line
from hotrow.errors import SettingsError

__all__ = ["Avazu", "Criteo", "Events", "Format", "Source", "Tabular", "open_source"]

Format = Literal["auto", "criteo", "avazu", "events", "table"]


def open_source(
    path: Path | str,
    format: Format = "auto",
    schema: Schema | None = None,
    *,
    threshold: float = 4.0,
    history: int = 20,
) -> Source:
    """The log at `path`, a file or a folder. `threshold` and `history` are for event logs."""
    path = Path(path)
    kind = _kind(path, schema) if format == "auto" else format
    if schema is not None and kind != "table":
        raise SettingsError(f"A log in the format {kind} has its own schema; give a schema only with format = table.")
    if kind == "table":
        return Tabular(path, schema)
    files = files_of(path)
    if kind == "criteo":
        return Criteo(files)
    if kind == "avazu":
        return Avazu(files)
    return Events(files, threshold, history)


def _kind(path: Path, schema: Schema | None) -> Format:
    """Told by the schema at hand, or the first line."""
    if schema is not None or (path.is_dir() and any((path / name).is_file() for name in SCHEMAS)):
        return "table"
    file = files_of(path)[0]
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
