"""Where each session begins, and so in which part of the data set it stands: the one task that sees the whole log.

It sees two or three columns of it, grouped and sorted by DuckDB, which spills. Sessions are put in order of (time of
the first sample, place in the log), so the data set as a whole is in order of time, and cut into parts of
about equal samples: as many as `PART_BYTES` hold in memory, whatever memory there is. `sessions.parquet` says for
each session its part. Logs without sessions are cut by slices, in their order; event logs by time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from hotrow.data.parts import ROW_GROUP
from hotrow.data.prepare.duck import Share, duckdb, parquet, stream
from hotrow.data.prepare.plan import Plan, Work
from hotrow.data.prepare.spool import CHOSEN, PACKING, ROW, SESSION, SHIFT, TIME, slices_of, spooled
from hotrow.data.schema import MISSING, Schema
from hotrow.data.split import AfterSamples, AnySplit, FromTime, Last, Users, parse_split
from hotrow.errors import DataError
from hotrow.files import flush
from hotrow.settings import Settings

PART_BYTES = 256 << 20
GROUP_BYTES = 16 << 20
_PART_SAMPLES = 1 << 21
_LOOKS, LOOK_SAMPLES, _LOOK_BYTES = 16, 1 << 18, 16 << 20
_SESSIONS_A_GROUP = 1 << 16
BUCKET_BYTES = 64 << 20

SESSIONS = pa.schema(
    [
        ("test", pa.bool_()),
        ("session", pa.int64()),
        ("alone", pa.int64()),
        ("begin", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("part", pa.int32()),
    ]
)


class Ahead(Settings):
    """A part that is to be written."""

    split: str
    number: int
    rows: int
    begin: int = Field(description="when its first session begins")
    slices: tuple[int, ...] = Field((), description="those it is made of, where the log's order is kept")


class Stretch(Settings):
    """Sessions of a part that begin from `first` to `last`."""

    part: int
    first: int
    last: int


class Test(Settings):
    """Which samples are test: from a time on, from a row on, from a row at a time on, the chosen ones, or none."""

    time: int | None = None
    row: int | None = None
    chosen: bool = False

    def sql(self) -> str:
        """In a query."""
        if self.chosen:
            return CHOSEN
        if self.time is not None and self.row is not None:
            return f"(({TIME}, {ROW}) >= ({self.time}, {self.row}))"
        if self.time is not None:
            return f"({TIME} >= {self.time})"
        return "false" if self.row is None else f"({ROW} >= {self.row})"

    def mask(self, samples: pa.Table, schema: Schema) -> NDArray[np.bool_]:
        """Of samples with the columns of the spool."""
        found: NDArray[np.bool_] = np.zeros(len(samples), dtype=bool)
        rows = samples.column(ROW).to_numpy()
        if self.chosen:
            found = samples.column(CHOSEN).to_numpy()
        elif self.time is not None:
            times = samples.column(schema.time).to_numpy()
            found = times >= self.time if self.row is None else times > self.time
            if self.row is not None:
                found |= (times == self.time) & (rows >= self.row)
        elif self.row is not None:
            found = rows >= self.row
        return found


class Begins(Settings):
    """What is known once the whole log was seen."""

    split: str
    test: Test
    parts: tuple[Ahead, ...]
    looks: tuple[Stretch, ...] = Field(description="where to look for what repeats: all over the train samples")
    samples: int
    sessions: int
    row_group: int
    buckets: int = 1


def begins_of(work: Work) -> Begins:
    return Begins.model_validate(work.result("begins"))


def begins(work: Work, share: Share) -> dict[str, Any]:
    """The task."""
    plan, slices = work.plan, len(slices_of(work))
    converted = work.results("convert", slices)
    rows = np.array([result["rows"] for result in converted])
    samples, size = int(rows.sum()), sum(result["bytes"] for result in converted)
    log = parquet([spooled(work, i) for i in range(slices) if rows[i]])
    each = max(1, size // max(1, samples)) + (8 * plan.source.history if plan.by_time else 0)
    most = plan.part or max(ROW_GROUP, min(_PART_SAMPLES, PART_BYTES // each))
    with duckdb(share, work.path) as db:
        split = _settled(plan, parse_split(plan.split), rows, log, db)
        is_test = _test(plan, split, rows, log, db)
        test = is_test.sql()
        totals = dict(db.sql(f"SELECT {test}, count(*) FROM {log} GROUP BY ALL").fetchall())
        cut = _Cut({name: totals.get(name, 0) for name in (False, True)}, most, _LOOK_BYTES // each)
        if plan.clustered:
            sessions = _sessions(plan, log, test, db, cut, work.path / "sessions.parquet")
        elif plan.by_time:
            sessions = _times(plan, log, test, db, cut)
        else:
            sessions = _in_order(log, test, db, cut)
    found = Begins(
        split=split.text,
        test=is_test,
        parts=tuple(cut.parts),
        looks=tuple(cut.looks.values()),
        samples=samples,
        sessions=sessions,
        row_group=plan.row_group or int(max(1 << 10, min(ROW_GROUP, GROUP_BYTES // each))),
        buckets=int(max(1, samples * each // BUCKET_BYTES)),
    )
    return found.model_dump()


def time_of(plan: Plan) -> str:
    """What samples of a session are ordered by."""
    return TIME if plan.samples.time is not None else ROW


def _settled(plan: Plan, split: AnySplit, rows: NDArray[np.int64], log: str, db: Any) -> AnySplit:
    """`last` as the split that it is for this log."""
    if not isinstance(split, Last):
        return split
    samples = int(rows.sum())
    first = samples - round(samples * split.value)
    if plan.samples.time is None or first >= samples:
        return AfterSamples(value=first)
    ((time,),) = db.sql(f"SELECT {time_of(plan)} FROM {log} ORDER BY 1 LIMIT 1 OFFSET {first}").fetchall()
    return FromTime(value=time)


def _test(plan: Plan, split: AnySplit, rows: NDArray[np.int64], log: str, db: Any) -> Test:
    """Which samples are test."""
    if isinstance(split, FromTime):
        return Test(time=split.value)
    if isinstance(split, Users):
        return Test(chosen=True)
    if not isinstance(split, AfterSamples) or split.value >= rows.sum():
        return Test()
    if plan.by_time:  # the first samples are the first in time
        at = db.sql(f"SELECT {time_of(plan)}, {ROW} FROM {log} ORDER BY ALL LIMIT 1 OFFSET {split.value}").fetchall()
        return Test(time=at[0][0], row=at[0][1])
    before = np.concatenate([[0], np.cumsum(rows)])
    slice_ = int(np.searchsorted(before, split.value, side="right")) - 1
    return Test(row=(slice_ << SHIFT) + split.value - int(before[slice_]))


class _Cut:
    """Gives out parts, train before test, as sessions pass by in order of split and time."""

    def __init__(self, totals: dict[bool, int], most: int, look: int) -> None:
        counts = {test: max(1, -(-total // most)) for test, total in totals.items()}
        self._each = {test: max(1, -(-total // counts[test])) for test, total in totals.items()}
        self._passed = {False: 0, True: 0}
        self._last: tuple[bool, int] | None = None
        self._look_every = max(1, -(-totals[False] // _LOOKS))
        self._look = max(1, min(look, LOOK_SAMPLES) // _LOOKS)
        self.looks: dict[tuple[int, int], Stretch] = {}
        self.parts: list[Ahead] = []

    def take(self, test: NDArray[np.bool_], rows: NDArray[np.int64], begins: NDArray[np.int64]) -> NDArray[np.int32]:
        """The part of each; one that alone is larger than a part has the part in which it begins."""
        found = np.empty(len(rows), np.int32)
        for split in (False, True):
            at = np.flatnonzero(test == split)
            starts = self._passed[split] + np.cumsum(rows[at]) - rows[at]
            self._passed[split] += int(rows[at].sum())
            raw = starts // self._each[split]
            for number in np.unique(raw):
                members = at[raw == number]
                self._add(split, int(number), int(rows[members].sum()), int(begins[members[0]]))
                found[members] = len(self.parts) - 1
            if not split:
                self._look_at(starts, begins[at], found[at])
        return found

    def _look_at(self, starts: NDArray[np.int64], begins: NDArray[np.int64], parts: NDArray[np.int32]) -> None:
        near = starts % self._look_every < self._look
        where = np.stack([parts[near].astype(np.int64), starts[near] // self._look_every, begins[near]], axis=1)
        for part, look in np.unique(where[:, :2], axis=0).tolist():
            seen = where[(where[:, 0] == part) & (where[:, 1] == look), 2]
            before = self.looks.get((part, look))
            first = int(seen[0]) if before is None else before.first
            self.looks[part, look] = Stretch(part=part, first=first, last=int(seen[-1]))

    def _add(self, test: bool, number: int, rows: int, begin: int) -> None:
        if self._last == (test, number):
            self.parts[-1] = self.parts[-1].model_copy(update={"rows": self.parts[-1].rows + rows})
            return
        self._last = test, number
        split = "test" if test else "train"
        taken = sum(part.split == split for part in self.parts)
        self.parts.append(Ahead(split=split, number=taken, rows=rows, begin=begin))


def _sessions(plan: Plan, log: str, test: str, db: Any, cut: _Cut, path: Path) -> int:
    """Writes where each session begins; a sample without one is a session of its own. How many there are."""
    time = time_of(plan)
    query = f"""
        SELECT {test} AS test, {SESSION} AS session,
               CASE WHEN {SESSION} = {MISSING} THEN {ROW} ELSE 0 END AS alone,
               min({time}) AS begin, min({ROW}) AS first, max({time}) AS last, count(*) AS rows
        FROM {log} GROUP BY ALL ORDER BY test, begin, first"""
    beside, count = path.with_name(f".{path.name}"), 0
    with pq.ParquetWriter(beside, SESSIONS, **PACKING) as writer:
        for batch in _larger(stream(db, query), _SESSIONS_A_GROUP):
            found = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names}
            part = cut.take(found["test"], found.pop("rows"), found["begin"])
            writer.write_table(pa.table({**found, "part": part}, schema=SESSIONS))
            count += len(batch)
    flush(beside)
    beside.replace(path)
    return count


def _larger(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of about `rows`."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= rows:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def _times(plan: Plan, log: str, test: str, db: Any, cut: _Cut) -> int:
    query = f"SELECT {test} AS test, {time_of(plan)} AS begin, count(*) AS rows FROM {log} GROUP BY ALL ORDER BY ALL"
    for batch in _larger(stream(db, query), _SESSIONS_A_GROUP):
        cut.take(*(batch.column(name).to_numpy(zero_copy_only=False) for name in ("test", "rows", "begin")))
    return 0


def _in_order(log: str, test: str, db: Any, cut: _Cut) -> int:
    query = f"SELECT {test} AS test, {ROW} >> {SHIFT} AS slice, count(*) AS rows FROM {log} GROUP BY ALL ORDER BY ALL"
    tests, slices, rows = (np.array(c) for c in zip(*db.sql(query).fetchall(), strict=True))
    parts = cut.take(tests.astype(bool), rows, slices)
    for number, part in enumerate(cut.parts):
        cut.parts[number] = part.model_copy(update={"slices": tuple(slices[parts == number].tolist())})
    return 0


def refuse_nothing_left(work: Work, skipped: int) -> None:
    """A data set without samples is nobody's wish."""
    if not sum(result["rows"] for result in work.results("convert", len(slices_of(work)))):
        first = work.plan.inputs[0].file
        raise DataError(f"{first}: no sample is left: all {skipped} rows were set aside.")
