"""A column of clustered samples, compared with itself: which samples equal the one before them, which slid.

Both questions are answered by what encodes a data set (`native/windows.hpp`), so what is counted here is what is
kept there: equal means equal to the bit, weights included, and a list slides if it begins with the end of what its
session laid down before, or is the beginning of the list before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow import _native
from hotrow.data.schema import MISSING, Column

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Values:
    """One number a sample where `offsets` is None, else lists: `values` split at `offsets`."""

    values: NDArray[Any]
    offsets: Ints | None = None
    weights: NDArray[np.float32] | None = None

    @staticmethod
    def of_feature(samples: pa.Table, feature: Column) -> Values:
        """Keys, and their weights where there are some. A null is a missing key or an empty list."""
        column = samples.column(feature.column)
        if feature.kind == "key":
            return Values(_filled(column, MISSING))
        lists = column.combine_chunks()
        offsets = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False), out=offsets[1:])
        weights = None
        if feature.weights is not None:
            weights = _filled(samples.column(feature.weights).combine_chunks().flatten(), 1.0)
        return Values(_filled(lists.flatten(), MISSING), offsets, weights)

    @staticmethod
    def of_dense(samples: pa.Table, name: str) -> Values:
        """Numbers. A null is 0."""
        return Values(_filled(samples.column(name), 0.0))

    @property
    def lengths(self) -> Ints:
        """How many values each sample has."""
        return np.ones(len(self.values), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def changed(self, begins: Mask) -> Mask:
        """Which samples begin a session (`begins`) or differ from the one before."""
        changed = begins.copy()
        if self.offsets is None:
            bits = self.values.view(f"i{self.values.itemsize}")
            changed[1:] |= bits[1:] != bits[:-1]
        else:
            _native.mark_changed(self.values, self.weights, self.offsets, changed)
        return changed

    def new(self, rows: Ints, begins: Mask) -> Ints:
        """How many keys the lists of samples `rows`, all that changed, add to what their session laid down before."""
        assert self.offsets is not None, "only lists slide"
        _, _, first, length = _native.slide(self.values, self.weights, self.offsets, rows, begins[rows])
        ends = np.maximum.accumulate(first + length)
        return np.diff(ends, prepend=0)


def _filled(array: pa.Array | pa.ChunkedArray, missing: float) -> NDArray[Any]:
    values = (pc.fill_null(array, missing) if array.null_count else array).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values)
