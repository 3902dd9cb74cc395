"""Where each session begins, and so in which part of the data set it stands: the one task that sees the whole log.

It sees two or three columns of it, grouped and sorted by DuckDB, which spills. Sessions are put in order of (time of
the first sample, place in the log), so the data set as a whole is in order of time, and cut into parts of
about equal samples: as many as `PART_BYTES` hold in memory, whatever memory there is. `sessions.parquet` says for
each session its part. Logs without sessions are cut by slices, in their order; event logs by time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from hotrow.data.split import SPLITS, AfterSamples, AnySplit, FromTime, Last, Users, parse_split
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
        ("split", pa.int8()),
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


class From(Settings):
    """Samples from a time on, from a row on, or from a row at a time on."""

    time: int | None = None
    row: int | None = None

    def sql(self) -> str:
        """In a query."""
        if self.time is not None and self.row is not None:
            return f"(({TIME}, {ROW}) >= ({self.time}, {self.row}))"
        if self.time is not None:
            return f"({TIME} >= {self.time})"
        return f"({ROW} >= {self.row})"

    def mask(self, samples: pa.Table, schema: Schema) -> NDArray[np.bool_]:
        """Of samples with the columns of the spool."""
        rows: NDArray[np.int64] = samples.column(ROW).to_numpy()
        after: NDArray[np.bool_] = np.ones(len(rows), np.bool_) if self.row is None else rows >= self.row
        if self.time is None:
            return after
        times: NDArray[np.int64] = samples.column(schema.time).to_numpy()
        found: NDArray[np.bool_] = (times > self.time) | ((times == self.time) & after)
        return found


class Division(Settings):
    """The split of each sample, as a number: chosen when it was converted, or by where test and validation begin."""

    chosen: bool = False
    validation: From | None = None
    test: From | None = None

    def sql(self) -> str:
        """In a query."""
        if self.chosen:
            return CHOSEN
        whens = [f"WHEN {begin.sql()} THEN {number}" for number, begin in self._begins()]
        return f"CASE {' '.join(whens)} ELSE 0 END" if whens else "0"

    def of(self, samples: pa.Table, schema: Schema) -> NDArray[np.int8]:
        """Of samples with the columns of the spool."""
        found: NDArray[np.int8] = np.zeros(len(samples), np.int8)
        if self.chosen:
            found = samples.column(CHOSEN).to_numpy()
        for number, begin in reversed(self._begins()):
            found[begin.mask(samples, schema)] = number
        return found

    def _begins(self) -> list[tuple[int, From]]:
        """From the last split on."""
        return [(number, begin) for number, begin in ((2, self.test), (1, self.validation)) if begin is not None]


class Begins(Settings):
    """What is known once the whole log was seen."""

    split: str
    validation: str = Field(description="what is validation, as a split is written; empty for nothing")
    division: Division
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
        before, division = _divided(plan, split, rows, log, db)
        which = division.sql()
        totals = dict(db.sql(f"SELECT {which}, count(*) FROM {log} GROUP BY ALL").fetchall())
        cut = _Cut([totals.get(number, 0) for number in range(len(SPLITS))], most, _LOOK_BYTES // each)
        if plan.clustered:
            sessions = _sessions(plan, log, which, db, cut, work.path / "sessions.parquet")
        elif plan.by_time:
            sessions = _times(plan, log, which, db, cut)
        else:
            sessions = _in_order(log, which, db, cut)
    found = Begins(
        split=split.text,
        validation="" if before is None else before.text,
        division=division,
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


def _divided(
    plan: Plan, split: AnySplit, rows: NDArray[np.int64], log: str, db: Any
) -> tuple[AnySplit | None, Division]:
    """What is validation, as a split of what is not test; and the split of each sample."""
    if isinstance(split, Users):
        share = split.share(plan.validation)
        return (Users(value=share) if share else None), Division(chosen=True)
    test = _from(plan, split, rows, log, db)
    before = _before(plan, split, test, log, db)
    validation = None if before is None else _from(plan, before, rows, log, db)
    return before, Division(validation=validation, test=test)


def _before(plan: Plan, split: AnySplit, test: From | None, log: str, db: Any) -> FromTime | AfterSamples | None:
    """The last share of what is not test; None where nothing of it, or nothing beside it, would be left."""
    rest = f"{log} WHERE NOT {test.sql()}" if test else log
    ((samples,),) = db.sql(f"SELECT count(*) FROM {rest}").fetchall()
    first = samples - round(samples * plan.validation)
    if not 0 < first < samples:
        return None
    if plan.samples.time is None or isinstance(split, AfterSamples):
        return AfterSamples(value=first)
    at = f"SELECT {TIME} FROM {rest} ORDER BY 1 LIMIT 1 OFFSET"
    ((least,),), ((time,),) = (db.sql(f"{at} {number}").fetchall() for number in (0, first))
    return FromTime(value=time) if time > least else None


def _from(plan: Plan, split: AnySplit, rows: NDArray[np.int64], log: str, db: Any) -> From | None:
    """From where on samples are of a split by time or order; None where none is."""
    if isinstance(split, FromTime):
        return From(time=split.value)
    if not isinstance(split, AfterSamples) or split.value >= rows.sum():
        return None
    if plan.by_time:  # the first samples are the first in time
        at = db.sql(f"SELECT {time_of(plan)}, {ROW} FROM {log} ORDER BY ALL LIMIT 1 OFFSET {split.value}").fetchall()
        return From(time=at[0][0], row=at[0][1])
    before = np.concatenate([[0], np.cumsum(rows)])
    slice_ = int(np.searchsorted(before, split.value, side="right")) - 1
    return From(row=(slice_ << SHIFT) + split.value - int(before[slice_]))


class _Cut:
    """Gives out parts, train before validation and test, as sessions pass by in order of split and time."""

    def __init__(self, totals: Sequence[int], most: int, look: int) -> None:
        counts = [max(1, -(-total // most)) for total in totals]
        self._each = [max(1, -(-total // count)) for total, count in zip(totals, counts, strict=True)]
        self._passed = [0] * len(totals)
        self._last: tuple[int, int] | None = None
        self._look_every = max(1, -(-totals[0] // _LOOKS))
        self._look = max(1, min(look, LOOK_SAMPLES) // _LOOKS)
        self.looks: dict[tuple[int, int], Stretch] = {}
        self.parts: list[Ahead] = []

    def take(self, splits: NDArray[Any], rows: NDArray[np.int64], begins: NDArray[np.int64]) -> NDArray[np.int32]:
        """The part of each; one that alone is larger than a part has the part in which it begins."""
        found = np.empty(len(rows), np.int32)
        for split in range(len(SPLITS)):
            at = np.flatnonzero(splits == split)
            starts = self._passed[split] + np.cumsum(rows[at]) - rows[at]
            self._passed[split] += int(rows[at].sum())
            raw = starts // self._each[split]
            for number in np.unique(raw):
                members = at[raw == number]
                self._add(split, int(number), int(rows[members].sum()), int(begins[members[0]]))
                found[members] = len(self.parts) - 1
            if split == 0:
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

    def _add(self, split: int, number: int, rows: int, begin: int) -> None:
        if self._last == (split, number):
            self.parts[-1] = self.parts[-1].model_copy(update={"rows": self.parts[-1].rows + rows})
            return
        self._last = split, number
        taken = sum(part.split == SPLITS[split] for part in self.parts)
        self.parts.append(Ahead(split=SPLITS[split], number=taken, rows=rows, begin=begin))


def _sessions(plan: Plan, log: str, which: str, db: Any, cut: _Cut, path: Path) -> int:
    """Writes where each session begins; a sample without one is a session of its own. How many there are."""
    time = time_of(plan)
    query = f"""
        SELECT {which} AS split, {SESSION} AS session,
               CASE WHEN {SESSION} = {MISSING} THEN {ROW} ELSE 0 END AS alone,
               min({time}) AS begin, min({ROW}) AS first, max({time}) AS last, count(*) AS rows
        FROM {log} GROUP BY ALL ORDER BY split, begin, first"""
    beside, count = path.with_name(f".{path.name}"), 0
    with pq.ParquetWriter(beside, SESSIONS, **PACKING) as writer:
        for batch in _larger(stream(db, query), _SESSIONS_A_GROUP):
            found = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names}
            part = cut.take(found["split"], found.pop("rows"), found["begin"])
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


def _times(plan: Plan, log: str, which: str, db: Any, cut: _Cut) -> int:
    query = f"SELECT {which} AS split, {time_of(plan)} AS begin, count(*) AS rows FROM {log} GROUP BY ALL ORDER BY ALL"
    for batch in _larger(stream(db, query), _SESSIONS_A_GROUP):
        cut.take(*(batch.column(name).to_numpy(zero_copy_only=False) for name in ("split", "rows", "begin")))
    return 0


def _in_order(log: str, which: str, db: Any, cut: _Cut) -> int:
    query = f"SELECT {which} AS split, {ROW} >> {SHIFT} AS slice, count(*) AS rows FROM {log} GROUP BY ALL ORDER BY ALL"
    splits, slices, rows = (np.array(c) for c in zip(*db.sql(query).fetchall(), strict=True))
    parts = cut.take(splits, rows, slices)
    for number, part in enumerate(cut.parts):
        cut.parts[number] = part.model_copy(update={"slices": tuple(slices[parts == number].tolist())})
    return 0


def refuse_nothing_left(work: Work, skipped: int) -> None:
    """A data set without samples is nobody's wish."""
    if not sum(result["rows"] for result in work.results("convert", len(slices_of(work)))):
        first = work.plan.inputs[0].file
        raise DataError(f"{first}: no sample is left: all {skipped} rows were set aside.")
