"""`Window`: some row groups of a data set as arrays, from which batches are taken without expanding what repeats.

A column is an array with a value for each row of its table, or lists as windows of one array of keys. Samples refer to
the rows of a group by its `inverse`. A batch is ranges of samples, each a piece of one session: their rows of a group,
and the keys that these rows' lists cover, lie together, so every part of a batch is made by copying ranges, once,
natively. Nothing that no sample of the batch uses gets into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow import _native
from hotrow.data.batch import Batch, Group
from hotrow.data.dedup import SAMPLES, Ints, session_begins, stretch, window_names, without_nulls
from hotrow.data.mix import mix64
from hotrow.data.schema import MISSING, Column, Schema
from hotrow.errors import DataError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Values:
    """A column: a value for each row, or where there are `begins` a list: `values[begin:begin + length]`."""

    values: NDArray[Any]
    begins: Ints | None = None
    lengths: Ints | None = None
    weights: Floats | None = None
    slides: bool = False
    """Whether lists may overlap."""

    def map(self, values: NDArray[Any]) -> Values:
        """The same lists of other values."""
        return replace(self, values=values)


class Draws(NamedTuple):
    """By what steps draw at random: a reader's seed and epoch, and where in the split row groups begin and end."""

    seed: int
    epoch: int
    groups: Sequence[tuple[int, int]]

    def numbers(self) -> NDArray[np.uint64]:
        """One for each sample: of seed, epoch and the sample's place in the split, whatever else is read with it."""
        places = np.concatenate([np.arange(begin, end, dtype=np.uint64) for begin, end in self.groups])
        salt = mix64(mix64(np.array([self.seed], np.uint64)) + np.uint64(self.epoch))
        return mix64(mix64(places) ^ salt)


class Numbers(NamedTuple):
    """A number for each sample: `values`, or where they stand in a group `values[rows]`."""

    values: NDArray[Any]
    rows: Ints | None


class Pieces(NamedTuple):
    """Ranges of rows: `counts[i]` of them from `starts[i]` on."""

    starts: Ints
    counts: Ints


@dataclass(frozen=True)
class Window:
    """Samples as columns, each in its place: with the samples or with the rows of a group."""

    schema: Schema
    size: int
    columns: Mapping[str, Values]
    places: Mapping[str, str]
    """The group whose rows a column has a value for, or `SAMPLES`."""
    inverses: Mapping[str, Ints]
    """For each group the row of every sample."""
    roles: Mapping[str, Numbers]
    """Weight, user and session of each sample: as the data set has them, whatever steps do to a feature."""
    labels: tuple[Numbers, ...] = ()
    """The same for each label."""
    draws: Draws | None = None
    """What steps draw by; None where samples are looked at outside of an epoch."""

    @staticmethod
    def of(row_groups: Sequence[Mapping[str, pa.Table]], schema: Schema, draws: Draws | None = None) -> Window:
        """The samples of some row groups, one after the other. A null is a missing key, 0 or an empty bag."""
        tables = {name: [read[name] for read in row_groups] for name in row_groups[0]}
        inverses = {g.name: _numbers_of(tables[SAMPLES], g.name, 0, tables[g.name]) for g in schema.groups or ()}
        places, slides = _places(schema)
        columns: dict[str, Values] = {}
        for f in schema.features:
            rows = tables[places.get(f.column, SAMPLES)]
            if f.kind == "key":
                columns[f.column] = Values(_numbers_of(rows, f.column, MISSING))
            elif f.column in slides:
                columns[f.column] = _windows(rows, tables[stretch(places[f.column], f.column)], f)
            else:
                columns[f.column] = _lists(rows, f)
        for name, missing in _one_number(schema).items():
            if name not in columns and name in tables[places.get(name, SAMPLES)][0].column_names:
                columns[name] = Values(_numbers_of(tables[places.get(name, SAMPLES)], name, missing))
        roles = {
            role: Numbers(columns[name].values, inverses.get(places.get(name, SAMPLES)))
            for role in ("weight", "user", "session")
            if (name := getattr(schema, role)) in columns
        }
        labels = tuple(
            Numbers(columns[name].values, inverses.get(places.get(name, SAMPLES))) for name in schema.label_names
        )
        every = {name: places.get(name, SAMPLES) for name in columns}
        return Window(schema, sum(map(len, tables[SAMPLES])), columns, every, inverses, roles, labels, draws)

    def sessions(self) -> Ints:
        """Where each session begins; without sessions, each sample."""
        if "session" not in self.roles:
            return np.arange(self.size, dtype=np.int64)
        values, index = self.roles["session"]
        return np.flatnonzero(session_begins(values if index is None else values[index]))

    def take(self, pieces: Pieces) -> Taken:
        """The samples of these pieces, one after the other."""
        schema, (starts, counts) = self.schema, pieces
        ranges: dict[str, tuple[Pieces, Ints | None]] = {SAMPLES: (pieces, None)}
        for name, inverse in self.inverses.items():
            taken, row_starts, row_counts = _native.take_inverse(inverse, starts, counts)
            ranges[name] = Pieces(row_starts, row_counts), taken
        bags = [
            Bags.take(members, [self.columns[f.column] for f in members], *ranges[place])
            for place, members in self._groups()
        ]
        size = int(counts.sum())
        dense = [Numbers(self.columns[n].values, self.inverses.get(self.places[n])) for n in schema.dense]
        roles = {role: _native.take(*numbers, starts, counts) for role, numbers in self.roles.items()}
        one = len(self.labels) == 1
        labels = _native.take(*self.labels[0], starts, counts) if one else _matrix(self.labels, pieces, size)
        matrix = _matrix(dense, pieces, size)
        return Taken(size, tuple(bags), matrix, labels, roles.get("weight"), roles.get("user"))

    def _groups(self) -> list[tuple[str, list[Column]]]:
        """The features that form a group of the batch: those of one place, with weights or without."""
        found: dict[tuple[str, bool], list[Column]] = {}
        for place in (SAMPLES, *self.inverses):
            for weighted in (False, True):
                found[place, weighted] = []
        for feature in self.schema.features:
            found[self.places[feature.column], feature.weights is not None].append(feature)
        return [(place, members) for (place, _), members in found.items() if members]


@dataclass(frozen=True)
class Bags:
    """A group of a batch as arrays, feature after feature; `starts` says where in `values` each feature begins."""

    features: tuple[str, ...]
    values: Ints
    weights: Floats | None
    begins: Ints
    lengths: Ints
    starts: Sequence[int]
    inverse: Ints | None
    slides: bool

    @staticmethod
    def take(features: Sequence[Column], columns: Sequence[Values], rows: Pieces, inverse: Ints | None) -> Bags:
        """The bags of these rows."""
        arrays = [(c.values, c.weights, c.begins, c.lengths, c.slides) for c in columns]
        values, weights, begins, lengths, starts = _native.take_bags(arrays, *rows)
        names = tuple(f.name for f in features)
        return Bags(names, values, weights, begins, lengths, starts, inverse, any(c.slides for c in columns))

    @staticmethod
    def join(parts: Sequence[Bags]) -> Bags:
        """The rows of all parts, one part after the other."""
        first = parts[0]
        values, weights, begins, lengths, starts = [], [], [], [], [0]
        for f in range(len(first.features)):
            end = starts[-1]
            for part in parts:
                a, b = part.starts[f], part.starts[f + 1]
                rows = len(part.lengths) // len(first.features)
                values.append(part.values[a:b])
                if part.weights is not None:
                    weights.append(part.weights[a:b])
                begins.append(part.begins[f * rows : (f + 1) * rows] + (end - a))
                lengths.append(part.lengths[f * rows : (f + 1) * rows])
                end += b - a
            starts.append(end)
        shifts = np.cumsum([0, *(len(part.lengths) // len(first.features) for part in parts)])
        inverses = [
            part.inverse + shift for part, shift in zip(parts, shifts, strict=False) if part.inverse is not None
        ]
        return Bags(
            first.features,
            np.concatenate(values),
            np.concatenate(weights) if weights else None,
            np.concatenate(begins),
            np.concatenate(lengths),
            starts,
            np.concatenate(inverses) if inverses else None,
            first.slides,
        )

    def group(self) -> Group:
        """As a batch holds it."""
        return Group(
            self.features,
            torch.from_numpy(self.values),
            torch.from_numpy(_offsets(self.lengths)),
            _tensor(self.inverse),
            _tensor(self.weights),
            torch.from_numpy(self.begins) if self.slides else None,
        )


@dataclass(frozen=True)
class Taken:
    """The samples of a batch, or those of its samples that lie in one window."""

    size: int
    bags: tuple[Bags, ...]
    dense: Floats | None
    labels: Floats | None
    weights: Floats | None
    users: Ints | None

    @staticmethod
    def join(parts: Sequence[Taken]) -> Taken:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        return Taken(
            sum(p.size for p in parts),
            tuple(Bags.join(bags) for bags in zip(*(p.bags for p in parts), strict=True)),
            _joined([p.dense for p in parts]),
            _joined([p.labels for p in parts]),
            _joined([p.weights for p in parts]),
            _joined([p.users for p in parts]),
        )

    def batch(self) -> Batch:
        """As a batch, of these arrays' memory."""
        return Batch(
            tuple(bags.group() for bags in self.bags),
            _tensor(self.dense),
            _tensor(self.labels),
            _tensor(self.weights),
            _tensor(self.users),
        )


def needed(schema: Schema, sessions: bool) -> set[str]:
    """The columns of flat samples that batches, and sessions to shuffle, are made of."""
    names = {f.column for f in schema.features} | {f.weights for f in schema.features if f.weights is not None}
    return names | set(_one_number(schema if sessions else schema.model_copy(update={"session": None})))


def _one_number(schema: Schema) -> dict[str, float]:
    """The columns besides features that batches are made of, and what stands for a null in them."""
    numbers: dict[str, float] = dict.fromkeys(schema.dense, 0.0)
    numbers |= dict.fromkeys(schema.label_names, float("nan"))
    if schema.weight is not None:
        numbers[schema.weight] = 1.0
    return numbers | {name: MISSING for name in (schema.user, schema.session) if name is not None}


def _places(schema: Schema) -> tuple[dict[str, str], set[str]]:
    """The group of each column that stands in one, and which of them slide."""
    column = {f.name: f.column for f in schema.features}
    groups = schema.groups or ()
    places = {column.get(name, name): group.name for group in groups for name in group.columns}
    return places, {column[name] for group in groups for name in group.slides}


def _numbers_of(tables: Sequence[pa.Table], name: str, missing: float, of: Sequence[pa.Table] = ()) -> NDArray[Any]:
    """A column of one number a row; where it counts the rows of tables `of`, through all of them."""
    arrays, rows = [], 0
    for i, table in enumerate(tables):
        column = table.column(name)
        if column.null_count:
            column = pc.fill_null(column, missing)
        array = column.to_numpy()
        if of:
            _within(array, array, len(of[i]) - 1, name)
            array = array.astype(np.int64) + rows
            rows += len(of[i])
        arrays.append(array)
    return _concatenated(arrays)


def _lists(tables: Sequence[pa.Table], feature: Column) -> Values:
    values, weights, begins, lengths, keys = [], [], [], [], 0
    for table in tables:
        lists = without_nulls(table.column(feature.column).combine_chunks(), MISSING)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        values.append(lists.flatten().to_numpy())
        begins.append(offsets[:-1] + (keys - offsets[0]))
        lengths.append(np.diff(offsets))
        keys += len(values[-1])
        if feature.weights is not None:
            weights.append(without_nulls(table.column(feature.weights).combine_chunks(), 1.0).flatten().to_numpy())
    return Values(
        _concatenated(values),
        _concatenated(begins),
        _concatenated(lengths),
        _concatenated(weights) if weights else None,
    )


def _windows(tables: Sequence[pa.Table], stretches: Sequence[pa.Table], feature: Column) -> Values:
    begins, lengths, keys = [], [], 0
    for table, stretched in zip(tables, stretches, strict=True):
        begin, length = (table.column(name).to_numpy().astype(np.int64) for name in window_names(feature.column))
        _within(begin, begin + length, len(stretched), feature.column)
        begins.append(begin + keys)
        lengths.append(length)
        keys += len(stretched)
    values, weights = (
        None if name is None else _concatenated([table.column(name).to_numpy() for table in stretches])
        for name in (feature.column, feature.weights)
    )
    assert values is not None
    return Values(values, _concatenated(begins), _concatenated(lengths), weights, slides=True)


def _within(first: NDArray[Any], last: NDArray[Any], most: int, name: str) -> None:
    if len(first) and not (first.min() >= 0 and last.max() <= most):
        raise DataError(
            f'"{name}" refers to what its row group does not hold: the data set was altered. Prepare it again.'
        )


def _matrix(columns: Sequence[Numbers], pieces: Pieces, size: int) -> Floats | None:
    """The columns of these pieces' samples side by side; None where there are none."""
    if not columns:
        return None
    taken = np.empty((size, len(columns)), dtype=np.float32)
    _native.take_matrix([(values, rows) for values, rows in columns], *pieces, taken)
    return taken


def _offsets(lengths: Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _concatenated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined(parts: Sequence[NDArray[Any] | None]) -> Any:
    present = [p for p in parts if p is not None]
    return np.concatenate(present) if present else None


def _tensor(array: NDArray[Any] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
