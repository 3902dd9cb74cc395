"""Scores of a data set or of a log, as a Parquet file: a row for each sample, in order.

A data set is read as evaluation reads it. A log is checked and turned into keys as `prepare` does, by the same code,
but nothing is kept of it; what a log to be scored may lack (labels, weight, user, session, time) is not asked for.
Where only some of its files have a label, that of the others' samples is null. The column of a single label is `label`,
those of several, and of a single one beside a prediction called so, `label_NAME`.
Memory is one batch and one piece of the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotrow.data import DataSet, Reader
from hotrow.data.batch import Batch
from hotrow.data.convert import BadPolicy, BadRows, convert
from hotrow.data.dataset import MANIFEST
from hotrow.data.folder_log import own_schema, source_of
from hotrow.data.fresh import batch_of, completed
from hotrow.data.growing import check_same
from hotrow.data.schema import Schema
from hotrow.data.sources import Format, ParquetTable, Source, TextTable
from hotrow.data.sources.tabular import table_files
from hotrow.data.sources.text import header, unpack
from hotrow.errors import DataError
from hotrow.files import replacing
from hotrow.predictor import Predictor
from hotrow.train.progress import Progress


class Log:
    """The samples of a log to be scored, batch by batch, and what was set aside."""

    def __init__(
        self,
        path: Path,
        predictor: Predictor,
        schema: Path | None = None,
        form: Format = "auto",
        bad: BadPolicy = "refuse",
    ) -> None:
        self.bad = BadRows(bad)
        self._schema, self._data, self._form = predictor.schema, predictor.run.data, form
        given = schema or (own_schema(path) if path.is_dir() else None)
        log = None if given is None else Schema.read(given)
        self._files = [self._file(file, log) for file in table_files(path)]
        there = {name for file in self._files for name in file.labels}
        self.labels = tuple(name if name in there else "" for name in self._schema.label_names)

    def __iter__(self) -> Iterator[Batch]:
        first = 0
        for file in self._files:
            for rows in self._rows(file):
                for at in range(0, len(rows), self._data.batch_size):
                    samples = pa.Table.from_batches([rows.slice(at, self._data.batch_size)])
                    batch = batch_of(samples, self._schema, self._data.steps, self._data.seed, first)
                    yield replace(batch, labels=_known(batch.labels, self._schema.label_names, file.labels))
                    first += len(samples)

    def _file(self, file: Path, log: Schema | None) -> _File:
        source = source_of(file, self._form, log, self._schema)
        check_same(source.schema, self._schema, str(file))
        return _File(source.schema, self._without_absent(file, source))

    def _rows(self, file: _File) -> Iterator[pa.RecordBatch]:
        log, source = file
        if not source.usable(self.bad):
            return
        with tempfile.TemporaryDirectory() as folder:
            pieces = {str(f): unpack(f, Path(folder), "piece", lambda read: None) for f in source.packed}
            for part in source.slices(pieces):
                for chunk in source.chunks(part, self.bad):
                    yield convert(completed(chunk, log), log, self._schema, self.bad)

    def _without_absent(self, file: Path, source: Source) -> Source:
        """The same file, read without the columns that samples to be scored may lack and that it lacks."""
        if not isinstance(source, ParquetTable | TextTable):  # whose lines have all columns
            return source
        names, log = _column_names(file, source), source.schema
        absent = {
            role: None
            for role in ("weight", "user", "session", "time")
            if (column := getattr(log, role)) is not None and column not in names
        }
        changed: dict[str, Any] = {**absent, "groups": ()}
        if not set(log.label_names) <= set(names):
            changed |= {"label": None, "labels": tuple(label for label in log.label_columns if label.name in names)}
        return source_of(file, self._form, log.model_copy(update=changed), self._schema)


class _File(NamedTuple):
    """A file of a log: what its columns mean, and how it is read without those that it lacks."""

    log: Schema
    source: Source

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that it has."""
        return self.source.schema.label_names


def write_scores(
    predictor: Predictor,
    data: Path,
    out: Path,
    *,
    split: str | None = None,
    schema: Path | None = None,
    form: Format = "auto",
    bad: BadPolicy = "refuse",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores a data set's split, or a log, into the Parquet file `out`; what came of it, as plain data."""
    if out.exists() and not overwrite:
        raise DataError(f"{out} is already there. Name another file, or replace it with --overwrite.")
    found: dict[str, Any] = {"checkpoint": str(predictor.checkpoint), "data": str(data), "out": str(out)}
    batches: Log | Reader
    if (data / MANIFEST).is_file():
        dataset = DataSet.open(data)
        check_same(dataset.schema, predictor.schema, str(data))
        settings = predictor.run.data
        found["split"] = split or settings.test or settings.train
        size, steps = settings.batch_size, settings.steps
        batches = Reader(dataset, found["split"], size, shuffle=False, seed=settings.seed, steps=steps)
    else:
        batches = Log(data, predictor, schema, form, bad)
    found |= _write(predictor, batches, out, progress or Progress())
    if isinstance(batches, Log):
        found["set_aside"] = batches.bad.skipped
    return found


def _write(predictor: Predictor, batches: Log | Reader, out: Path, progress: Progress) -> dict[str, Any]:
    """Beside first, then in place."""
    samples, totals = 0, dict[str, float]()
    labels = batches.labels if isinstance(batches, Log) else predictor.schema.label_names
    writer: pq.ParquetWriter | None = None
    progress.start(0, 0, "Scoring batch")
    with replacing(out, "The scores") as beside:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            for done, batch in enumerate(batches, start=1):
                found = {name: value.numpy() for name, value in predictor.predict(batch).items()}
                table = _table(batch, found, labels)
                writer = writer or pq.ParquetWriter(beside, table.schema, compression="zstd")
                writer.write_table(table)
                samples += len(batch)
                for name, value in found.items():
                    totals[name] = totals.get(name, 0.0) + float(value.sum(dtype="float64"))
                progress.step(done, len(batch), None)
            if writer is None:
                raise DataError("There is no sample to score.")
        finally:
            progress.stop()
            if writer is not None and writer.is_open:
                writer.close()
    return {"samples": samples, **{f"mean_{name}": total / samples for name, total in totals.items()}}


def _known(labels: Tensor | None, names: Sequence[str], there: Sequence[str]) -> Tensor | None:
    """The labels of samples whose file has only some of them: NaN for the others, nothing if it has none."""
    if labels is None or not set(names) & set(there):
        return None
    lacking = [i for i, name in enumerate(names) if name not in there]
    return labels if not lacking else labels.index_fill(1, torch.tensor(lacking), float("nan"))


def _table(batch: Batch, found: Mapping[str, Any], labels: Sequence[str]) -> pa.Table:
    """`labels` are the names of a sample's labels, empty for one that no sample has."""
    columns: dict[str, Any] = dict(found)
    for i, name in enumerate(labels):
        if name:
            of_it = None if batch.labels is None else batch.labels if len(labels) == 1 else batch.labels[:, i]
            known = pa.nulls(len(batch), pa.float32()) if of_it is None else pa.array(of_it.numpy(), from_pandas=True)
            alone = len(labels) == 1 and "label" not in found
            columns["label" if alone else f"label_{name}"] = known
    if batch.users is not None:
        columns["user"] = batch.users.numpy()
    if len(columns) < len(found) + sum(map(bool, labels)) + (batch.users is not None):
        raise DataError(
            f"The run predicts {', '.join(found)}, and a column of that name would hold labels or users. Give the "
            f"prediction, or the label that it is named after, another name."
        )
    return pa.table(columns)


def _column_names(file: Path, source: ParquetTable | TextTable) -> Sequence[str]:
    if isinstance(source, TextTable):
        return header(file, source.dialect)
    try:
        return list(pq.read_schema(file).names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} is not a whole Parquet file: {error}.") from None
