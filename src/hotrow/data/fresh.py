"""Batches of samples that are in no data set: of a request, or of a log that has just arrived.

They go the way that `prepare` and the reader go, by the same code: columns are checked and turned into keys, what
neighbouring samples share is kept once, and the run's steps are done. A request counts as one session: the 500 items
that are to be scored for one user share the user's features and history, which are then looked up and encoded once.

What a request cannot know (label, weight, time, and a user or session that is no feature) may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.convert import BadRows, Chunk, convert
from hotrow.data.dedup import encode
from hotrow.data.samples import Draws, Pieces, Window
from hotrow.data.schema import MISSING, Schema
from hotrow.data.steps import Step, apply
from hotrow.errors import DataError

Columns = Mapping[str, Any]
"""Columns by name, Arrow, NumPy, tensors or lists, or an Arrow table; what nobody asks for is not looked at."""


def batch_of(samples: pa.Table, schema: Schema, steps: Sequence[Step], seed: int = 0, first: int = 0) -> Batch:
    """Flat samples as a batch. Steps that draw do so by the seed and the samples' places, from `first` on."""
    draws = Draws(seed, 0, [(first, first + len(samples))])
    window = apply(steps, Window.of([encode(samples, schema)], schema, draws))
    return window.take(Pieces(np.zeros(1, np.int64), np.full(1, len(samples), np.int64))).batch()


def samples_of(columns: Columns, schema: Schema) -> pa.Table:
    """The flat samples of a request, whose columns are named as those of the data set; one session."""
    rows = _rows(columns)
    if schema.session is not None and schema.session not in {f.column for f in schema.features}:
        rows = _with(rows, schema.session, pa.array(np.zeros(len(rows), np.int64)))
    chunk = completed(Chunk(rows, lambda i: f"Sample {i + 1}"), schema)
    return pa.Table.from_batches([convert(chunk, schema, schema, _Request())])


def completed(chunk: Chunk, schema: Schema) -> Chunk:
    """The chunk with what cannot be known of samples to be scored, where it is left out."""
    rows, n = chunk.rows, len(chunk.rows)
    features = {f.column for f in schema.features}
    for name, value in ((schema.label, 0.0), (schema.weight, 1.0)):
        if name is not None and name not in rows.schema.names:
            rows = _with(rows, name, pa.array(np.full(n, value, np.float32)))
    for name, key in ((schema.session, 0), (schema.time, 0), (schema.user, MISSING)):
        if name is not None and name not in features and name not in rows.schema.names:
            rows = _with(rows, name, pa.array(np.full(n, key, np.int64)))
    return Chunk(rows, chunk.place, chunk.bytes)


class _Request(BadRows):
    """Refuses, in words for whoever made the request."""

    def refuse_or_skip(self, sentence: Callable[[int], str], count: int, reason: str, shown: int | None = None) -> None:
        raise DataError(sentence(0))


def _rows(columns: Columns) -> pa.RecordBatch:
    if isinstance(columns, pa.RecordBatch):
        return columns
    if isinstance(columns, pa.Table):
        columns = dict(zip(columns.column_names, columns.columns, strict=True))
    if not columns:
        raise DataError("A request needs columns: the features of the data set, by their names.")
    arrays = {name: _array(name, column) for name, column in columns.items()}
    (first, size), *others = ((name, len(array)) for name, array in arrays.items())
    for name, count in others:
        if count != size:
            raise DataError(f'The columns differ in length: "{first}" has {size} samples, "{name}" has {count}.')
    return pa.record_batch(arrays)


def _array(name: str, column: Any) -> pa.Array:
    if isinstance(column, Tensor):
        column = column.numpy()
    if isinstance(column, np.ndarray) and column.ndim > 1:
        column = list(column)
    try:
        array = column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f'Column "{name}" is no column of values or lists of one kind: {error}.') from None
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _with(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    arrays = dict(zip(rows.schema.names, rows.columns, strict=True))
    return pa.record_batch({**arrays, name: column})
