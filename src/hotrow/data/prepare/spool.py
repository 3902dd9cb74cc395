"""The first tasks: packed files unpacked, slices of the log converted to samples in the spool.

A spool file is Parquet with the columns of the data set and `__row`: the number of the slice above, the number of the
sample in it below, so samples sort as they stood in the log though nobody has counted them yet. What queries ask for
stands in columns of its own, before all others: DuckDB takes `Time` and `time` for one column, the first of them.
Packed by LZ4: it is written once and read twice, and then it goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.convert import BadRows, convert
from hotrow.data.flat import arrow_schema
from hotrow.data.prepare.plan import Work
from hotrow.data.schema import Schema
from hotrow.data.sources import Slice
from hotrow.data.sources.text import unpack
from hotrow.data.split import Users, parse_split
from hotrow.files import flush

ROW, TIME, SESSION, CHOSEN = "__row", "__time", "__session", "__chosen"
SHIFT = 32
"""Bits of `__row` that number the samples of a slice."""

Report = Callable[[int, int], None]
"""Called now and then with samples and units of work done since; what a unit is depends on the stage."""

PACKING = {"compression": "lz4"}
_GROUP_ROWS, _GROUP_BYTES = 1 << 15, 8 << 20


def unpack_file(work: Work, number: int, report: Report) -> dict[str, Any]:
    """A packed file of the log as plain pieces."""
    file = work.plan.source.source().packed[number]
    pieces = unpack(file, work.folder("unpacked"), f"{number:06d}", lambda read: report(0, read))
    return {"file": str(file), "pieces": [piece.model_dump() for piece in pieces]}


def slices_of(work: Work) -> list[Slice]:
    """The log in slices, as noted once they were known."""
    noted = work.result("slices")
    assert noted is not None  # it is the first thing that is noted
    return [Slice.model_validate(slice_) for slice_ in noted["slices"]]


def spooled(work: Work, number: int) -> Path:
    """The spool file of a slice."""
    return work.path / "spool" / f"{number:06d}.parquet"


def convert_slice(work: Work, number: int, report: Report) -> dict[str, Any]:
    """A slice of the log as samples in the spool."""
    plan, source = work.plan, work.plan.source.source()
    log, bad = source.converted, BadRows(plan.bad)
    prepared, division = log.prepared(), parse_split(plan.split)
    rows = size = 0
    seen: dict[str, set[str]] = {}
    with whole(spooled(work, number), _columns(prepared, isinstance(division, Users))) as add:
        for chunk in source.chunks(slices_of(work)[number], bad):
            samples = convert(chunk, log, prepared, bad, seen)
            columns = [pa.array(np.arange(rows, rows + len(samples)) + (number << SHIFT))]
            columns += [samples.column(name) for name in _asked_for(prepared).values()]
            if isinstance(division, Users):
                columns.append(pa.array(division.chosen(samples, prepared, plan.validation)))
            rows, size = rows + len(samples), size + samples.nbytes
            add([*columns, *samples.columns])
            report(len(samples), chunk.bytes)
    return {
        "rows": rows,
        "bytes": size,
        "found": bad.found(),
        "seen": {name: sorted(kinds) for name, kinds in seen.items()},
    }


def _columns(prepared: Schema, chosen: bool) -> pa.Schema:
    fields = [pa.field(name, pa.int64()) for name in (ROW, *_asked_for(prepared))]
    fields += [pa.field(CHOSEN, pa.int8())] if chosen else []
    return pa.schema([*fields, *arrow_schema(prepared)])


def _asked_for(schema: Schema) -> dict[str, str]:
    """The columns that queries ask for, by the names they have there."""
    return {name: column for name, column in ((TIME, schema.time), (SESSION, schema.session)) if column is not None}


@contextmanager
def whole(path: Path, columns: pa.Schema) -> Iterator[Callable[[list[pa.Array]], None]]:
    """A Parquet file to add columns of rows to; it is there when all of it is, and not at all without rows."""
    beside, waiting, held = path.with_name(f".{path.name}.{os.getpid()}"), list[pa.RecordBatch](), [0, 0]

    def add(arrays: list[pa.Array]) -> None:
        batch = pa.record_batch(arrays, schema=columns)
        waiting.append(batch)
        held[0], held[1] = held[0] + len(batch), held[1] + batch.nbytes
        if held[0] >= _GROUP_ROWS or held[1] >= _GROUP_BYTES:
            put()

    def put() -> None:
        if held[0]:
            writer.write_table(pa.Table.from_batches(waiting), row_group_size=held[0])
            rows.append(held[0])
        waiting.clear()
        held[0] = held[1] = 0

    rows: list[int] = []
    try:
        with pq.ParquetWriter(beside, columns, use_dictionary=False, **PACKING) as writer:
            yield add
            put()
        if rows:
            flush(beside)
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
