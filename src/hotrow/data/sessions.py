"""Who sees what when, in a synthetic log: overlapping sessions, put in order of time a block at a time.

`Sessions` gives `Visits`: arrays over samples in order of time. A block of sessions is drawn at once; samples
later than the beginning of the next block wait for it. What is carried on beyond that is what the histories
need: for every user the last items seen, and for every open session the position of its snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hotrow.data.mix import Randoms
    from hotrow.data.synth import SynthSettings

Ints = NDArray[np.int64]

BLOCK = 4096
"""Sessions drawn at a time. The log does not depend on it."""

_SESSION_EVERY = 2_500
_LAG = 64
"""The most items a user may have seen since the snapshot of a history."""


@dataclass(frozen=True)
class Visits:
    """Samples in order of time. All arrays but the last two are one number a sample."""

    session: Ints
    step: Ints
    user: Ints
    item: Ints
    time: Ints
    fresh: NDArray[np.bool_]
    changes: Ints
    """[n, slow + interests]: how often a feature has changed since the session began"""
    history: NDArray[np.int32]
    """[n, history_length]: ordinals of items, the newest last, padded in front by the number of items"""

    def __len__(self) -> int:
        return len(self.session)

    def first(self, count: int) -> Visits:
        return self.pick(slice(0, count)) if count < len(self) else self

    def pick(self, rows: slice | Ints | NDArray[np.bool_]) -> Visits:
        return Visits(*(getattr(self, f.name)[rows] for f in fields(self)))

    def join(self, other: Visits) -> Visits:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Visits(*(np.concatenate(pair) for pair in pairs))

    def state(self, feature: int) -> tuple[Ints, Ints]:
        """What, with the user, decides the value of a slow feature: the user's own until it first changes."""
        changes = self.changes[:, feature]
        return np.where(changes > 0, self.session + 1, 0), changes


class Sessions:
    """All visits there will ever be; iterate as long as more are wanted, or with `whole` until there are no more."""

    def __init__(self, settings: SynthSettings, random: Randoms) -> None:
        self._settings, self._random = settings, random
        self._keep = settings.history_length + _LAG
        past = min(settings.past, settings.history_length)
        self._seen = np.full(settings.users, past, dtype=np.int64)
        self._recent = np.zeros((settings.users, self._keep), dtype=np.int32)
        everyone = np.arange(settings.users)
        for at in range(past):
            drawn = random.uniform("past", everyone, np.full(settings.users, at))
            self._recent[:, at] = random.zipf(settings.items, settings.item_zipf, drawn)
        self._snapshots = np.zeros(0, dtype=np.int64)
        self._oldest = 0
        self._last_time = -1
        self._count, self._last_length = self._whole() if settings.whole else (1 << 62, 0)

    def __iter__(self) -> Iterator[Visits]:
        waiting = self._draw(0, 0)
        number = 0
        while number < self._count:
            waiting = waiting.join(self._draw(number, min(number + BLOCK, self._count)))
            number += BLOCK
            waiting = waiting.pick(np.lexsort((waiting.session, waiting.time)))
            last = number >= self._count
            ready = len(waiting) if last else int(np.searchsorted(waiting.time, number * _SESSION_EVERY))
            now, waiting = waiting.pick(slice(0, ready)), waiting.pick(slice(ready, len(waiting)))
            if ready:
                yield self._remember(now, int(waiting.session.min()) if len(waiting) else number, number)

    def _draw(self, first: int, last: int) -> Visits:
        """The samples of some sessions, session after session."""
        s, random = self._settings, self._random
        sessions = np.arange(first, last, dtype=np.int64)
        history_change = s.change if s.history_change is None else s.history_change
        lengths = self._lengths(sessions)
        if last == self._count:
            lengths[-1:] = self._last_length
        users = random.zipf(s.users, s.user_zipf, random.uniform("session user", sessions))
        begins = ((sessions + random.uniform("session begin", sessions)) * _SESSION_EVERY).astype(np.int64)
        session = np.repeat(sessions, lengths)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        step = np.arange(len(session)) - starts
        pause = ((0.2 + 1.6 * random.uniform("pause", session, step)) * (s.pause * 1000)).astype(np.int64)
        pause[step == 0] = 0
        elapsed = np.cumsum(pause)
        changed = np.empty((len(session), s.slow + s.interests), dtype=np.int64)
        for i in range(changed.shape[1]):
            clock = i if s.clocks is None else i % s.clocks
            drawn = random.uniform(f"change {clock}", session, step) < s.change
            total = np.cumsum(drawn & (step > 0))
            changed[:, i] = total - total[starts] if len(total) else total
        return Visits(
            session=session,
            step=step,
            user=np.repeat(users, lengths),
            item=random.zipf(s.items, s.item_zipf, random.uniform("item", session, step)),
            time=np.repeat(begins, lengths) + elapsed - (elapsed[starts] if len(elapsed) else 0),
            fresh=(step == 0) | (random.uniform("fresh", session, step) < history_change),
            changes=changed,
            history=np.zeros((len(session), 0), dtype=np.int32),
        )

    def _lengths(self, sessions: Ints) -> Ints:
        """Geometric with the wanted mean, and never more than twenty times it."""
        mean = self._settings.samples_per_session
        if mean == 1:
            return np.ones(len(sessions), dtype=np.int64)
        drawn = np.log1p(-self._random.uniform("session length", sessions)) / np.log1p(-1 / mean)
        lengths: Ints = 1 + np.minimum(drawn, 20 * mean).astype(np.int64)
        return lengths

    def _whole(self) -> tuple[int, int]:
        """How many sessions have all the samples wanted, and how long the last of them then is."""
        number, left = 0, self._settings.samples
        while True:
            lengths = self._lengths(np.arange(number, number + BLOCK, dtype=np.int64))
            total = np.cumsum(lengths)
            if total[-1] >= left:
                last = int(np.searchsorted(total, left))
                return number + last + 1, int(left - (total[last] - lengths[last]))
            number, left = number + BLOCK, left - int(total[-1])

    def _remember(self, v: Visits, oldest: int, newest: int) -> Visits:
        """`v` with histories and strictly growing times; what later visits need is kept."""
        count = np.arange(len(v))
        time = np.maximum.accumulate(np.maximum(v.time, self._last_time + 1) - count) + count
        self._last_time = int(time[-1])
        by_user = np.argsort(v.user, kind="stable")
        users, starts, sizes = np.unique(v.user[by_user], return_index=True, return_counts=True)
        position = np.empty(len(v), dtype=np.int64)  # how many items the user had seen before
        position[by_user] = np.arange(len(v)) + np.repeat(self._seen[users] - starts, sizes)
        snapshot = np.maximum(self._snapshot(v, position, oldest, newest), position - _LAG)
        history = self._items_before(v, snapshot, by_user, users, starts, sizes)
        self._seen[users] += sizes
        kept = position >= self._seen[v.user] - self._keep
        self._recent[v.user[kept], position[kept] % self._keep] = v.item[kept]
        return Visits(v.session, v.step, v.user, v.item, time, v.fresh, v.changes, history)

    def _snapshot(self, v: Visits, position: Ints, oldest: int, newest: int) -> Ints:
        """Each session's latest snapshot, as a position in what its user has seen."""
        states = np.zeros(newest - self._oldest, dtype=np.int64)
        states[: len(self._snapshots)] = self._snapshots
        order = np.argsort(v.session, kind="stable")
        session, fresh = v.session[order], v.fresh[order]
        first = np.append(True, session[1:] != session[:-1])
        value = np.where(fresh, position[order], states[session - self._oldest])
        latest = value[np.maximum.accumulate(np.where(fresh | first, np.arange(len(v)), 0))]
        last = np.append(first[1:], True)
        states[session[last] - self._oldest] = latest[last]
        self._snapshots, self._oldest = states[oldest - self._oldest :], oldest
        found = np.empty_like(latest)
        found[order] = latest
        return found

    def _items_before(
        self, v: Visits, snapshot: Ints, by_user: Ints, users: Ints, starts: Ints, sizes: Ints
    ) -> NDArray[np.int32]:
        """The last items before each snapshot: [n, history_length]."""
        length, keep = self._settings.history_length, self._keep
        old = np.minimum(self._seen[users], keep)
        oldest = self._seen[users] - old
        begins = np.cumsum(old + sizes) - (old + sizes)
        # for each user what is remembered, then what is new
        seen = np.empty(int((old + sizes).sum()), dtype=np.int32)
        owner = np.repeat(np.arange(len(users)), old)
        at = np.arange(len(owner)) - np.repeat(np.cumsum(old) - old, old)
        seen[begins[owner] + at] = self._recent[users[owner], (oldest[owner] + at) % keep]
        seen[np.arange(len(v)) + np.repeat(begins + old - starts, sizes)] = v.item[by_user]
        ends = (begins - oldest)[np.searchsorted(users, v.user)] + snapshot
        items = np.full((length, len(v)), self._settings.items, dtype=np.int32)
        for back in range(1, length + 1):
            there = np.flatnonzero(snapshot >= back)
            items[length - back, there] = seen[ends[there] - back]
        return items.T
