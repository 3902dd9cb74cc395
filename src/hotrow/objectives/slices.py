"""`Slice`: the samples of an evaluation by the value of a column: its most frequent values, and all others together.

Which values are the most frequent is counted over the whole split before it is scored, so every rank divides its
samples alike, and the metrics of a value are those of all its samples. The price is that a split is read once more,
without rows and without the model. A value is its key: of a text column the hash that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.schema import MISSING, Schema
from hotrow.errors import DataError, SettingsError, nearest

OTHER = "other"
"""What the samples of all rarer values are called."""


class Slice(NamedTuple):
    """A column, and which of its values have metrics of their own, the most frequent first."""

    column: str
    keys: NDArray[np.int64]

    @property
    def names(self) -> list[str]:
        """What each part is called, as in "country=49"."""
        said = ["none" if key == MISSING else str(key) for key in self.keys.tolist()]
        return [f"{self.column}={value}" for value in (*said, OTHER)]

    def places(self, keys: NDArray[np.int64]) -> NDArray[np.intp]:
        """Which part each sample belongs to; those of rarer values to the one behind the last."""
        order = np.argsort(self.keys)
        at = np.searchsorted(self.keys, keys, sorter=order).clip(max=max(len(order) - 1, 0))
        found = order[at]
        return np.where(self.keys[found] == keys, found, len(self.keys))


def check_slices(columns: Sequence[str], schema: Schema) -> None:
    """Refuses what is no column of one key a sample."""
    single = [f.name for f in schema.features if f.kind == "key"]
    known = [*single, *([schema.user] if schema.user is not None else [])]
    for name in columns:
        if name in known:
            continue
        if name in {f.name for f in schema.features}:
            raise SettingsError(
                f"evaluate.slices: {name} has lists of keys, and a slice is by the one key of a sample: "
                f"{', '.join(known) or 'the data set has no such column'}."
            )
        if name in schema.dense:
            raise SettingsError(
                f"evaluate.slices: {name} has numbers. The step bucketise makes a feature of it, which can be a slice."
            )
        raise SettingsError(f'evaluate.slices: the data set has no feature "{name}".{nearest(name, known)}')


def keys_of(column: str, batch: Batch) -> NDArray[np.int64]:
    """The key of each sample in a column: a feature with one key a sample, or the user."""
    if column in batch.features:
        return batch.keys(column).numpy()
    if batch.users is None:
        raise DataError(f'The samples have no "{column}" to divide them by.')
    return batch.users.numpy()


def most_frequent(columns: Sequence[str], batches: Iterable[Batch], most: int) -> list[Slice]:
    """The most frequent values of each column, of those that are as frequent the smaller keys first."""
    counted: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for batch in batches:
        for column in columns:
            found, counts = np.unique(keys_of(column, batch), return_counts=True)
            if column in counted:
                found, counts = _added(*counted[column], found, counts)
            counted[column] = found, counts
    slices = []
    for column in columns:
        keys, counts = counted.get(column, (np.empty(0, np.int64), np.empty(0, np.int64)))
        slices.append(Slice(column, keys[np.lexsort((keys, -counts))[:most]]))
    return slices


def picked(outputs: Any, samples: Tensor, size: int) -> Any:
    """What a model gave for some samples of a batch of this size."""
    if isinstance(outputs, Mapping):
        return {name: picked(value, samples, size) for name, value in outputs.items()}
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != size:
        raise SettingsError(
            "evaluate.slices: the model does not give a row for each sample, so its outputs cannot be divided. Take "
            "the setting away."
        )
    return outputs[samples.to(outputs.device)]


def _added(
    keys: NDArray[np.int64], counts: NDArray[np.int64], more: NDArray[np.int64], of_more: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    both, places = np.unique(np.concatenate([keys, more]), return_inverse=True)
    total = np.bincount(places, np.concatenate([counts, of_more]), len(both))
    return both, total.astype(np.int64)
