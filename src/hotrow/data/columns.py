"""Columns of a log in their final type, role by role, each with a mask of the cells that cannot be used.

Whole columns are cast at once; only where a cast fails are the cells looked at one by one. What happens to a
cell that cannot be used is decided in `convert`; here it gets the value that stands for "missing".
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.schema import MISSING, Column, key_of_text

Mask = NDArray[np.bool_]
Made = tuple[pa.Array, Mask | None]
_NUMBER = r"^\s*[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:nan(\(\w*\))?|inf(inity)?))\s*$"
"""What Arrow's cast takes, and spaces around it."""
_EXACT = 1 << 53
"""Up to which a float holds every integer; beyond, an integer is taken for a key that is in the wrong place."""
_WHOLE, _LAST = r"^\s*[+-]?\d+\s*$", rf"^\s*[+-]?0*{_EXACT}\s*$"
_LEAST, _MOST = (pa.scalar(Decimal(bound), pa.decimal128(19)) for bound in (-(1 << 63), (1 << 63) - 1))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def floats(array: pa.Array) -> tuple[NDArray[np.float32], Mask]:
    """As float32 with NaN for what is missing, and which cells are no number at all."""
    kind, none = array.type, np.zeros(len(array), dtype=bool)
    if not (_is_text(kind) or pa.types.is_boolean(kind) or _is_number(kind) or pa.types.is_null(kind)):
        return np.full(len(array), np.nan, np.float32), ~none
    if _is_text(kind):
        array, none = _spelled(array)
    elif pa.types.is_integer(kind):
        whole = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
        none = (whole > _EXACT) | (whole < -_EXACT)
        array = pc.if_else(pa.array(none), None, array)
    values = pc.fill_null(pc.cast(array, pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        return values.astype(np.float32), none


def _spelled(array: pa.Array) -> tuple[pa.Array, Mask]:
    """Texts as the numbers they spell, null where they spell none, and where that is."""
    none = np.zeros(len(array), dtype=bool)
    try:
        values = pc.cast(array, pa.float64())
    except pa.ArrowInvalid:
        fits = pc.fill_null(pc.match_substring_regex(array, _NUMBER), True)
        none = ~fits.to_numpy(zero_copy_only=False)
        values = pc.cast(pc.utf8_trim_whitespace(pc.if_else(fits, array, None)), pa.float64())
    large = pc.fill_null(pc.greater_equal(pc.abs(values), float(_EXACT)), False)
    if pc.any(large).as_py():  # as the same log in Parquet
        whole, last = (pc.fill_null(pc.match_substring_regex(array, form), False) for form in (_WHOLE, _LAST))
        lost = pc.and_(large, pc.and_not(whole, last))
        values, none = pc.if_else(lost, None, values), none | lost.to_numpy(zero_copy_only=False)
    return values, none


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def labels(array: pa.Array, kind: str = "binary") -> Made:
    values, _ = floats(array)
    fits = np.isfinite(values) if kind == "number" else (values >= 0) & (values <= 1)
    return pa.array(values), _some(~fits)


def weights(array: pa.Array) -> Made:
    values, _ = floats(array)
    return pa.array(values), _some(~((values >= 0) & np.isfinite(values)))


def dense(array: pa.Array) -> Made:
    values, wrong = floats(array)
    wrong = wrong | np.isinf(values)
    return pa.array(np.where(np.isfinite(values), values, np.float32(0))), _some(wrong)


def keys(array: pa.Array, holds: str | None = None, seen: set[str] | None = None) -> Made:
    """What the keys are is added to `seen`, "integers" or "text"; those that a column that `holds` others has not."""
    made, wrong, texts = _keys(array)
    if holds is None and seen is None:
        return made, wrong
    present = made.to_numpy() != MISSING
    kinds = {"text": texts & present, "integers": ~texts & present}
    if seen is not None:
        seen |= {name for name, which in kinds.items() if which.any()}
    if holds == "integers":
        wrong = kinds["text"] if wrong is None else wrong | kinds["text"]
    elif holds == "text" and not _is_text(array.type):  # a text of digits is a text among others
        wrong = kinds["integers"] if wrong is None else wrong | kinds["integers"]
    return made, None if wrong is None else _some(wrong)


def _keys(array: pa.Array) -> tuple[pa.Array, Mask | None, Mask]:
    """Keys, which cells have none that can be used, and which are texts that spell no integer."""
    if _is_text(array.type):
        return _text_keys(array)
    return *_number_keys(array), np.zeros(len(array), dtype=bool)


def _number_keys(array: pa.Array) -> Made:
    kind = array.type
    if pa.types.is_null(kind):
        return pa.array(np.full(len(array), MISSING)), None
    if pa.types.is_uint64(kind):  # the upper half keeps its bits, as a negative key
        return pa.array(pc.fill_null(array, (1 << 64) - 1).to_numpy(zero_copy_only=False).view(np.int64)), None
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.fill_null(pc.cast(array, pa.int64()), MISSING), None
    if pa.types.is_floating(kind):  # integers with gaps, as pandas writes them
        values = pc.fill_null(pc.cast(array, pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
        wrong = ~np.isnan(values) & ~((np.abs(values) <= _EXACT) & (values == np.floor(values)))
        return pa.array(np.where(wrong | np.isnan(values), MISSING, values).astype(np.int64)), _some(wrong)
    return pa.array(np.full(len(array), MISSING)), np.ones(len(array), dtype=bool)


def present_keys(array: pa.Array) -> Made:
    """Keys; a row that has none is at fault."""
    made, wrong = keys(array)
    none = made.to_numpy() == MISSING
    return made, _some(none if wrong is None else wrong | none)


def _text_keys(array: pa.Array) -> tuple[pa.Array, None, Mask]:
    """Only distinct texts are hashed."""
    coded = pc.dictionary_encode(array)
    distinct = coded.dictionary.to_pylist()
    keys = np.fromiter((key_of_text(t) for t in distinct), np.int64, len(distinct))
    hashed = np.fromiter((str(key) != t for key, t in zip(keys.tolist(), distinct, strict=True)), bool, len(distinct))
    at = pc.fill_null(coded.indices, len(keys)).to_numpy(zero_copy_only=False)
    return pa.array(np.append(keys, MISSING)[at]), None, np.append(hashed, False)[at]


def times(array: pa.Array) -> Made:
    """Integers as they are; dates and timestamps as microseconds since 1970; text as what it spells."""
    kind = array.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        array = _microseconds(array)
    elif _is_text(kind):
        fits = pc.match_substring_regex(array, r"^[+-]?\d{1,19}$")
        wide = pc.cast(pc.if_else(fits, array, None), pa.decimal128(19))  # of which not all are an int64
        fits = pc.and_(pc.less_equal(wide, _MOST), pc.greater_equal(wide, _LEAST))
        array = pc.cast(pc.if_else(fits, wide, None), pa.int64())
    elif pa.types.is_floating(kind):
        values = pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False)
        whole = (np.abs(values) <= _EXACT) & (values == np.floor(values))
        array = pa.array(np.where(whole, values, 0).astype(np.int64), mask=~whole)
    elif pa.types.is_uint64(kind):
        array = pc.cast(pc.if_else(pc.less_equal(array, pa.scalar((1 << 63) - 1, kind)), array, None), pa.int64())
    elif pa.types.is_integer(kind):
        array = pc.cast(array, pa.int64())
    else:
        array = pa.nulls(len(array), pa.int64())
    return pc.fill_null(array, 0), _some(array.is_null().to_numpy(zero_copy_only=False))


def _microseconds(array: pa.Array) -> pa.Array:
    """Dates and timestamps as microseconds since 1970; null where that is more than an int64 holds."""
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pc.cast(pc.cast(array, pa.timestamp("us", kind.tz), safe=False), pa.int64())
    if pa.types.is_date32(kind):
        array, unit = pc.cast(array, pa.int32()), 86_400_000_000
    else:
        unit = 1000 if pa.types.is_date64(kind) else {"s": 1_000_000, "ms": 1000, "us": 1}[kind.unit]
    given, most = pc.cast(array, pa.int64()), ((1 << 63) - 1) // unit
    fits = pc.and_(pc.less_equal(given, most), pc.greater_equal(given, -most))
    return pc.multiply(pc.if_else(fits, given, None), unit)


def _lists(array: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]] | None:
    """The items of all lists one after the other and each list's length; None if these are no lists."""
    if _is_text(array.type):
        text = pc.utf8_trim(array, separator)
        array = pc.split_pattern(pc.if_else(pc.equal(text, ""), None, text), separator)
    if pa.types.is_null(array.type):
        return pa.nulls(0, pa.int64()), np.zeros(len(array), dtype=np.int64)
    if not _is_list(array.type):
        return None
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return array.flatten(), lengths


def key_lists(array: pa.Array, feature: Column, holds: str | None = None, seen: set[str] | None = None) -> Made:
    lists = _lists(array, feature.separator)
    if lists is None:
        return _as_lists(pa.array([], pa.int64()), np.zeros(len(array), np.int64)), np.ones(len(array), dtype=bool)
    items, lengths = lists
    values, wrong = keys(items, holds, seen)
    return _as_lists(values, lengths), _per_row(wrong, lengths)


def weight_lists(array: pa.Array, feature: Column, keys: pa.Array) -> Made:
    """A row has as many weights as keys; where it has not, it gets ones, and the row is at fault."""
    wanted = np.diff(keys.offsets.to_numpy())
    lists = _lists(array, feature.separator)
    if lists is None:
        return _as_lists(pa.array(np.ones(wanted.sum(), np.float32)), wanted), np.ones(len(array), dtype=bool)
    values, _ = floats(lists[0])
    wrong = lists[1] != wanted
    unusable = _per_row(_some(~np.isfinite(values)), lists[1])
    if unusable is not None:
        wrong = wrong | unusable
    if wrong.any():
        kept = np.repeat(~wrong, lists[1])
        filled = np.ones(wanted.sum(), np.float32)
        filled[np.repeat(~wrong, wanted)] = values[kept]
        values = filled
    return _as_lists(pa.array(values), wanted), _some(wrong)


def _as_lists(items: pa.Array, lengths: NDArray[np.int64]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), items)


def last(lists: pa.Array, length: int) -> pa.Array:
    """The last `length` items of each list."""
    offsets = lists.offsets.to_numpy()
    lengths = np.diff(offsets)
    if not len(lengths) or lengths.max() <= length:
        return lists
    kept = np.minimum(lengths, length).astype(np.int64)
    ends = np.cumsum(kept)
    at = np.arange(ends[-1]) + np.repeat(offsets[1:] - ends, kept)
    return _as_lists(lists.values.take(pa.array(at)), kept)


def _per_row(wrong: Mask | None, lengths: NDArray[np.int64]) -> Mask | None:
    if wrong is None:
        return None
    rows: Mask = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[wrong], minlength=len(lengths)) > 0
    return rows


def _some(wrong: Mask) -> Mask | None:
    return wrong if wrong.any() else None
