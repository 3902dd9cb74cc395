"""`prepare`: a raw log becomes a data set, checked, hashed, split and clustered by session.

One pass in bounded memory. Two things need more than a chunk at a time:

- A split that depends on the whole log (`last`) spools the converted samples to an uncompressed Arrow file
  beside the output first, and keeps their times in memory (8 bytes a sample).
- Samples of a session are brought together within windows of `window` samples, in the order in which sessions
  begin (as RecD does within an hour of a log). A session that crosses a window's end stays in two pieces.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa

from hotrow.data.convert import BadPolicy, BadRows, convert
from hotrow.data.dataset import DataSet, DataSetWriter, arrow_schema
from hotrow.data.schema import Schema
from hotrow.data.sources import Format, Source, open_source
from hotrow.data.split import AnySplit, Last, parse_split
from hotrow.errors import DataError, SettingsError, nearest

Progress = Callable[[int, int, int], None]
"""Called with rows done, bytes done and bytes in all."""


def prepare(
    source: Source | Path | str,
    out: Path | str,
    *,
    schema: Schema | Path | str | None = None,
    format: Format = "auto",
    split: AnySplit | str | None = None,
    bad: BadPolicy = "refuse",
    threshold: float = 4.0,
    history: int = 20,
    row_group: int = 1 << 16,
    window: int = 1 << 21,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DataSet:
    """Reads the log `source` and writes the data set `out`; `hotrow.data.split` lists the splits."""
    for name, given, known in (("format", format, get_args(Format)), ("bad", bad, get_args(BadPolicy))):
        if given not in known:
            raise SettingsError(f'There is no {name} "{given}".{nearest(given, known)}')
    if isinstance(schema, Path | str):
        schema = Schema.read(schema)
    if not isinstance(source, Source):
        source = open_source(source, format, schema, threshold=threshold, history=history)
    division = source.split if split is None else parse_split(split) if isinstance(split, str) else split
    prepared = source.schema.prepared()
    division.check(prepared)
    found = BadRows(bad)
    with DataSetWriter(out, prepared, overwrite=overwrite, row_group=row_group) as writer:
        clusters = {name: _Clusters(writer, name, window) for name in ("train", "test")}
        with tempfile.TemporaryDirectory(dir=writer.folder, prefix="spool-") as spool:
            samples = _samples(source, prepared, found, progress)
            if isinstance(division, Last):
                samples, division = _spooled(samples, prepared, division, Path(spool) / "samples.arrow")
            first = 0
            for batch in samples:
                _divide(batch, division.is_test(batch, first, prepared), clusters)
                first += len(batch)
        for cluster in clusters.values():
            cluster.flush()
        if first == 0:
            raise DataError(f"{source.files[0]}: no sample is left: all {found.skipped} rows were set aside.")
        writer.facts |= dict(source.facts)
        writer.facts["split"] = division.text
        if found.skipped:
            writer.facts["set_aside"] = {"rows": found.skipped, "examples": found.examples}
    return DataSet.open(out)


def _samples(source: Source, prepared: Schema, bad: BadRows, progress: Progress | None) -> Iterator[pa.RecordBatch]:
    rows, total = 0, source.bytes
    for chunk in source.chunks(bad):
        samples = convert(chunk, source.schema, prepared, bad)
        rows += len(samples)
        if len(samples):
            yield samples
        if progress is not None:
            progress(rows, chunk.bytes_done, total)


def _spooled(
    samples: Iterator[pa.RecordBatch], prepared: Schema, split: Last, file: Path
) -> tuple[Iterator[pa.RecordBatch], AnySplit]:
    """All samples on disk, to be read again, and the split that `split` is for them."""
    count, times = 0, []
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, arrow_schema(prepared)) as spool:
        for batch in samples:
            spool.write_batch(batch)
            count += len(batch)
            if prepared.time is not None:
                times.append(batch.column(prepared.time).to_numpy())
    return _read_spool(file), split.settle(count, np.concatenate(times) if times else None)


def _read_spool(file: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(file), "rb") as source:
        reader = pa.ipc.open_file(source)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i)


def _divide(batch: pa.RecordBatch, test: np.ndarray | None, clusters: dict[str, _Clusters]) -> None:
    if test is None or not test.any():
        clusters["train"].add(batch)
    elif test.all():
        clusters["test"].add(batch)
    else:
        clusters["train"].add(batch.filter(pa.array(~test)))
        clusters["test"].add(batch.filter(pa.array(test)))


class _Clusters:
    """Holds back a window of samples to bring those of a session together; without sessions, nothing."""

    def __init__(self, writer: DataSetWriter, split: str, window: int) -> None:
        self._writer, self._split, self._window = writer, split, window
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0
        writer.split(split)

    def add(self, batch: pa.RecordBatch) -> None:
        if self._writer.schema.session is None:
            self._writer.write(self._split, batch)
            return
        while len(batch):
            taken = batch.slice(0, self._window - self._rows)
            self._waiting.append(taken)
            self._rows += len(taken)
            batch = batch.slice(len(taken))
            if self._rows == self._window:
                self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting).combine_chunks()
        self._waiting, self._rows = [], 0
        self._writer.write(self._split, table.take(pa.array(_by_session(table, self._writer.schema))))


def _by_session(table: pa.Table, schema: Schema) -> np.ndarray:
    """The order in which sessions stand together, the first to begin first, each in order of time."""
    sessions = table.column(schema.session).to_numpy()
    _, first, which = np.unique(sessions, return_index=True, return_inverse=True)
    if schema.time is None:
        return np.argsort(first[which], kind="stable")
    times = table.column(schema.time).to_numpy()
    begins = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(begins, which, times)
    return np.lexsort((times, first[which], begins[which]))
