"""From the rows of a log to samples of a data set, everything checked, the place of a fault named.

What happens to a cell that cannot be used is the user's choice:

    refuse   the first one ends the job, named by file, line or row, column and value
    skip     its row is set aside and counted
    missing  the cell counts as missing where that has a meaning (dense values, keys); else as `refuse`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotrow.data import columns
from hotrow.data.columns import Made
from hotrow.data.dataset import arrow_schema
from hotrow.data.schema import Schema
from hotrow.errors import DataError, nearest

BadPolicy = Literal["refuse", "skip", "missing"]
_KEPT_EXAMPLES = 20
_KEY = "a key is an integer or a text"


@dataclass
class BadRows:
    """What to do with what cannot be used, and what was found so far."""

    policy: BadPolicy = "refuse"
    skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def refuse_or_skip(self, sentence: Callable[[int], str], count: int) -> None:
        """Raises the first sentence, or sets `count` rows aside and keeps some sentences as examples."""
        if self.policy != "skip":
            raise DataError(f"{sentence(0)} Mend it, or set such rows aside with bad = skip.")
        self.skipped += count
        room = max(0, _KEPT_EXAMPLES - len(self.examples))
        self.examples += [sentence(i) for i in range(min(count, room))]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a log: columns as read, and where each row stands."""

    rows: pa.RecordBatch
    place: Callable[[int], str]
    bytes_done: int = 0

    def column(self, name: str) -> pa.Array:
        """The column `name`, spelled out where it is dictionary-encoded."""
        names = self.rows.schema.names
        if name not in names:
            where = self.place(0) if len(self.rows) else "The log"
            raise DataError(f'{where}: there is no column "{name}".{nearest(name, names)}')
        array = self.rows.column(name)
        return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


class Checked:
    """Columns made from a chunk, without the rows that were set aside."""

    def __init__(self, chunk: Chunk, bad: BadRows) -> None:
        self._chunk, self._bad = chunk, bad
        self._drop = np.zeros(len(chunk.rows), dtype=bool)
        self.columns: dict[str, pa.Array] = {}

    def put(self, name: str, source: str, made: Made, takes: str, may_miss: bool = False) -> None:
        """Takes a column made from `source`; `takes` tells the user what such a column takes."""
        self.columns[name], wrong = made
        if wrong is None or (may_miss and self._bad.policy == "missing"):
            return
        at = np.flatnonzero(wrong & ~self._drop)
        if len(at):
            cells = self._chunk.column(source)

            def sentence(i: int) -> str:
                row = int(at[i])
                return f'{self._chunk.place(row)}: column "{source}" holds {_shown(cells[row])}; {takes}.'

            self._bad.refuse_or_skip(sentence, len(at))
            self._drop[at] = True

    def rows(self, schema: pa.Schema | None = None) -> pa.RecordBatch:
        """The rows that may be used."""
        if schema is None:
            rows = pa.record_batch(self.columns)
        else:
            rows = pa.record_batch([self.columns[name] for name in schema.names], schema=schema)
        return rows.filter(pa.array(~self._drop)) if self._drop.any() else rows

    def chunk(self) -> Chunk:
        """The same as a chunk, whose places are still those of the log."""
        left = np.flatnonzero(~self._drop)
        return Chunk(self.rows(), lambda i: self._chunk.place(int(left[i])), self._chunk.bytes_done)


def convert(chunk: Chunk, log: Schema, prepared: Schema, bad: BadRows) -> pa.RecordBatch:
    """The rows of `chunk` as samples of a data set; `prepared` is `log.prepared()`."""
    checked = Checked(chunk, bad)
    made = columns.labels(chunk.column(log.label))
    checked.put(log.label, log.label, made, "a label is a number from 0 to 1")
    for name in log.dense:
        checked.put(name, name, columns.dense(chunk.column(name)), "a dense value is a finite number", may_miss=True)
    for raw, feature in zip(log.features, prepared.features, strict=True):
        given = chunk.column(raw.column)
        made = columns.keys(given) if raw.kind == "key" else columns.key_lists(given, raw)
        checked.put(feature.column, raw.column, made, _KEY, may_miss=True)
        if raw.weights is not None and feature.weights is not None:
            made = columns.weight_lists(chunk.column(raw.weights), raw, checked.columns[feature.column])
            checked.put(feature.weights, raw.weights, made, f'it takes a finite number for each key of "{raw.column}"')
    for role in ("session", "user"):
        if (name := getattr(log, role)) is not None:
            checked.put(getattr(prepared, role), name, columns.keys(chunk.column(name)), _KEY, may_miss=True)
    if log.time is not None and prepared.time is not None:
        made = columns.times(chunk.column(log.time))
        checked.put(prepared.time, log.time, made, "a time is an integer or a timestamp")
    if log.weight is not None:
        made = columns.weights(chunk.column(log.weight))
        checked.put(log.weight, log.weight, made, "a sample's weight is a finite number, 0 or more")
    for feature in prepared.features:
        if feature.max_length is not None:
            for name in (feature.column, *([feature.weights] if feature.weights else [])):
                checked.columns[name] = columns.last(checked.columns[name], feature.max_length)
    return checked.rows(arrow_schema(prepared))


def _shown(cell: Any) -> str:
    value = cell.as_py()
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
