"""`Order`: the samples of a part in their final order, gathered within a bound of memory.

The order is by (begin of session, row of its first sample, time, row), which leaves no ties. It is found from these
four numbers of each sample, 32 bytes that are held; whole samples are then gathered in as many passes over the part's
row groups as the bound makes necessary. In a log in order of time, sessions of one time stand near each other, so that
a pass reads few row groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.flat import arrow_schema
from hotrow.data.prepare.late import Ints, late_rows, refuse_late
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.route import BEGIN, FIRST, groups_of
from hotrow.data.prepare.spool import ROW


class Order:
    """Of the samples of one part; `begins` holds the beginning of each one's session."""

    def __init__(self, work: Work, part: int) -> None:
        self._work, schema = work, work.plan.samples
        self._groups = groups_of(work, "histories" if work.plan.by_time else "route", part)
        self._columns = arrow_schema(schema)
        names = [BEGIN, FIRST, schema.time or ROW, ROW]
        keys: list[list[Ints]] = [[] for _ in names]
        counts, self._bytes = [0], 0
        for file, group in self._groups:
            with pq.ParquetFile(file) as source:
                table = source.read_row_group(group, columns=list(dict.fromkeys(names)), use_threads=False)
                self._bytes += source.metadata.row_group(group).total_byte_size
            counts.append(len(table))
            for found, name in zip(keys, names, strict=True):
                found.append(table.column(name).to_numpy())
        self._starts = np.cumsum(counts)
        begins, self._firsts, times, self._rows = (np.concatenate(found) for found in keys)
        self._order = np.lexsort((self._rows, times, self._firsts, begins))
        self.begins = begins[self._order]

    def settle_late(self) -> int:
        """Sets late samples aside, refuses them or leaves them, as planned; how many there are."""
        if self._work.plan.samples.time is None:
            return 0
        late = late_rows(self._firsts[self._order], self._rows[self._order])
        if late.any() and self._work.plan.late == "refuse":
            refuse_late(self._work, self._rows[self._order][late])
        if self._work.plan.late == "skip":
            self._order, self.begins = self._order[~late], self.begins[~late]
        return int(late.sum())

    def samples(self, size: int) -> Iterator[pa.Table]:
        """All of them, about `size` bytes at a time."""
        each = max(1, self._bytes // max(1, len(self._rows)))
        step = max(1, size // each)
        for at in range(0, len(self._order), step):
            yield self.gather(np.arange(at, min(at + step, len(self._order))))

    def gather(self, places: Ints) -> pa.Table:
        """The samples at these places of the order."""
        wanted = self._order[places]
        by_place = np.argsort(wanted, kind="stable")
        stored = wanted[by_place]
        cuts = np.searchsorted(stored, self._starts)
        tables = []
        for (file, group), start, a, b in zip(self._groups, self._starts, cuts, cuts[1:], strict=False):
            if a < b:
                with pq.ParquetFile(file) as source:
                    table = source.read_row_group(group, columns=self._columns.names, use_threads=False)
                tables.append(table if b - a == len(table) else table.take(pa.array(stored[a:b] - start)))
        back = np.empty(len(places), np.int64)
        back[by_place] = np.arange(len(places))
        found = pa.concat_tables(tables) if tables else self._columns.empty_table()
        return found.take(pa.array(back)).cast(self._columns)
