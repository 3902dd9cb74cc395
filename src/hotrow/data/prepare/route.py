"""Samples from the spool to where their part will find them.

DuckDB joins sessions to samples, but sees two or three numbers of each; whole samples are gathered with Arrow, some
megabytes at a time. A route task writes one file with row groups of one part each, however many parts there are, and
notes which; a part then reads its row groups and nothing else. Event logs go two ways: to the bucket of their user,
where histories are made, and from there to their part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotrow.data.mix import mix64
from hotrow.data.prepare.begins import begins_of, time_of
from hotrow.data.prepare.duck import Share, duckdb, parquet, room, stream
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.spool import PACKING, ROW, SESSION, TIME, Report, slices_of, spooled
from hotrow.data.schema import MISSING
from hotrow.files import flush

BEGIN, FIRST = "__begin", "__first"
"""Of a sample's session: its first time, and the row of its first sample."""

ROUTE_BYTES = 256 << 20
GROUP_BYTES = 4 << 20
Ints = NDArray[np.int64]
Group = tuple[Path, int]
"""A row group: its file and its number there."""


def routes(work: Work) -> list[list[int]]:
    """The slices each route task takes: neighbours, about `ROUTE_BYTES` of samples together."""
    found: list[list[int]] = []
    size = 0
    for number, result in enumerate(work.results("convert", len(slices_of(work)))):
        if not result["rows"]:
            continue
        if not found or size + result["bytes"] > ROUTE_BYTES:
            found.append([])
            size = 0
        found[-1].append(number)
        size += result["bytes"]
    return found


def groups_of(work: Work, stage: str, part: int) -> list[Group]:
    """The row groups of a part, or bucket, that the tasks of `stage` wrote."""
    count = begins_of(work).buckets if stage == "histories" else len(routes(work))
    return [
        (routed(work, stage, i), group)
        for i, result in enumerate(work.results(stage, count))
        for group in result["groups"].get(str(part), ())
    ]


def routed(work: Work, stage: str, number: int) -> Path:
    """What a task of `stage` wrote."""
    return work.folder("made" if stage == "histories" else "routed") / f"{number:06d}.parquet"


def route(work: Work, number: int, share: Share, report: Report) -> dict[str, Any]:
    """The task."""
    files = [spooled(work, i) for i in routes(work)[number]]
    size = max(GROUP_BYTES, min(ROUTE_BYTES, room(share) // 16))
    with RoutedFile(routed(work, "route", number)) as out:
        where = _Buckets(work) if work.plan.by_time else _Parts(work, files, share)
        for samples in _held(files, size):
            parts, extra = where.take(samples)
            out.add(parts, samples, extra)
            report(len(samples), len(samples))
    return {"groups": out.groups}


def _held(files: list[Path], size: int) -> Iterator[pa.Table]:
    """The samples of spool files in their order, about `size` bytes at a time."""
    waiting: list[pa.Table] = []
    for file in files:
        with pq.ParquetFile(file) as source:
            for group in range(source.num_row_groups):
                table = source.read_row_group(group, use_threads=False)
                waiting.append(table.select([name for name in table.column_names if name not in (TIME, SESSION)]))
                if sum(table.nbytes for table in waiting) >= size:
                    yield pa.concat_tables(waiting)
                    waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


class _Parts:
    """The part, and the beginning of the session, of samples in the order of the spool."""

    def __init__(self, work: Work, files: list[Path], share: Share) -> None:
        with duckdb(share, work.path) as db:
            found = [batch for batch in stream(db, self._query(work, parquet(files), db), 1 << 16) if len(batch)]
        self._found = {
            name: np.concatenate([b.column(name).to_numpy() for b in found]) for name in ("part", "begin", "first")
        }
        self._taken = 0

    @staticmethod
    def _query(work: Work, log: str, db: Any) -> str:
        """Sessions stand in order of their beginning: only those open at the time of these samples are read."""
        time, which = time_of(work.plan), begins_of(work).division.sql()
        ((least, most),) = db.sql(f"SELECT min({time}), max({time}) FROM {log}").fetchall()
        return f"""
            SELECT s.part, s.begin, s.first
            FROM (SELECT {SESSION} AS session, {ROW} AS row, {which} AS split,
                         CASE WHEN {SESSION} = {MISSING} THEN {ROW} ELSE 0 END AS alone FROM {log}) p
            JOIN (SELECT * FROM {parquet([work.path / "sessions.parquet"])} WHERE begin <= {most} AND last >= {least}) s
            USING (session, split, alone) ORDER BY p.row"""

    def take(self, samples: pa.Table) -> tuple[Ints, dict[str, Ints]]:
        at = slice(self._taken, self._taken + len(samples))
        self._taken = at.stop
        return self._found["part"][at], {BEGIN: self._found["begin"][at], FIRST: self._found["first"][at]}


class _Buckets:
    """The bucket of the user of each event; those without a user, who need not be together, go to all buckets."""

    def __init__(self, work: Work) -> None:
        self._user, self._count = work.plan.samples.user, begins_of(work).buckets

    def take(self, samples: pa.Table) -> tuple[Ints, dict[str, Ints]]:
        users, rows = (samples.column(name).to_numpy() for name in (self._user, ROW))
        hashed = mix64(np.where(users == MISSING, rows, users).view(np.uint64))
        return (hashed % np.uint64(self._count)).astype(np.int64), {}


class RoutedFile:
    """A file whose row groups are of one part each; it is there when all of it is."""

    def __init__(self, path: Path) -> None:
        self._path, self._beside = path, path.with_name(f".{path.name}.{os.getpid()}")
        self._writer: Any = None
        self._written = 0
        self.groups: dict[str, list[int]] = {}

    def __enter__(self) -> RoutedFile:
        return self

    def add(self, parts: Ints, samples: pa.Table, extra: dict[str, Ints]) -> None:
        """Samples, the part of each, and columns to go with them."""
        for name, values in extra.items():
            samples = samples.append_column(name, pa.array(values))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._beside, samples.schema, use_dictionary=False, **PACKING)
        each = max(1, samples.nbytes // max(1, len(samples)))
        order = np.argsort(parts, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(parts[order])) + 1):
            for at in range(0, len(rows), max(1, GROUP_BYTES // each)):
                some = rows[at : at + max(1, GROUP_BYTES // each)]
                self._writer.write_table(samples.take(pa.array(some)), row_group_size=len(some))
                self.groups.setdefault(str(parts[rows[0]]), []).append(self._written)
                self._written += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            if error is None:
                flush(self._beside)
                self._beside.replace(self._path)
        self._beside.unlink(missing_ok=True)
