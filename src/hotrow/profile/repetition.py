"""`Repetition`: how much the samples of a session repeat each other, as counts that can be added up.

Taken from clustered samples: whole sessions, all samples of a session neighbours in order of time. Per column
it counts values, samples unchanged from the one before them in their session, values of those, samples that
slid (`neighbours`) and the values of theirs that stood before; of all columns a sample of changes (`changes`),
from which groups are found; and for the groups of the schema, if it has some, exactly what they keep. Without a
session column every sample is its own session, and so is one whose session is missing.

Memory is a few columns of 32k samples, or of the longest session. On one core about 150 million values a second.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.dedup import session_begins
from hotrow.data.mix import mix64
from hotrow.data.schema import MISSING, Repeats, Schema
from hotrow.errors import DataError
from hotrow.profile.changes import Changes, hash_of
from hotrow.profile.neighbours import Ints, Mask, Values
from hotrow.settings import Settings

_CHUNK = 1 << 15


class ColumnCounts(Settings):
    """What was counted of a feature or dense column."""

    values: int = 0
    bytes: int = 0
    unchanged: int = 0
    """samples equal to the one before in their session"""
    repeated: int = 0
    """their values"""
    slid: int = 0
    """samples not equal to the one before, whose head is its tail"""
    overlap: int = 0
    """values in these heads"""
    kept: int = 0
    """values that a data set with the schema's groups holds"""

    def __add__(self, other: ColumnCounts) -> ColumnCounts:
        return ColumnCounts(**{name: getattr(self, name) + getattr(other, name) for name in ColumnCounts.model_fields})


class GroupCounts(Settings):
    """A group of the schema, and how many distinct samples it keeps."""

    columns: tuple[str, ...]
    slides: tuple[str, ...] = ()
    rows: int = 0


@dataclass(frozen=True)
class Repetition:
    """Counts over clustered samples. `Repetition.of(samples, schema)`, then `merge`."""

    samples: int
    session_lengths: Mapping[int, int]
    """how many sessions there are of each length"""
    columns: Mapping[str, ColumnCounts]
    """features in the schema's order, then dense columns"""
    groups: Mapping[str, GroupCounts]
    changes: Changes

    @staticmethod
    def of(samples: pa.Table, schema: Schema) -> Repetition:
        """Counts of whole sessions; the columns are those of a prepared, flat data set with this schema."""
        names = [f.name for f in schema.features] + list(schema.dense)
        found = Repetition(
            0,
            {},
            {name: ColumnCounts() for name in names},
            {g.name: GroupCounts(columns=g.columns, slides=g.slides) for g in schema.groups or ()},
            Changes.of(np.zeros(0, np.uint64), np.zeros((len(names), 0), bool)),
        )
        sessions = _sessions(samples, schema)
        begins = session_begins(sessions)
        hashes = hash_of(sessions, _steps(samples, sessions, begins))
        for rows in _chunks(begins):
            part = samples.slice(rows.start, rows.stop - rows.start)
            found = found.merge(_count(part, begins[rows], hashes[rows], schema, found.changes.halvings))
        lengths = np.diff(np.append(np.flatnonzero(begins), len(begins)))
        return Repetition(found.samples, _histogram(lengths), found.columns, found.groups, found.changes)

    def merge(self, other: Repetition) -> Repetition:
        """Counts of both; a session must not have samples in each."""
        if list(self.columns) != list(other.columns) or _shapes(self) != _shapes(other):
            raise DataError("Counts of repetition can only be merged if they are of the same columns and groups.")
        lengths = Counter(self.session_lengths) + Counter(other.session_lengths)
        return Repetition(
            self.samples + other.samples,
            dict(sorted(lengths.items())),
            {name: counts + other.columns[name] for name, counts in self.columns.items()},
            {
                name: group.model_copy(update={"rows": group.rows + other.groups[name].rows})
                for name, group in self.groups.items()
            },
            self.changes.merge(other.changes),
        )

    @property
    def sessions(self) -> int:
        return sum(self.session_lengths.values())

    @property
    def samples_per_session(self) -> float:
        return self.samples / max(self.sessions, 1)

    @property
    def repeats(self) -> tuple[Repeats, ...]:
        """The groups that were counted."""
        return tuple(Repeats(name=n, columns=g.columns, slides=g.slides) for n, g in self.groups.items())

    def length(self, column: str) -> float:
        """Mean number of values a sample."""
        return self.columns[column].values / max(self.samples, 1)

    def unchanged(self, column: str) -> float:
        """The chance that a sample's value equals that of the sample before it in its session."""
        return self.columns[column].unchanged / max(self.samples - self.sessions, 1)

    def unchanged_or_slid(self, column: str) -> float:
        """The same, counting lists whose head is the tail of the one before."""
        counts = self.columns[column]
        return (counts.unchanged + counts.slid) / max(self.samples - self.sessions, 1)

    @property
    def exact_share(self) -> float:
        """Share of all values that stand in an exact repeat of the sample before."""
        return sum(c.repeated for c in self.columns.values()) / max(self._values, 1)

    @property
    def slid_share(self) -> float:
        """The same, counting values that a list which slid has in common with the one before."""
        return sum(c.repeated + c.overlap for c in self.columns.values()) / max(self._values, 1)

    @property
    def _values(self) -> int:
        return sum(c.values for c in self.columns.values())


def _count(samples: pa.Table, begins: Mask, hashes: NDArray[np.uint64], schema: Schema, halvings: int) -> Repetition:
    """Counts of some whole sessions; their lengths are left to the caller."""
    group_of = {name: g for g in schema.groups or () for name in g.columns}
    changed = np.empty((len(schema.features) + len(schema.dense), len(begins)), dtype=bool)
    new_rows = {g.name: np.zeros(len(begins), dtype=bool) for g in schema.groups or ()}
    columns, lengths = {}, {}
    for at, (name, values, item_bytes) in enumerate(_columns(samples, schema)):
        changed[at] = values.changed(begins)
        counts = _count_column(values, changed[at], begins, item_bytes)
        group = group_of.get(name)
        if group is None:
            counts = counts.model_copy(update={"kept": counts.values})
        else:
            new_rows[group.name] |= changed[at]
            if name not in group.slides:
                lengths[name] = values.lengths
        columns[name] = counts
    for name, sizes in lengths.items():  # once it is known in which samples anything of their group changed
        kept = int(sizes[new_rows[group_of[name].name]].sum())
        columns[name] = columns[name].model_copy(update={"kept": kept})
    groups = {
        g.name: GroupCounts(columns=g.columns, slides=g.slides, rows=np.count_nonzero(new_rows[g.name]))
        for g in schema.groups or ()
    }
    return Repetition(len(begins), {}, columns, groups, Changes.of(hashes, changed, halvings))


def _count_column(values: Values, changed: Mask, begins: Mask, item_bytes: int) -> ColumnCounts:
    """Counts of a column; `kept` as for a list that slides."""
    lengths = values.lengths
    total, repeated = int(lengths.sum()), int(lengths[~changed].sum())
    slid = overlap = 0
    if values.offsets is not None:
        rows = np.flatnonzero(changed)
        heads = lengths[rows] - values.new(rows, begins)
        slid, overlap = int(np.count_nonzero(heads)), int(heads.sum())
    return ColumnCounts(
        values=total,
        bytes=total * item_bytes,
        unchanged=len(begins) - np.count_nonzero(changed),
        repeated=repeated,
        slid=slid,
        overlap=overlap,
        kept=total - repeated - overlap,
    )


def _columns(samples: pa.Table, schema: Schema) -> Iterator[tuple[str, Values, int]]:
    """Each column with its name and the bytes of a value."""
    for feature in schema.features:
        yield feature.name, Values.of_feature(samples, feature), 8 if feature.weights is None else 12
    for name in schema.dense:
        yield name, Values.of_dense(samples, name), 4


def _chunks(begins: Mask) -> Iterator[slice]:
    """Whole sessions, `_CHUNK` samples or as few more as it takes."""
    at = np.flatnonzero(begins)
    wanted = np.arange(_CHUNK, len(begins), _CHUNK)
    cuts = np.unique(np.append(at, len(begins))[np.searchsorted(at, wanted)])
    for first, last in itertools.pairwise([0, *cuts.tolist(), len(begins)]):
        if last > first:
            yield slice(first, last)


def _sessions(samples: pa.Table, schema: Schema) -> Ints:
    if schema.session is None:
        return np.arange(len(samples), dtype=np.int64)
    sessions: Ints = samples.column(schema.session).to_numpy()
    return sessions


def _steps(samples: pa.Table, sessions: Ints, begins: Mask) -> Ints:
    """The place of each sample in its session; those without a session are told apart by the numbers they hold."""
    places = np.arange(len(sessions))
    steps: Ints = places - np.maximum.accumulate(np.where(begins, places, 0))
    alone = np.flatnonzero(sessions == MISSING)
    if len(alone):
        held = np.zeros(len(alone), np.uint64)
        for column in samples.columns:
            if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
                values = pc.fill_null(column, 0).to_numpy()[alone]
                held = mix64(held ^ values.view(f"u{values.itemsize}").astype(np.uint64))
        steps[alone] = held.view(np.int64)
    return steps


def _histogram(lengths: Ints) -> dict[int, int]:
    found, counts = np.unique(lengths, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _shapes(repetition: Repetition) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(name, g.columns, g.slides) for name, g in repetition.groups.items()]
