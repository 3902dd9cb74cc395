"""`find_groups`: which columns change together, and which of them are worth keeping once.

A partition of the columns is judged by the bytes a batch then holds a sample: a key 8, an offset 8 for each bag, a
dense number 4, and for each group 8 for its inverse and a share of `GROUP`, what one more group costs a batch in
tensors, files and calls. A group holds its columns once for each distinct sample, so with u the share of
samples in which *any* of its columns changed:

    8 + GROUP/batch + u·(bytes of its columns) + (new keys of lists that slide)·8    and 8·u more a bag where one slides

One group is cheaper than two where that outweighs what each then repeats for the other's sake. So columns are
joined in pairs, always the pair that saves most, while a pair saves anything; those that always change end up
together as well, and are left out with all groups that save less than `least`. What is left out may then still
join a group that is there anyway. u comes from `Changes`, one popcount a pair: 1,000 columns take 1.5 seconds.
Greedy, so not always the best partition.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.dedup import window_names
from hotrow.data.schema import Repeats, Schema
from hotrow.profile.repetition import Repetition

INVERSE = 8.0
OFFSET = 8.0
KEY = 8.0
GROUP = 1 << 15
"""Bytes a batch that a group must save to be worth its tensors, files and calls: some ten microseconds of copying."""
_SLIDES_FROM = 0.1
"""A list slides if at least this share of what it holds after exact repeats went stood in the sample before as well."""

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


def find_groups(
    samples: pa.Table | Repetition, schema: Schema, *, batch_size: int = 4096, least: float = 1.1
) -> tuple[Repeats, ...]:
    """The groups to keep once, in the schema's order; none without sessions.

    `samples` are whole sessions, clustered, or what was counted of them; groups that the schema has are not looked
    at. A group pays if its columns take at least `least` times fewer bytes in a batch, its inverse counted in.
    """
    found = samples if isinstance(samples, Repetition) else Repetition.of(samples, _without_groups(schema))
    if schema.session is None or not len(found.changes):
        return ()
    columns = _Columns.of(found, schema, batch_size)
    kept: list[list[int]] = []
    rest: list[list[int]] = []
    for members in _joined(columns):
        (kept if columns.plain(members) >= least * columns.grouped(members) else rest).append(members)
    return _named(_taken_in(kept, [c for members in rest for c in members], columns), columns, schema)


@dataclass(frozen=True)
class _Columns:
    """What each column costs, a sample: `once` for each distinct sample of its group, `always` whatever the group."""

    names: tuple[str, ...]
    changed: Words
    samples: int
    batch_size: int
    whole: Floats
    once: Floats
    always: Floats
    bags: Floats
    slides: NDArray[np.bool_]

    @staticmethod
    def of(found: Repetition, schema: Schema, batch_size: int) -> _Columns:
        lists = {f.name: f.kind == "keys" for f in schema.features}
        weights = {f.name: f.weights is not None for f in schema.features}
        names = tuple(found.columns)
        whole, always, slides = np.zeros(len(names)), np.zeros(len(names)), np.zeros(len(names), dtype=bool)
        bags = np.array([float(name in lists) for name in names])
        once = np.zeros(len(names))
        for at, name in enumerate(names):
            counts = found.columns[name]
            size = (KEY + 4 * weights[name] if name in lists else 4.0) * counts.values / max(found.samples, 1)
            whole[at] = once[at] = OFFSET * bags[at] + size
            left = counts.values - counts.repeated
            if lists.get(name) and counts.overlap >= _SLIDES_FROM * left > 0:
                slides[at] = True
                once[at], always[at] = OFFSET, size * (left - counts.overlap) / counts.values
        return _Columns(names, found.changes.words(), len(found.changes), batch_size, whole, once, always, bags, slides)

    @property
    def inverse(self) -> float:
        """What a group costs a sample before it holds anything."""
        return INVERSE + GROUP / self.batch_size

    def share(self, changed: NDArray[np.uint64]) -> Floats:
        """Distinct samples in a batch, a sample: those that changed, and the first of the batch in any case."""
        shares: Floats = np.bitwise_count(changed).sum(axis=-1, dtype=np.int64) / self.samples
        return (1 + (self.batch_size - 1) * shares) / self.batch_size

    def any_changed(self, members: Sequence[int]) -> Words:
        changed: Words = np.bitwise_or.reduce(self.changed[list(members)], axis=0)
        return changed

    def plain(self, members: Sequence[int]) -> float:
        return float(self.whole[list(members)].sum())

    def grouped(self, members: Sequence[int]) -> float:
        at = list(members)
        share = float(self.share(self.any_changed(members)))
        begins = OFFSET * self.bags[at].sum() if self.slides[at].any() else 0.0
        return float(self.inverse + share * (self.once[at].sum() + begins) + self.always[at].sum())


def _joined(columns: _Columns) -> list[list[int]]:
    """All columns, in sets that are each cheapest with one inverse."""
    count = len(columns.names)
    members = [[c] for c in range(count)]
    changed, once, bags = columns.changed.copy(), columns.once.copy(), columns.bags.copy()
    slides = columns.slides.copy()
    share = columns.share(changed)
    there = np.ones(count, dtype=bool)

    def gains(a: int) -> Floats:
        """What one inverse for set `a` and each other set saves against two."""
        both = columns.share(changed | changed[a])
        before = share * (once + OFFSET * bags * slides) + share[a] * (once[a] + OFFSET * bags[a] * slides[a])
        after = both * (once + once[a] + OFFSET * (bags + bags[a]) * (slides | slides[a]))
        gained: Floats = columns.inverse + before - after
        gained[~there] = gained[a] = -np.inf
        return gained

    gain = np.stack([gains(a) for a in range(count)])
    best, partner = gain.max(axis=1), gain.argmax(axis=1)
    while count > 1:
        a = int(best.argmax())
        if best[a] <= 0:
            break
        a, b = sorted((a, int(partner[a])))
        members[a] = sorted(members[a] + members[b])
        changed[a] |= changed[b]
        once[a], bags[a], slides[a] = once[a] + once[b], bags[a] + bags[b], slides[a] | slides[b]
        share[a] = columns.share(changed[a])
        there[b] = False
        gain[a] = gain[:, a] = gains(a)
        gain[b] = gain[:, b] = -np.inf
        stale = np.flatnonzero((partner == a) | (partner == b) | (gain[:, a] > best))
        best[stale], partner[stale] = gain[stale].max(axis=1), gain[stale].argmax(axis=1)
    return [members[c] for c in np.flatnonzero(there)]


def _taken_in(groups: list[list[int]], rest: Iterable[int], columns: _Columns) -> list[list[int]]:
    """The groups, with each column that still saves something by joining the one where it saves most."""
    for column in sorted(rest, key=lambda c: columns.share(columns.changed[c])):
        costs = [columns.grouped([*g, column]) - columns.grouped(g) for g in groups]
        if costs and min(costs) < columns.plain([column]):
            groups[int(np.argmin(costs))].append(column)
    return sorted(sorted(g) for g in groups)


def _named(groups: list[list[int]], columns: _Columns, schema: Schema) -> tuple[Repeats, ...]:
    """The groups, less columns that are called as the windows of one that slides beside them."""
    taken = {*schema.prepared().columns, *columns.names}
    found = []
    for group in groups:
        windows = {name for c in group if columns.slides[c] for name in window_names(columns.names[c])}
        kept = [c for c in group if columns.names[c] not in windows]
        members = tuple(columns.names[c] for c in kept)
        name = _name(members, taken)
        taken.add(name)
        slides = tuple(columns.names[c] for c in kept if columns.slides[c])
        found.append(Repeats(name=name, columns=members, slides=slides))
    return tuple(found)


def _name(members: Sequence[str], taken: set[str]) -> str:
    """After what the columns' names begin with, or the first of them; a name no column or other group has."""
    shared = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*members, strict=False))
    stem = "".join(letters[0] for letters in shared)
    if len(stem.strip("_-0123456789")) < 3:
        stem = members[0]
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-") or "columns"
    number, name = 1, f"{stem}_group"
    while name in taken:
        number += 1
        name = f"{stem}_group_{number}"
    return name


def _without_groups(schema: Schema) -> Schema:
    return schema.model_copy(update={"groups": None})
