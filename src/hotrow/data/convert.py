"""From the rows of a log to samples of a data set, everything checked, the place of a fault named.

What happens to a cell that cannot be used is the user's choice:

    refuse   the first one ends the job, named by file, line or row, column and value
    skip     its row is set aside and counted
    missing  the cell counts as missing where that has a meaning (dense values, keys); else as `refuse`

A row without a session is at fault too: as one of a session of nobody's it would be clustered with strangers. With
`missing` it is a session of its own. All that is set aside or taken as missing is counted by its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotrow.data import columns
from hotrow.data.columns import Made
from hotrow.data.flat import arrow_schema
from hotrow.data.schema import MISSING, Column, Schema
from hotrow.errors import DataError, nearest

BadPolicy = Literal["refuse", "skip", "missing"]
_KEPT_EXAMPLES = 20
_DENSE = "a dense value is a finite number, and an integer at most 2^53"
_LABEL = {
    "binary": 'a label is a number from 0 to 1, unless the schema says that its kind is "number"',
    "number": "a label of this kind is a finite number, and an integer at most 2^53",
}
_WEIGHT = "a sample's weight is a finite number, 0 or more, and an integer at most 2^53"
_KEY = "a key is an integer or a text"
_SESSION = f"every sample needs a session, an integer or a text, and {MISSING} stands for none"


@dataclass
class BadRows:
    """What to do with what cannot be used, and what was found so far, by reason."""

    policy: BadPolicy = "refuse"
    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Rows set aside."""
        return sum(self.reasons.values())

    def refuse_or_skip(self, sentence: Callable[[int], str], count: int, reason: str, shown: int | None = None) -> None:
        """Raises the first sentence, or sets `count` rows aside and keeps some of the `shown` sentences as examples."""
        if self.policy != "skip":
            raise DataError(f"{sentence(0)} Mend it, or set such rows aside: --bad skip.")
        self.reasons[reason] = self.reasons.get(reason, 0) + count
        room = max(0, _KEPT_EXAMPLES - len(self.examples))
        self.examples += [sentence(i) for i in range(min(count if shown is None else shown, room))]

    def refuse_or_skip_file(self, sentence: str, rows: int, reason: str) -> None:
        """Raises the sentence, or sets a whole file of so many rows aside."""
        if self.policy != "skip":
            raise DataError(f"{sentence} Mend or remove it, or set it aside: --bad skip.")
        self.files.append(sentence)
        if rows:
            self.reasons[reason] = self.reasons.get(reason, 0) + rows

    def take_as_missing(self, column: str, count: int) -> None:
        """Counts cells of a column that stand for nothing from now on."""
        self.missing[column] = self.missing.get(column, 0) + count

    def found(self) -> dict[str, Any]:
        """As `of` reads it."""
        return {"reasons": self.reasons, "examples": self.examples, "missing": self.missing, "files": self.files}

    @staticmethod
    def of(policy: BadPolicy, findings: Iterable[dict[str, Any]]) -> BadRows:
        """What was found piece by piece, as one."""
        whole = BadRows(policy)
        for finding in findings:
            for reason, count in finding["reasons"].items():
                whole.reasons[reason] = whole.reasons.get(reason, 0) + count
            for column, count in finding["missing"].items():
                whole.take_as_missing(column, count)
            whole.examples += finding["examples"][: _KEPT_EXAMPLES - len(whole.examples)]
            whole.files += finding["files"]
        return whole

    def facts(self) -> dict[str, Any]:
        """For the manifest; nothing where nothing was found."""
        facts: dict[str, Any] = {}
        if self.reasons:
            facts["set_aside"] = {"rows": self.skipped, "reasons": self.reasons, "examples": self.examples}
        if self.files:
            facts["files_set_aside"] = self.files
        if self.missing:
            facts["taken_as_missing"] = self.missing
        return facts


@dataclass(frozen=True)
class Chunk:
    """Some rows of a log: columns as read, where each row stands, and how many bytes of the log they are."""

    rows: pa.RecordBatch
    place: Callable[[int], str]
    bytes: int = 0

    def column(self, name: str) -> pa.Array:
        """The column `name`, spelled out where it is dictionary-encoded; Arrow computes little on views of text."""
        names = self.rows.schema.names
        if name not in names:
            where = self.place(0) if len(self.rows) else "The log"
            raise DataError(f'{where}: there is no column "{name}".{nearest(name, names)}')
        array = self.rows.column(name)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        return array.cast(pa.large_string()) if pa.types.is_string_view(array.type) else array


class Checked:
    """Columns made from a chunk, without the rows that were set aside."""

    def __init__(self, chunk: Chunk, bad: BadRows) -> None:
        self._chunk, self._bad = chunk, bad
        self._drop = np.zeros(len(chunk.rows), dtype=bool)
        self.columns: dict[str, pa.Array] = {}

    def put(self, name: str, source: str, made: Made, takes: str, may_miss: bool = False) -> None:
        """Takes a column made from `source`; `takes` tells the user what such a column takes."""
        self.columns[name], wrong = made
        if wrong is None:
            return
        at = np.flatnonzero(wrong & ~self._drop)
        if may_miss and self._bad.policy == "missing":
            self._bad.take_as_missing(source, len(at))
            return
        if len(at):
            cells = self._chunk.column(source)

            def sentence(i: int) -> str:
                row = int(at[i])
                return f'{self._chunk.place(row)}: column "{source}" holds {_shown(cells[row])}; {takes}.'

            self._bad.refuse_or_skip(sentence, len(at), f'column "{source}"')
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
        return Chunk(self.rows(), lambda i: self._chunk.place(int(left[i])), self._chunk.bytes)


def convert(
    chunk: Chunk, log: Schema, prepared: Schema, bad: BadRows, seen: dict[str, set[str]] | None = None
) -> pa.RecordBatch:
    """The rows of `chunk` as samples of a data set; `prepared` is `log.prepared()`, or the data set's schema.

    What keys each feature has, integers or text, is added to `seen`.
    """
    checked = Checked(chunk, bad)
    for label in log.label_columns:
        made = columns.labels(chunk.column(label.name), label.kind)
        checked.put(label.name, label.name, made, _LABEL[label.kind])
    for name in log.dense:
        checked.put(name, name, columns.dense(chunk.column(name)), _DENSE, may_miss=True)
    for raw, feature in zip(log.features, prepared.features, strict=True):
        given = chunk.column(raw.column)
        of_it = None if seen is None else seen.setdefault(feature.name, set())
        if raw.kind == "key":
            made = columns.keys(given, feature.holds, of_it)
        else:
            made = columns.key_lists(given, raw, feature.holds, of_it)
        checked.put(feature.column, raw.column, made, _takes(feature), may_miss=True)
        if raw.weights is not None and feature.weights is not None:
            made = columns.weight_lists(chunk.column(raw.weights), raw, checked.columns[feature.column])
            checked.put(feature.weights, raw.weights, made, f'it takes a finite number for each key of "{raw.column}"')
    if log.user is not None and prepared.user is not None:
        checked.put(prepared.user, log.user, columns.keys(chunk.column(log.user)), _KEY, may_miss=True)
    if log.session is not None and prepared.session is not None:
        made = columns.present_keys(chunk.column(log.session))
        checked.put(prepared.session, log.session, made, _SESSION, may_miss=True)
    if log.time is not None and prepared.time is not None:
        made = columns.times(chunk.column(log.time))
        checked.put(prepared.time, log.time, made, "a time is an integer or a timestamp")
    if log.weight is not None:
        made = columns.weights(chunk.column(log.weight))
        checked.put(log.weight, log.weight, made, _WEIGHT)
    for feature in prepared.features:
        if feature.max_length is not None:
            for name in (feature.column, *([feature.weights] if feature.weights else [])):
                checked.columns[name] = columns.last(checked.columns[name], feature.max_length)
    return checked.rows(arrow_schema(prepared))


def _takes(feature: Column) -> str:
    """What a feature's column takes, for the sentence to the user."""
    known = {"integers": "integers, as the log had that was prepared", "text": "texts, as the log had"}
    said = f"its keys are {known[feature.holds]}" if feature.holds in known else _KEY
    return f"it takes a list of keys for each sample, and {said}" if feature.kind == "keys" else said


def _shown(cell: Any) -> str:
    value = cell.as_py()
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
