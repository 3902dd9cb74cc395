"""The protocol of a cache in a few lines of Python, one whole number a row: what the native one is compared with.

A row's value is minus the updates it had. There is no look-ahead: a read exchanges, and until the update of the same
worker its row is held. Who reads is told by the server at once what the native cache learns from its notices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass
class Row:
    """A row on the server."""

    clock: int = 0
    value: int = 0


@dataclass
class Copy:
    """A row in a cache: `base` is the value it would have without this worker's changes that are not written back.

    `taken` is the clock of the server's row that it stems from.
    """

    taken: int
    start: int
    current: int
    base: int
    value: int
    used: int = 0
    held: int = 0


@dataclass
class Model:
    """Some workers' caches in front of one server, with bound `s` (None: none) and room for `capacity` rows.

    With `drift` a copy is written back sooner: when it had more updates than that share of the clock it began with.

    Reads keep `margin` off the bound, as the tier does for what happens between an exchange and its read.
    """

    s: int | None
    capacity: int
    workers: int
    margin: int = 0
    drift: float = 0
    rows: dict[int, Row] = field(default_factory=dict)
    caches: list[dict[int, Copy]] = field(default_factory=list)
    updates: dict[tuple[int, int], int] = field(default_factory=dict)
    time: int = 0

    def __post_init__(self) -> None:
        self.caches = self.caches or [{} for _ in range(self.workers)]

    def read(self, worker: int, key: int) -> Copy:
        """What the worker sees; the row is held until its `update`."""
        cache = self.caches[worker]
        self.time += 1
        row = self.rows.setdefault(key, Row())
        mine = cache.get(key)
        if mine is None:
            self._make_room(worker, 1)
            mine = cache[key] = Copy(row.clock, row.clock, row.clock, row.value, row.value, held=1)
        else:
            mine.held += 1
            self._make_room(worker, 0)
            if self._written(mine) and mine.current != mine.start:
                moved = self._write(mine, row)
                if moved:
                    self._rebase(mine, row)
            if self._past(row.clock, mine.current, self.margin):
                self._rebase(mine, row)
        mine.used = self.time
        return mine

    def update(self, worker: int, key: int) -> None:
        """One update of a row that the worker read."""
        mine = self.caches[worker][key]
        mine.value -= 1
        mine.current += 1
        mine.held -= 1
        self.updates[worker, key] = self.updates.get((worker, key), 0) + 1

    def flush(self, worker: int) -> None:
        """Writes everything back; a row that others changed too is forgotten, or taken anew if it is held."""
        for key, mine in list(self.caches[worker].items()):
            if mine.current == mine.start:
                continue
            if self._write(mine, self.rows[key]):
                if mine.held:
                    self._rebase(mine, self.rows[key])
                else:
                    del self.caches[worker][key]

    def _written(self, mine: Copy) -> bool:
        if self.s is None or self.drift == 0:
            return self._past(mine.current, mine.start, 0)
        return mine.current > mine.start + min(self.s, int(self.drift * mine.start))

    def _past(self, clock: int, other: int, margin: int) -> bool:
        return self.s is not None and clock > other + max(0, self.s - margin)

    def _make_room(self, worker: int, wanted: int) -> None:
        cache = self.caches[worker]
        while len(cache) + wanted > self.capacity:
            free = [key for key, mine in cache.items() if not mine.held]
            if not free:
                return
            key = min(free, key=lambda k: cache[k].used)
            mine = cache.pop(key)
            if mine.current != mine.start:
                self._write(mine, self.rows[key])

    @staticmethod
    def _write(mine: Copy, row: Row) -> bool:
        moved = row.clock != mine.taken
        row.value += mine.value - mine.base
        row.clock = max(row.clock + 1, mine.current)
        mine.taken = mine.start = mine.current = max(mine.taken + 1, mine.current)
        mine.base = mine.value
        return moved

    @staticmethod
    def _rebase(mine: Copy, row: Row) -> None:
        pending, own = mine.current - mine.start, mine.value - mine.base
        mine.base, mine.value = row.value, row.value + own
        mine.current = max(row.clock, mine.current) if pending else row.clock
        mine.taken, mine.start = row.clock, mine.current - pending

    def total(self, key: int) -> int:
        """Updates of a row by all workers."""
        return sum(n for (_, k), n in self.updates.items() if k == key)

    def check_read(self, worker: int, key: int) -> None:
        """What a read promises."""
        mine, row = self.caches[worker][key], self.rows[key]
        assert -mine.value >= self.updates.get((worker, key), 0), "a worker does not see its own update"
        assert -mine.value <= self.total(key), "an update was counted twice"
        if self.s is not None:
            assert mine.current <= mine.start + self.s, "writes are too far behind"
            assert row.clock <= mine.current + self.s, "a read is too far behind"

    def check_end(self) -> None:
        """After everyone has flushed, every row is minus the number of its updates."""
        for worker in range(self.workers):
            self.flush(worker)
        for key, row in self.rows.items():
            assert row.value == -self.total(key), "an update was lost or applied twice"

    def state(self) -> tuple[object, ...]:
        """What decides everything that may still happen."""
        order = sorted({c.used for cache in self.caches for c in cache.values()})

        def copy(key: int, c: Copy) -> tuple[int, ...]:
            return key, c.taken, c.start, c.current, c.base, c.value, order.index(c.used), c.held

        return (
            tuple(sorted((k, r.clock, r.value) for k, r in self.rows.items())),
            tuple(tuple(sorted(copy(key, c) for key, c in cache.items())) for cache in self.caches),
            tuple(sorted(self.updates.items())),
        )

    def fork(self) -> Model:
        """The same once more."""
        return replace(
            self,
            rows={key: replace(row) for key, row in self.rows.items()},
            caches=[{key: replace(mine) for key, mine in cache.items()} for cache in self.caches],
            updates=dict(self.updates),
        )
