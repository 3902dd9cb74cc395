"""`encode` and `decode`: flat samples of sessions as tables that keep what repeats once, and the way back.

    samples  every column that stands in no group, and for each group G a column G: the row of G's table it uses
    G        one row for each sample that differs, in a column of the group, from the one before it in its session
    G.F      what the lists of a sliding feature F are windows of, one row a key; G has them as F_begin and F_length

Only neighbours are compared, so rows stand in the order of first use and no two sessions share one: whole sessions
use one stretch of every table, which is what lets them be read and shuffled by copying ranges. A value that comes back
after another is therefore kept again. A list slides if it begins with the end of what its session laid down before, or
is the start of the list before it; any other is laid down whole, so every list is told exactly, if not cheaply.

Equal means equal to the bit. A null in a group is stored as what it means (`MISSING`, 0, an empty list, a weight of 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow import _native
from hotrow.data.flat import arrow_schema
from hotrow.data.schema import MISSING, Repeats, Schema
from hotrow.errors import DataError, SettingsError

SAMPLES = ""
"""The name of the table that has a row for each sample."""

Ints = NDArray[np.int64]


def stretch(group: str, column: str) -> str:
    """The name of the table of keys that `column` slides along."""
    return f"{group}.{column}"


def window_names(column: str) -> tuple[str, str]:
    """The columns that hold a sliding feature's windows."""
    return f"{column}_begin", f"{column}_length"


def file_name(stem: str, table: str) -> str:
    """The file of a table in the part `stem`."""
    return f"{stem}.parquet" if table == SAMPLES else f"{stem}.{quote(table, safe='')}.parquet"


class GroupColumns(NamedTuple):
    """The columns of one group as they stand in files."""

    name: str
    numbers: tuple[str, ...]
    lists: tuple[str, ...]
    slides: tuple[str, ...]
    weights: Mapping[str, str]
    """The weights' column of each list that has one."""


def columns_of(group: Repeats, schema: Schema) -> GroupColumns:
    """Which columns the group keeps, by how they are kept."""
    features = {f.name: f for f in schema.features}
    numbers: list[str] = []
    lists: list[str] = []
    slides: list[str] = []
    weights: dict[str, str] = {}
    for name in group.columns:
        if name not in features:
            numbers.append(name)
            continue
        feature = features[name]
        if feature.kind == "key":
            numbers.append(feature.column)
            continue
        (slides if name in group.slides else lists).append(feature.column)
        if feature.weights is not None:
            weights[feature.column] = feature.weights
    return GroupColumns(group.name, tuple(numbers), tuple(lists), tuple(slides), weights)


def tables(schema: Schema) -> dict[str, pa.Schema]:
    """The tables of a data set with this schema, and their columns; the samples come first."""
    flat = arrow_schema(schema)
    kept: dict[str, pa.Schema] = {}
    grouped: set[str] = set()
    for group in schema.groups or ():
        g = columns_of(group, schema)
        fields = [(name, flat.field(name).type) for name in g.numbers]
        for name in g.lists:
            fields += [(column, flat.field(column).type) for column in (name, *_weights(g, name))]
        for name in g.slides:
            begin, length = window_names(name)
            fields += [(begin, pa.int64()), (length, pa.int32())]
        _refuse_twice([name for name, _ in fields], f"group {g.name}")
        kept[g.name] = pa.schema(fields)
        for name in g.slides:
            kept[stretch(g.name, name)] = pa.schema(
                [(column, flat.field(column).type.value_type) for column in (name, *_weights(g, name))]
            )
        grouped |= {*g.numbers, *g.lists, *g.slides, *g.weights.values()}
    fields = [(field.name, field.type) for field in flat if field.name not in grouped]
    fields += [(group.name, pa.int32()) for group in schema.groups or ()]
    _refuse_twice([name for name, _ in fields], "the samples")
    return {SAMPLES: pa.schema(fields), **kept}


def encode(table: pa.Table, schema: Schema) -> dict[str, pa.Table]:
    """The tables of flat samples whose sessions stand together; rows and keys are counted from 0."""
    shapes = tables(schema)
    if len(shapes) == 1:
        return {SAMPLES: table.select(shapes[SAMPLES].names).cast(shapes[SAMPLES])}
    begins = session_begins(table.column(schema.session).to_numpy())
    made: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for group in schema.groups or ():
        g = columns_of(group, schema)
        numbers = {name: _numbers(table.column(name)) for name in g.numbers}
        lists = {name: _lists(table, name, g.weights.get(name)) for name in (*g.lists, *g.slides)}
        changed = begins.copy()
        for values in numbers.values():
            bits = values.view(f"i{values.itemsize}")
            changed[1:] |= bits[1:] != bits[:-1]
        for keys in lists.values():
            _native.mark_changed(keys.values, keys.weights, keys.offsets, changed)
        rows = np.flatnonzero(changed)
        made[SAMPLES][g.name] = np.cumsum(changed, dtype=np.int64) - 1
        made[g.name] |= {name: values[rows] for name, values in numbers.items()}
        for name in g.lists:
            taken = [
                table.column(column).combine_chunks().take(pa.array(rows)) for column in (name, *_weights(g, name))
            ]
            made[g.name] |= dict(zip((name, *_weights(g, name)), _filled(*taken), strict=True))
        for name in g.slides:
            keys = lists[name]
            laid, weights, begin, length = _native.slide(keys.values, keys.weights, keys.offsets, rows, begins[rows])
            made[g.name] |= dict(zip(window_names(name), (begin, length), strict=True))
            made[stretch(g.name, name)] = dict(zip((name, *_weights(g, name)), (laid, weights), strict=False))
    for name in shapes[SAMPLES].names:
        made[SAMPLES].setdefault(name, table.column(name) if name in table.column_names else None)
    return {name: _table(made[name], shape) for name, shape in shapes.items()}


def decode(parts: Mapping[str, pa.Table], schema: Schema) -> pa.Table:
    """The flat samples that `encode` made these tables of; rows and keys are counted from 0."""
    columns: dict[str, Any] = {name: parts[SAMPLES].column(name) for name in parts[SAMPLES].column_names}
    for group in schema.groups or ():
        g = columns_of(group, schema)
        rows = parts[g.name]
        inverse = parts[SAMPLES].column(g.name).to_numpy()
        if len(inverse) and not (inverse.min() >= 0 and inverse.max() < len(rows)):
            raise DataError(f"Samples name rows of group {g.name} that are not there.")
        for name in (*g.numbers, *g.lists, *(g.weights[n] for n in g.lists if n in g.weights)):
            columns[name] = rows.column(name).combine_chunks().take(pa.array(inverse))
        for name in g.slides:
            begin, length = (rows.column(c).to_numpy().astype(np.int64)[inverse] for c in window_names(name))
            keys = parts[stretch(g.name, name)]
            if len(begin) and not (begin.min() >= 0 and length.min() >= 0 and (begin + length).max() <= len(keys)):
                raise DataError(f"Lists of {name} in group {g.name} are windows of keys that are not there.")
            offsets = np.zeros(len(length) + 1, dtype=np.int64)
            np.cumsum(length, out=offsets[1:])
            at = pa.array(np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], length))
            for column in (name, *_weights(g, name)):
                values = keys.column(column).combine_chunks().take(at)
                columns[column] = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)
    shape = arrow_schema(schema)
    return pa.table({name: columns[name] for name in shape.names}, schema=shape)


def renumber(parts: Mapping[str, pa.Table], schema: Schema, by: Mapping[str, int]) -> dict[str, pa.Table]:
    """The tables with rows and keys counted from elsewhere: `by[name]` is added to the row numbers of table `name`."""
    made = dict(parts)
    for group in schema.groups or ():
        made[SAMPLES] = _raise(made[SAMPLES], group.name, by[group.name])
        for name in columns_of(group, schema).slides:
            made[group.name] = _raise(made[group.name], window_names(name)[0], by[stretch(group.name, name)])
    return made


def _raise(table: pa.Table, column: str, by: int) -> pa.Table:
    if by == 0:
        return table
    at = table.column_names.index(column)
    field = table.schema.field(at)
    if pa.types.is_int32(field.type) and by + len(table) >= 1 << 31:
        raise DataError(f"A part holds at most {(1 << 31) - 1:,} rows of a group; write more than one part.")
    return table.set_column(at, field, pc.add(table.column(at), pa.scalar(by, field.type)))


def session_begins(sessions: NDArray[Any]) -> NDArray[np.bool_]:
    """Which samples begin a session, where those of a session stand together; one without a session is one alone."""
    begins = np.ones(len(sessions), dtype=bool)
    begins[1:] = (sessions[1:] != sessions[:-1]) | (sessions[1:] == MISSING)
    return begins


class Lists(NamedTuple):
    """Lists as flat values: list i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Ints
    offsets: Ints
    weights: NDArray[np.float32] | None


def _lists(table: pa.Table, name: str, weights: str | None) -> Lists:
    filled = _filled(*(table.column(column).combine_chunks() for column in (name, weights) if column is not None))
    keys = filled[0]
    return Lists(
        keys.flatten().to_numpy(zero_copy_only=False),
        (keys.offsets.to_numpy() - keys.offsets[0].as_py()).astype(np.int64),
        filled[1].flatten().to_numpy(zero_copy_only=False) if weights is not None else None,
    )


def _filled(keys: pa.ListArray, weights: pa.ListArray | None = None) -> list[pa.ListArray]:
    """The lists without nulls: an empty list for a missing one, and `MISSING` or a weight of 1 for a missing item."""
    given = [(keys, MISSING), *([(weights, 1.0)] if weights is not None else [])]
    return [without_nulls(lists, missing) for lists, missing in given]


def without_nulls(lists: pa.ListArray, missing: float) -> pa.ListArray:
    """The lists with `missing` for a null in them, and an empty list for a null."""
    if not lists.null_count and not lists.values.null_count:
        return lists
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pc.fill_null(lists.flatten(), missing))


def _numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    if column.null_count:
        column = pc.fill_null(column, MISSING if pa.types.is_integer(column.type) else 0.0)
    numbers: NDArray[Any] = column.to_numpy()
    return numbers


def _weights(group: GroupColumns, name: str) -> tuple[str, ...]:
    return (group.weights[name],) if name in group.weights else ()


def _table(columns: Mapping[str, Any], shape: pa.Schema) -> pa.Table:
    arrays = []
    for field in shape:
        values = columns[field.name]
        values = pa.array(values) if isinstance(values, np.ndarray) else values
        arrays.append(values.cast(field.type) if values.type != field.type else values)
    return pa.table(arrays, schema=shape)


def _refuse_twice(names: list[str], where: str) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise SettingsError(
            f'There would be two columns "{twice[0]}" in {where} of the data set. '
            f"Give the group or the feature another name."
        )
