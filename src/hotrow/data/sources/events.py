"""Logs of what users did with items, MovieLens-like: user, item, rating, time.

A rating of at least `threshold` is the label 1. Each event gets the user's history: the last `history` items
before it, by time (events of the same second in the order of the file). Events come out in order of time. One without
a user is at fault; taken as missing, it has no history and stands in nobody's.

A history needs a user's events together, so it is not made while the log is read: `prepare` routes the converted events
to buckets of users, each small enough to be held in memory, and makes the histories there (`prepare/histories.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from hotrow.data import columns
from hotrow.data.convert import BadRows, Checked, Chunk
from hotrow.data.schema import MISSING, Column, Schema
from hotrow.data.sources.source import Slice
from hotrow.data.sources.text import Dialect, TextSource, first_line, header, read_text
from hotrow.errors import DataError, nearest

_NAMES = {
    "user": ("user", "userid", "user_id", "uid"),
    "item": ("item", "itemid", "item_id", "movieid", "movie_id", "product_id", "asin"),
    "rating": ("rating", "score", "stars"),
    "time": ("time", "timestamp", "unixtime", "date"),
}
_USER = f"every event needs a user, an integer or a text, and {MISSING} stands for none"


class Events(TextSource):
    """`user::item::rating::time` (.dat), the same with tabs (u.data), or CSV with a header."""

    def __init__(self, files: Sequence[Path], threshold: float = 4.0, history: int = 20) -> None:
        dialect, self._names = _dialect(next((file for file in files if file.stat().st_size), files[0]))
        super().__init__(files, dialect)
        self.threshold, self.history = threshold, history
        sequence = Column(name="history", kind="keys", table="item", pooling="sequence", max_length=history)
        self.schema = Schema(
            label="label", features=(Column(name="user"), Column(name="item"), sequence), time="time", user="user"
        )

    @property
    def converted(self) -> Schema:
        return self.schema.model_copy(update={"features": self.schema.features[:2]})

    def chunks(self, part: Slice, bad: BadRows) -> Iterator[Chunk]:
        for chunk in read_text(part, self.dialect, bad):
            yield self._typed(chunk, bad)

    def _typed(self, chunk: Chunk, bad: BadRows) -> Chunk:
        checked = Checked(chunk, bad)
        user, item, rating, time = (self._names[role] for role in _NAMES)
        checked.put("user", user, columns.present_keys(chunk.column(user)), _USER, may_miss=True)
        checked.put("item", item, columns.keys(chunk.column(item)), "a key is an integer or a text", may_miss=True)
        values, _ = columns.floats(chunk.column(rating))
        liked = pa.array((values >= self.threshold).astype(np.float32))
        wrong = ~np.isfinite(values)
        checked.put("label", rating, (liked, wrong if wrong.any() else None), "a rating is a number")
        checked.put("time", time, columns.times(chunk.column(time)), "a time is an integer")
        return checked.chunk()


def looks_like_events(line: str) -> bool:
    """Whether a first line could be one of an event log."""
    if "::" in line:
        return len(line.split("::")) == 4
    if "\t" in line and len(line.split("\t")) == 4:
        return all(cell.replace(".", "", 1).isdigit() for cell in line.split("\t"))
    names = {name.strip().strip('"').lower() for name in line.split(",")}
    return all(names & set(known) for known in _NAMES.values())


def _dialect(file: Path) -> tuple[Dialect, dict[str, str]]:
    """How the file is written, and what it calls user, item, rating and time."""
    line = first_line(file)
    plain = {name: name for name in _NAMES}
    for delimiter in ("::", "\t"):
        if delimiter in line and looks_like_events(line):
            return Dialect(delimiter, tuple(_NAMES)), plain
    dialect, names = Dialect("\t" if "\t" in line else ",", quoted=True), {}
    given = header(file, dialect)
    for role, known in _NAMES.items():
        found = [name for name in given if name.lower() in known]
        if not found:
            raise DataError(
                f"{file}:1: there is no column for the {role}; looked for {', '.join(known)}."
                f"{nearest(role, given)} Other logs are read through a schema."
            )
        names[role] = found[0]
    return dialect, names
