"""The factor of deduplication: values of the samples, spelled out, over values held. Expected, and reached.

RecD expects of a feature of mean length l, in a batch of B samples with S of each session, d being the chance
that a value is unchanged, `l·B·(1 - d·(S-1)/S)` values. Three things are added here.

- Sessions stand together and a batch cuts the first and the last of them, so S is a batch's own. Its first sample is
  held whole whatever came before it; any other is new as often as in the whole data. With v values held
  a sample in the data (for an exact repeat: l·(1 - d·(S-1)/S) with S the data's mean), that is

      l + (B - 1)·v

  which needs no assumption on how long sessions are: the number of sessions in a batch is linear in B.
- A group is unchanged only if all its columns are. Where its groups were counted that is exact; for any others it is
  taken from the sample of changes.
- Of a list that slides, v is what it adds on the right, however its group changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hotrow.data.schema import Repeats, Schema
from hotrow.profile.repetition import Repetition
from hotrow.settings import Settings

if TYPE_CHECKING:
    from hotrow.data.batch import Batch, Group
    from hotrow.data.dataset import DataSet


class Factors(Settings):
    """1 is nothing saved, 4 a quarter held."""

    total: float
    """values of all features over those held"""
    groups: dict[str, float]
    """samples over distinct samples"""
    features: dict[str, float]
    """values of a feature over those held"""


def expected(found: Repetition, schema: Schema, batch_size: int) -> Factors:
    """What batches of `batch_size` clustered samples should reach with the schema's groups."""
    groups = schema.groups or ()
    if groups == found.repeats:
        rows = {g.name: float(found.groups[g.name].rows) for g in groups}
        held = {f.name: float(found.columns[f.name].kept) for f in schema.features}
    else:
        rows = {g.name: found.changes.share(_positions(found, g)) * found.samples for g in groups}
        held = _estimated(found, schema, rows)
    samples = max(found.samples, 1)
    size = min(batch_size, samples)
    values = {f.name: found.columns[f.name].values for f in schema.features}
    in_batch = {name: (whole + (size - 1) * held[name]) / samples for name, whole in values.items()}
    return _factors(
        {name: size * whole / samples for name, whole in values.items()},
        in_batch,
        {name: size / (1 + (size - 1) * count / samples) for name, count in rows.items()},
    )


def reached(batches: Iterable[Batch], schema: Schema) -> Factors:
    """What these batches hold, counted."""
    samples, rows = 0, dict.fromkeys((g.name for g in schema.groups or ()), 0)
    named = {name: g.name for g in schema.groups or () for name in g.columns}
    whole, held = (dict.fromkeys((f.name for f in schema.features), 0) for _ in range(2))
    for batch in batches:
        samples += batch.size
        met = set[str]()
        for group in batch.groups:
            for feature in group.features:
                whole[feature] += _spelled_out(group, feature)
                held[feature] += _held(group, feature)
                if feature in named and named[feature] not in met:
                    met.add(named[feature])
                    rows[named[feature]] += group.unique_size
    return _factors(whole, held, {name: samples / count for name, count in rows.items() if count})


def stored(dataset: DataSet, found: Repetition, split: str = "train") -> Factors:
    """What the files of a split hold; how long the samples' lists are is taken from `found`."""
    schema, rows = dataset.schema, Counter[str]()
    for part in dataset.parts(split):
        for file in part.files:
            rows[file.table] += sum(file.rows)
    samples = max(dataset.samples(split), 1)
    whole = {f.name: float(found.columns[f.name].values) for f in schema.features}
    held = dict(whole)
    for group in schema.groups or ():
        for name in group.columns:
            if name in group.slides:
                held[name] = float(rows[f"{group.name}.{name}"])
            elif name in held:
                held[name] = rows[group.name] * _length_kept(found, group, name)
    return _factors(whole, held, {g.name: samples / max(rows[g.name], 1) for g in schema.groups or ()})


def met(found: Repetition, batch_size: int, *, clustered: bool = True) -> float:
    """How many samples of one session meet in a batch: clustered, or drawn at random from all samples."""
    size = min(batch_size, max(found.samples, 1))
    if clustered:
        return size / (1 + (size - 1) / found.samples_per_session)
    chance = 1 - size / max(found.samples, 1)
    return size / sum(count * (1 - chance**length) for length, count in found.session_lengths.items())


def _estimated(found: Repetition, schema: Schema, rows: Mapping[str, float]) -> dict[str, float]:
    """Values that groups which were not counted would hold."""
    held = {f.name: float(found.columns[f.name].values) for f in schema.features}
    for group in schema.groups or ():
        for name in set(group.columns) & set(held):
            counts = found.columns[name]
            if name in group.slides:
                held[name] = float(counts.values - counts.repeated - counts.overlap)
            else:
                held[name] *= rows[group.name] / max(found.samples, 1)
    return held


def _factors(whole: Mapping[str, float], held: Mapping[str, float], groups: dict[str, float]) -> Factors:
    return Factors(
        total=_ratio(sum(whole.values()), sum(held.values())),
        groups=groups,
        features={name: _ratio(count, held[name]) for name, count in whole.items()},
    )


def _length_kept(found: Repetition, group: Repeats, name: str) -> float:
    """Mean values in a row of the group, if that was counted; else in a sample."""
    counted = found.groups.get(group.name)
    if counted is not None and counted.columns == group.columns and counted.rows:
        return found.columns[name].kept / counted.rows
    return found.length(name)


def _ratio(whole: float, held: float) -> float:
    return whole / held if held else 1.0


def _positions(found: Repetition, group: Repeats) -> list[int]:
    names = list(found.columns)
    return [names.index(name) for name in group.columns]


def _spelled_out(group: Group, feature: str) -> int:
    """Values the feature would have with every sample spelled out."""
    f, size = group.features.index(feature), group.unique_size
    lengths = np.diff(group.offsets.numpy()[f * size : (f + 1) * size + 1])
    return int(lengths.sum() if group.inverse is None else lengths[group.inverse.numpy()].sum())


def _held(group: Group, feature: str) -> int:
    """Values the feature has in the batch, those of overlapping windows once."""
    f, size = group.features.index(feature), group.unique_size
    offsets = group.offsets.numpy()[f * size : (f + 1) * size + 1]
    if group.begins is None:
        return int(offsets[-1] - offsets[0])
    begins = group.begins.numpy()[f * size : (f + 1) * size]
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], (begins + np.diff(offsets))[order]
    covered = np.append(0, np.maximum.accumulate(ends)[:-1])
    return int(np.maximum(ends - np.maximum(begins, covered), 0).sum())
