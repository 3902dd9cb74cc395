"""Histories of an event log: for each event the last items its user saw before it.

A bucket has all events of its users. It is sorted by user and time, each event's history is a window of the items
before it, and the events go on to the part their time belongs to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotrow.data.dedup import session_begins
from hotrow.data.flat import arrow_schema
from hotrow.data.prepare.begins import begins_of
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.route import BEGIN, FIRST, RoutedFile, groups_of, routed
from hotrow.data.prepare.spool import ROW, Report
from hotrow.data.split import SPLITS

_CHUNK = 1 << 16


def histories(work: Work, number: int, report: Report) -> dict[str, Any]:
    """The task."""
    groups = groups_of(work, "route", number)
    with RoutedFile(routed(work, "histories", number)) as out:
        if groups:
            _make(work, pa.concat_tables([_row_group(*group) for group in groups]), out, report)
    return {"groups": out.groups}


def _make(work: Work, events: pa.Table, out: RoutedFile, report: Report) -> None:
    schema = work.plan.samples
    splits = begins_of(work).division.of(events, schema)
    found = {name: events.column(name).to_numpy() for name in ("label", "user", "item", "time", ROW)}
    by_user = np.lexsort((found[ROW], found["time"], found["user"]))
    found = {name: values[by_user] for name, values in found.items()}
    parts = _parts(work, splits[by_user], found["time"])
    starts = _starts(found["user"])
    by_part = np.argsort(parts, kind="stable")
    columns = pa.schema([*arrow_schema(schema), pa.field(ROW, pa.int64())])
    for at in range(0, len(by_part), _CHUNK):
        rows = by_part[at : at + _CHUNK]
        history = before(found["item"], starts, rows, work.plan.source.history)
        made = {name: pa.array(values[rows]) for name, values in found.items()} | {"history": history}
        table = pa.table([made[name] for name in columns.names], schema=columns)
        out.add(parts[rows], table, {BEGIN: found["time"][rows], FIRST: found[ROW][rows]})
        report(len(rows), len(rows))


def _row_group(file: Path, group: int) -> pa.Table:
    with pq.ParquetFile(file) as source:
        return source.read_row_group(group, use_threads=False)


def _parts(work: Work, splits: NDArray[np.int8], time: NDArray[np.int64]) -> NDArray[np.int64]:
    """The part of each event, by its time."""
    ahead = begins_of(work).parts
    found = np.zeros(len(time), np.int64)
    for split, name in enumerate(SPLITS):
        chosen = splits == split
        numbers = np.array([i for i, part in enumerate(ahead) if part.split == name], np.int64)
        cuts = np.array([ahead[i].begin for i in numbers], np.int64)
        if chosen.any():
            found[chosen] = numbers[np.searchsorted(cuts, time[chosen], side="right") - 1]
    return found


def _starts(users: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each event, sorted by user, where the user's events begin; one without a user is nobody else's."""
    return np.maximum.accumulate(np.where(session_begins(users), np.arange(len(users)), 0))


def before(items: NDArray[np.int64], starts: NDArray[np.int64], at: NDArray[np.int64], length: int) -> pa.ListArray:
    """The last `length` items of the same user before each of the positions `at`."""
    first = np.maximum(starts[at], at - length)
    counts = at - first
    ends = np.cumsum(counts)
    taken = np.arange(ends[-1] if len(ends) else 0) + np.repeat(at - ends, counts)
    return pa.ListArray.from_arrays(pa.array(np.append(0, ends).astype(np.int32)), pa.array(items[taken]))
