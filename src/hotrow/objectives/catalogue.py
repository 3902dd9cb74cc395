"""`Catalogue`: the items of a split: the keys of one feature, how often each was used, and what else items have.

Where an item is one key, keys and counts come from the profile beside the data set, if that is exact; else the split
is read once, in order. Further features of an item are those of the first sample that has it. All is kept in memory:
32 bytes an item, and 8 more and 8 a key for each further feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow.data.batch import Batch, Group, Jagged, ranges
from hotrow.data.dataset import DataSet
from hotrow.data.reader import Reader
from hotrow.data.schema import MISSING
from hotrow.data.steps import Step
from hotrow.errors import DataError
from hotrow.profile import Profile, fingerprint
from hotrow.profile.counts import KeyCounts
from hotrow.profile.profile import PROFILE

Keys = npt.NDArray[np.int64]
_READ = 1 << 14
"""Samples read at a time."""
_ALL = 1 << 40


@dataclass(frozen=True)
class Catalogue:
    """Items in the order of their keys: `counts[N]` is how often each was used, `columns` their features by name."""

    keys: Keys
    counts: Keys
    columns: Mapping[str, Jagged]

    @staticmethod
    def of(item: str, keys: Tensor, counts: Tensor) -> Catalogue:
        """Items that have a key and nothing else; a loop of one's own may know them."""
        order = np.argsort(keys.numpy(), kind="stable")
        at = torch.from_numpy(order)
        return Catalogue(keys.numpy()[order], counts.numpy()[order], {item: _one_each(keys[at])})

    @staticmethod
    def read(
        dataset: DataSet, split: str, item: str, others: Sequence[str] = (), steps: Sequence[Step] = (), seed: int = 0
    ) -> Catalogue:
        """The items of a split."""
        if not others and not steps and (counts := _profiled(dataset, split, item)) is not None:
            keys, uses = (torch.from_numpy(a) for a in counts.above(1))
            there = keys != MISSING
            found = Catalogue.of(item, keys[there], uses[there])
        else:
            found = _read(Reader(dataset, split, _READ, shuffle=False, steps=steps, seed=seed), item, others)
        if not len(found):
            raise DataError(f'{dataset.path}: no sample of the split "{split}" has an item, a key of feature {item}.')
        return found

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Keys) -> Keys:
        """Where each key stands; -1 for one that is not here."""
        at = np.searchsorted(self.keys, keys).clip(max=max(len(self) - 1, 0))
        return np.where(self.keys[at] == keys, at, -1)

    def counted(self, keys: Keys) -> Keys:
        """How often each key was used; one that is not here counts as used once."""
        at = self.find(keys)
        return np.where(at >= 0, self.counts[at], 1)

    def groups(self, at: Keys, named: Mapping[str, str]) -> tuple[Group, ...]:
        """The items at these places as groups of a batch, their features under the names that `named` gives them."""
        places = torch.from_numpy(at)
        return Batch.plain({named[f]: taken(column, places) for f, column in self.columns.items()}).groups

    def batch(self, first: int, last: int) -> Batch:
        """The items from place `first` up to `last`, a sample each."""
        return Batch(self.groups(np.arange(first, last), {name: name for name in self.columns}))


def taken(bags: Jagged, at: Tensor) -> Jagged:
    """Some of the bags."""
    places, offsets = ranges(bags.offsets[:-1][at], bags.lengths[at])
    return Jagged(bags.values[places], offsets, None if bags.weights is None else bags.weights[places])


def _one_each(keys: Tensor) -> Jagged:
    return Jagged(keys, torch.arange(len(keys) + 1))


def _profiled(dataset: DataSet, split: str, item: str) -> KeyCounts | None:
    """Exact counts from the profile beside the data set, if it is of this split."""
    try:
        counts = Profile.load(dataset.path / PROFILE, fingerprint(dataset.parts(split))).keys.get(item)
    except DataError:
        return None
    return counts if counts is not None and counts.exact else None


def _read(reader: Reader, item: str, others: Sequence[str]) -> Catalogue:
    counts, parts = KeyCounts(_ALL), list[dict[str, Jagged]]()
    for batch in reader:
        keys, first, times = np.unique(batch.keys(item).numpy(), return_index=True, return_counts=True)
        new = (counts.of(keys) == 0) & (keys != MISSING)
        counts.add(keys, times)
        if new.any():
            at = torch.from_numpy(first[new])
            parts.append({item: _one_each(torch.from_numpy(keys[new]))} | {f: of_samples(batch, f, at) for f in others})
    if not parts:
        return Catalogue.of(item, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    whole = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    order = torch.argsort(whole[item].values)
    columns = {name: taken(column, order) for name, column in whole.items()}
    found = columns[item].values.numpy()
    return Catalogue(found, counts.of(found), columns)


def of_samples(batch: Batch, feature: str, samples: Tensor) -> Jagged:
    """The keys of a feature of some samples."""
    inverse = batch.group_of(feature).inverse
    return taken(batch[feature], samples if inverse is None else inverse[samples])


def _joined(parts: Sequence[Jagged]) -> Jagged:
    lengths = torch.cat([part.lengths for part in parts])
    weights = [part.weights for part in parts if part.weights is not None]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Jagged(torch.cat([part.values for part in parts]), offsets, torch.cat(weights) if weights else None)
