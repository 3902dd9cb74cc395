"""`Drawn`: items that an objective looks up besides a batch's own, as a group of the batch like any other.

Each of their features has a twin, `candidates/FEATURE`, over the same table. The group's unique samples are the items,
whatever samples there are; its inverse only shares them out. So they are grouped, fetched, pooled, trained and
counted like the rest of the batch, under every policy and wherever rows live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.objectives.catalogue import Catalogue, Keys
from hotrow.table import Feature

_TWIN = "candidates/"


class Draw:
    """Draws items of a catalogue by count ** alpha; which ones follows from seed, step and rank alone."""

    def __init__(self, catalogue: Catalogue, alpha: float, seed: int, rank: int = 0) -> None:
        self._catalogue, self._alpha, self._seed = catalogue, alpha, [seed, rank]

    @cached_property
    def _chances(self) -> npt.NDArray[np.float64]:
        raised = self._catalogue.counts.astype(np.float64) ** self._alpha
        found: npt.NDArray[np.float64] = raised / raised.sum()
        return found

    @cached_property
    def _sums(self) -> npt.NDArray[np.float64]:
        return np.cumsum(self._chances)

    def places(self, step: int, count: int) -> Keys:
        """So many places of items, drawn one by one."""
        random = np.random.default_rng([*self._seed, step])
        drawn = np.searchsorted(self._sums, random.random(count) * self._sums[-1], side="right")
        places: Keys = np.minimum(drawn, len(self._sums) - 1)
        return places

    def log_chances(self, keys: Keys) -> torch.Tensor:
        """log(Q) of each key; of one that is not in the catalogue as of the rarest that is."""
        at = self._catalogue.find(keys)
        chances = np.where(at >= 0, self._chances[at], self._chances.min())
        return torch.from_numpy(np.log(chances).astype(np.float32))


def twins(features: Sequence[Feature], names: Sequence[str]) -> list[Feature]:
    """The features that the items are looked up by; they drop nothing, for they are no fields of a sample."""
    return [f.model_copy(update={"name": twin(f.name), "dropout": 0.0}) for f in features if f.name in names]


def twin(feature: str) -> str:
    return _TWIN + feature


def with_items(batch: Batch, catalogue: Catalogue, at: Keys) -> Batch:
    """The batch with the items at these places of the catalogue."""
    shared_out = torch.arange(len(batch)) % max(len(at), 1)
    groups = catalogue.groups(at, {name: twin(name) for name in catalogue.columns})
    return replace(batch, groups=(*batch.groups, *(replace(group, inverse=shared_out) for group in groups)))


def apart(rows: Embedded) -> tuple[Embedded, Embedded | None]:
    """The rows of the batch itself, and those of the items it was given, a sample each; None if it was given none."""
    pooled: tuple[list[PooledGroup], list[PooledGroup]] = ([], [])
    for group in rows.groups:
        drawn = group.features[0].startswith(_TWIN)
        names = tuple(name.removeprefix(_TWIN) for name in group.features)
        pooled[drawn].append(replace(group, features=names, inverse=None) if drawn else group)
    sequences: tuple[dict[str, JaggedRows], dict[str, JaggedRows]] = ({}, {})
    for name in rows.sequence_features:
        sequence, drawn = rows.sequence(name), name.startswith(_TWIN)
        sequences[drawn][name.removeprefix(_TWIN)] = replace(sequence, inverse=None) if drawn else sequence
    if not pooled[True] and not sequences[True]:
        return rows, None
    return Embedded(pooled[False], sequences[False]), Embedded(pooled[True], sequences[True])
