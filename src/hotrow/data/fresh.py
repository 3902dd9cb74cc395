"""Batches of samples that are in no data set: of a request, or of a log that has just arrived.

They go the way that `prepare` and the reader go, by the same code: columns are checked and turned into keys, what
neighbouring samples share is kept once, and the run's steps are done. A request counts as one session: the 500 items
that are to be scored for one user share the user's features and history, which are then looked up and encoded once.
Where the data set has no groups, that holds for what is the same in all samples of the request.

What a request cannot know (labels, weight, time, and a user or session that is no feature) may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.convert import BadRows, Chunk, convert
from hotrow.data.dedup import encode
from hotrow.data.flat import PREPARED
from hotrow.data.neighbours import Neighbours
from hotrow.data.samples import Draws, Pieces, Window
from hotrow.data.schema import MISSING, Repeats, Schema
from hotrow.data.steps import Step, apply
from hotrow.errors import DataError

Columns = Mapping[str, Any]
"""Columns by name: lists, NumPy, tensors or Arrow; or a table of Arrow, pandas or Polars. Others are not looked at."""
_REQUEST = "__request"
_NO_COLUMNS = (str, bytes, bytearray, memoryview)


def batch_of(samples: pa.Table, schema: Schema, steps: Sequence[Step], seed: int = 0, first: int = 0) -> Batch:
    """Flat samples as a batch. Steps that draw do so by the seed and the samples' places, from `first` on."""
    draws = Draws(seed, 0, [(first, first + len(samples))])
    window = apply(steps, Window.of([encode(samples, schema)], schema, draws))
    return window.take(Pieces(np.zeros(1, np.int64), np.full(1, len(samples), np.int64))).batch()


def request_of(columns: Columns, schema: Schema, steps: Sequence[Step], seed: int = 0) -> Batch:
    """A request as a batch, in which what all its samples share stands once, whether the data set has groups or not."""
    samples = samples_of(columns, schema)
    if not schema.groups and not any(isinstance(step, Neighbours) for step in steps):  # those draw by place
        samples, schema = _shared(samples, schema)
    return batch_of(samples, schema, steps, seed)


def beside(user: Mapping[str, Any], candidates: Columns) -> pa.Table:
    """The candidates as a request: their columns, and the one value that the user has in each of the others."""
    columns = {name: _array(name, column) for name, column in _named(candidates).items()}
    if not columns:
        raise DataError("There are no columns of candidates: give their keys, or columns by name.")
    size = max(map(len, columns.values()))
    for name, array in columns.items():
        if len(array) != size:
            raise DataError(f'The columns of candidates differ in length: "{name}" has {len(array)}, not {size}.')
    if not isinstance(user, Mapping):
        raise DataError(f'The user is given as one value by column, {{"user": 7, "history": [3, 5]}}, not as {user!r}.')
    for name, value in user.items():
        if name in columns:
            raise DataError(f'Column "{name}" is given for the user and for the candidates; give it once.')
        columns[name] = _array(name, [value]).take(pa.array(np.zeros(size, np.int64)))
    return pa.table(columns)


def _shared(samples: pa.Table, schema: Schema) -> tuple[pa.Table, Schema]:
    """The samples as one session, with a group of the columns that are the same in all of them."""
    same = [f.name for f in schema.features if _one_value(samples, f.column) and _one_value(samples, f.weights)]
    same += [name for name in schema.dense if _one_value(samples, name)]
    if not same or len(samples) < 2:
        return samples, schema
    group = Repeats(name=_REQUEST, columns=tuple(same))
    session = pa.array(np.zeros(len(samples), np.int64))
    return (
        samples.append_column(f"{_REQUEST}_session", session),
        schema.model_copy(update={"session": f"{_REQUEST}_session", "groups": (group,)}),
    )


def _one_value(samples: pa.Table, name: str | None) -> bool:
    if name is None:
        return True
    column = samples.column(name).combine_chunks()
    if not pa.types.is_list(column.type):
        return len(column.unique()) <= 1
    lengths = column.value_lengths().to_numpy()
    if not len(lengths) or (lengths != lengths[0]).any():
        return False
    values = column.flatten().to_numpy().reshape(len(column), -1)
    return bool((values == values[0]).all())


def samples_of(columns: Columns, schema: Schema) -> pa.Table:
    """The flat samples of a request, whose columns are named as those of the data set; one session."""
    rows = _rows(columns, set(schema.columns))
    if schema.session is not None and schema.session not in {f.column for f in schema.features}:
        rows = _with(rows, schema.session, pa.array(np.zeros(len(rows), np.int64)))
    chunk = completed(Chunk(rows, lambda i: f"Sample {i + 1}"), schema)
    takes = schema.of_any_keys() if _is_prepared(columns) else schema
    return pa.Table.from_batches([convert(chunk, schema, takes, _Request())])


def _is_prepared(columns: Any) -> bool:
    """Whether these are samples of a data set, whose texts are keys already."""
    metadata = columns.schema.metadata if isinstance(columns, pa.RecordBatch | pa.Table) else None
    return PREPARED.items() <= (metadata or {}).items()


def completed(chunk: Chunk, schema: Schema) -> Chunk:
    """The chunk with what cannot be known of samples to be scored, where it is left out."""
    rows, n = chunk.rows, len(chunk.rows)
    features = {f.column for f in schema.features}
    for name, value in (*((label, 0.0) for label in schema.label_names), (schema.weight, 1.0)):
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


def _rows(columns: Columns, wanted: set[str]) -> pa.RecordBatch:
    """The columns that are wanted and there."""
    named = _named(columns)
    arrays = {name: _array(name, column) for name, column in named.items() if name in wanted}
    if not arrays:
        raise DataError(f"A request needs columns: the features of the data set, by their names ({_listed(wanted)}).")
    (first, size), *others = ((name, len(array)) for name, array in arrays.items())
    for name, count in others:
        if count != size:
            raise DataError(f'The columns differ in length: "{first}" has {size} samples, "{name}" has {count}.')
    return pa.record_batch(arrays)


def _named(columns: Any) -> Mapping[str, Any]:
    """The columns of a request by their names, whatever table it is."""
    if hasattr(columns, "to_arrow") and not isinstance(columns, Mapping):  # Polars
        columns = columns.to_arrow()
    if isinstance(columns, pa.RecordBatch | pa.Table):
        names, found = columns.schema.names, columns.columns
    elif isinstance(columns, Mapping) or (hasattr(columns, "items") and hasattr(columns, "columns")):  # pandas
        items = list(columns.items())
        names, found = [name for name, _ in items], [column for _, column in items]
    else:
        raise DataError(
            f"A request is columns by name, a value for each sample in each, but {_described(columns)} came. "
            f'Give them so: {{"user": [7, 7], "item": [3, 5]}}, or a table of Arrow, pandas or Polars.'
        )
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"The columns of a request are named by text, but one is named {name!r}.")
        if names.count(name) > 1:
            raise DataError(f'The request has two columns "{name}".')
    return dict(zip(names, found, strict=True))


def _array(name: str, column: Any) -> pa.Array:
    try:
        array = _as_arrow(name, column)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f'Column "{name}" is no column of values or lists of one kind: {error}.') from None
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.cast(pa.float32()) if pa.types.is_float16(array.type) else array


def _as_arrow(name: str, column: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, Tensor):
        column = _as_numpy(column)
    listed = isinstance(column, Sequence) and not isinstance(column, _NO_COLUMNS)
    if not listed and not (hasattr(column, "__array__") and np.ndim(column)):
        raise DataError(f'Column "{name}" is {_described(column)}, but a request has a value for each sample: [...].')
    if isinstance(column, np.ndarray) and column.ndim > 1:
        return pa.array(list(column))
    if listed:
        column = [_as_numpy(cell).tolist() if isinstance(cell, Tensor) else cell for cell in column]
    return pa.array(column)


def _as_numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _described(value: Any) -> str:
    """A value and its type, for the sentence to the user."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def _listed(names: set[str]) -> str:
    few = sorted(names)[:8]
    return ", ".join(few) + (", ..." if len(names) > len(few) else "")


def _with(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    arrays = dict(zip(rows.schema.names, rows.columns, strict=True))
    return pa.record_batch({**arrays, name: column})
