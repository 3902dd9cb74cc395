"""Logs of what users did with items, MovieLens-like: user, item, rating, time.

A rating of at least `threshold` is the label 1. Each event gets the user's history: the last `history` items
before it, by time (events of the same second in the order of the file). Events come out in order of time.

Histories need a user's events together, so the whole log is held in memory: 28 bytes an event, and as much
again while it is sorted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data import columns
from hotrow.data.convert import BadRows, Checked, Chunk
from hotrow.data.schema import Column, Schema
from hotrow.data.sources.source import CHUNK_ROWS, Source
from hotrow.data.sources.text import Dialect, first_line, read_text
from hotrow.errors import DataError, nearest

_NAMES = {
    "user": ("user", "userid", "user_id", "uid"),
    "item": ("item", "itemid", "item_id", "movieid", "movie_id", "product_id", "asin"),
    "rating": ("rating", "score", "stars"),
    "time": ("time", "timestamp", "unixtime", "date"),
}


class Events(Source):
    """`user::item::rating::time` (.dat), the same with tabs (u.data), or CSV with a header."""

    def __init__(self, files: Sequence[Path], threshold: float = 4.0, history: int = 20) -> None:
        super().__init__(files)
        self.threshold, self.history = threshold, history
        self._dialect, self._names = _dialect(self.files[0])
        self.schema = Schema(
            label="label",
            features=(
                Column(name="user"),
                Column(name="item"),
                Column(name="history", kind="keys", table="item", pooling="sequence", max_length=history),
            ),
            time="time",
            user="user",
        )

    def chunks(self, bad: BadRows) -> Iterator[Chunk]:
        log, done = self._read(bad)
        user, item, time = (log.column(name).to_numpy() for name in ("user", "item", "time"))
        liked = (log.column("rating").to_numpy() >= self.threshold).astype(np.float32)
        by_user = np.lexsort((time, user))  # stable: equal times keep the order of the file
        items = item[by_user]
        starts = _starts(user[by_user])
        position = np.empty_like(by_user)
        position[by_user] = np.arange(len(by_user))
        by_time = np.argsort(time, kind="stable")
        for at in range(0, len(by_time), CHUNK_ROWS):
            rows = by_time[at : at + CHUNK_ROWS]
            made = {
                "label": pa.array(liked[rows]),
                "user": pa.array(user[rows]),
                "item": pa.array(item[rows]),
                "history": _before(items, starts, position[rows], self.history),
                "time": pa.array(time[rows]),
            }
            yield Chunk(pa.record_batch(made), lambda i, rows=rows: f"event {rows[i] + 1}", done)  # type: ignore[misc]

    def _read(self, bad: BadRows) -> tuple[pa.Table, int]:
        """User, item, rating and time of every event, checked."""
        parts: list[pa.RecordBatch] = []
        done = 0
        for chunk in read_text(self.files, self._dialect, bad):
            checked = Checked(chunk, bad)
            for role in ("user", "item"):
                keys = columns.keys(chunk.column(self._names[role]))
                checked.put(role, self._names[role], keys, "a key is an integer or a text", may_miss=True)
            rating, time = self._names["rating"], self._names["time"]
            values, _ = columns.floats(chunk.column(rating))
            wrong = ~np.isfinite(values)
            checked.put("rating", rating, (pa.array(values), wrong), "a rating is a number")
            checked.put("time", time, columns.times(chunk.column(time)), "a time is an integer")
            parts.append(checked.rows())
            done = chunk.bytes_done
        return pa.Table.from_batches(parts), done


def _starts(users: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each event, sorted by user, where the user's events begin."""
    first = np.append(True, users[1:] != users[:-1])[: len(users)]
    return np.maximum.accumulate(np.where(first, np.arange(len(users)), 0))


def _before(items: NDArray[np.int64], starts: NDArray[np.int64], at: NDArray[np.int64], length: int) -> pa.ListArray:
    """The last `length` items of the same user before each of the positions `at`."""
    first = np.maximum(starts[at], at - length)
    counts = at - first
    ends = np.cumsum(counts)
    taken = np.arange(ends[-1] if len(ends) else 0) + np.repeat(at - ends, counts)
    return pa.ListArray.from_arrays(pa.array(np.append(0, ends).astype(np.int32)), pa.array(items[taken]))


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
    delimiter = "\t" if "\t" in line else ","
    header = [name.strip().strip('"') for name in line.split(delimiter)]
    names = {}
    for role, known in _NAMES.items():
        found = [name for name in header if name.lower() in known]
        if not found:
            raise DataError(
                f"{file}:1: there is no column for the {role}; looked for {', '.join(known)}."
                f"{nearest(role, header)} Other logs are read through a schema."
            )
        names[role] = found[0]
    return Dialect(delimiter, quoted=True), names
