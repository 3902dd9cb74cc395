"""`Samples`: some samples of a data set as arrays, column by column, from which batches are cut.

The samples of a window are gathered once, in the order they will be used; a batch is then slices of these
arrays laid one after the other, which costs one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.batch import Batch, Group
from hotrow.data.schema import MISSING, Column, Schema

Rows = slice | NDArray[np.int64]
N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True)
class _Keys:
    """The keys of a feature: one a sample where `offsets` is None, else `values` split at `offsets`."""

    values: NDArray[np.int64]
    offsets: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None

    def part(self, first: int, last: int) -> _Keys:
        if self.offsets is None:
            return _Keys(self.values[first:last])
        a, b = self.offsets[first], self.offsets[last]
        weights = None if self.weights is None else self.weights[a:b]
        return _Keys(self.values[a:b], self.offsets[first : last + 1] - a, weights)

    @staticmethod
    def join(parts: Sequence[_Keys]) -> _Keys:
        lengths = [np.diff(p.offsets) for p in parts if p.offsets is not None]
        offsets = _offsets(np.concatenate(lengths)) if lengths else None
        return _Keys(np.concatenate([p.values for p in parts]), offsets, _joined([p.weights for p in parts]))


@dataclass(frozen=True)
class Samples:
    """Features in the schema's order, and the columns that are one number a sample."""

    schema: Schema
    size: int
    keys: tuple[_Keys, ...]
    dense: NDArray[np.float32] | None
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    users: NDArray[np.int64] | None

    @staticmethod
    def take(table: pa.Table, rows: Rows, schema: Schema) -> Samples:
        """Samples `rows` of a prepared table, in that order. A null is a missing key, 0 or an empty bag."""

        def numbers(name: str, missing: int | float) -> Any:
            column = table.column(name)
            if column.null_count:
                column = pc.fill_null(column, missing)
            return column.to_numpy()[rows]

        size = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        dense = np.empty((size, len(schema.dense)), dtype=np.float32) if schema.dense else None
        for i, name in enumerate(schema.dense):
            dense[:, i] = numbers(name, 0.0)  # type: ignore[index]
        return Samples(
            schema,
            size,
            tuple(
                _Keys(numbers(f.column, MISSING)) if f.kind == "key" else _lists(table, f, rows)
                for f in schema.features
            ),
            dense,
            numbers(schema.label, float("nan")),
            None if schema.weight is None else numbers(schema.weight, 1.0),
            None if schema.user is None else numbers(schema.user, MISSING),
        )

    def part(self, first: int, last: int) -> Samples:
        """The samples from `first` up to `last`."""
        return Samples(
            self.schema,
            last - first,
            tuple(keys.part(first, last) for keys in self.keys),
            None if self.dense is None else self.dense[first:last],
            self.labels[first:last],
            None if self.weights is None else self.weights[first:last],
            None if self.users is None else self.users[first:last],
        )

    @staticmethod
    def join(parts: Sequence[Samples]) -> Samples:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        return Samples(
            parts[0].schema,
            sum(p.size for p in parts),
            tuple(_Keys.join(keys) for keys in zip(*(p.keys for p in parts), strict=True)),
            _joined([p.dense for p in parts]),
            np.concatenate([p.labels for p in parts]),
            _joined([p.weights for p in parts]),
            _joined([p.users for p in parts]),
        )

    def batch(self, first: int, last: int) -> Batch:
        """The samples from `first` up to `last` as a batch of its own memory."""
        features = list(zip(self.schema.features, self.keys, strict=True))
        groups = []
        for weighted in (False, True):
            members = [(f.name, keys) for f, keys in features if (f.weights is not None) == weighted]
            if members:
                groups.append(_group([(name, keys.part(first, last)) for name, keys in members], last - first))
        return Batch(
            tuple(groups),
            _tensor(self.dense, first, last),
            _tensor(self.labels, first, last),
            _tensor(self.weights, first, last),
            _tensor(self.users, first, last),
        )


def _lists(table: pa.Table, feature: Column, rows: Rows) -> _Keys:
    def taken(name: str) -> pa.Array:
        array = table.column(name).combine_chunks()
        return array[rows] if isinstance(rows, slice) else array.take(pa.array(rows))

    lists = taken(feature.column)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    values = pc.fill_null(lists.flatten(), MISSING).to_numpy(zero_copy_only=False)
    weights = None
    if feature.weights is not None:
        weights = pc.fill_null(taken(feature.weights).flatten(), 1.0).to_numpy(zero_copy_only=False)
    return _Keys(values, _offsets(lengths), weights)


def _group(features: Sequence[tuple[str, _Keys]], size: int) -> Group:
    values = np.concatenate([keys.values for _, keys in features])
    weights = [keys.weights for _, keys in features if keys.weights is not None]
    if all(keys.offsets is None for _, keys in features):
        offsets = np.arange(len(values) + 1, dtype=np.int64)
    else:
        one = np.ones(size, dtype=np.int64)
        lengths = [one if keys.offsets is None else np.diff(keys.offsets) for _, keys in features]
        offsets = _offsets(np.concatenate(lengths))
    return Group(
        tuple(name for name, _ in features),
        torch.from_numpy(values),
        torch.from_numpy(offsets),
        None,
        torch.from_numpy(np.concatenate(weights)) if weights else None,
    )


def _offsets(lengths: NDArray[np.generic]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _joined(parts: Sequence[NDArray[N] | None]) -> NDArray[N] | None:
    present = [p for p in parts if p is not None]
    return np.concatenate(present) if present else None


def _tensor(array: NDArray[np.generic] | None, first: int, last: int) -> Tensor | None:
    return None if array is None else torch.from_numpy(array[first:last].copy())
