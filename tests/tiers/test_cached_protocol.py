"""The protocol of caches keeps its promises in every order of events, and the native one does what the model does.

All orders of two workers' events are tried on the model up to a depth, and on the native code up to a smaller one;
hypothesis then runs the two beside each other for longer, with more workers and rows.
"""

import itertools
from random import Random

import numpy as np
import pytest
from cache_model import Model
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotrow import Table
from hotrow.store.optimizers import SGD
from hotrow.table import Fill
from hotrow.tiers import Cache, CachedTier, Gradients, HostTier, Part
from hotrow.world import World


class Exactly(CachedTier):
    """A cache that is never asked ahead, so that it may use all of its bound."""

    margin = 0


class Native:
    """The same caches as a model's, of the native kind."""

    def __init__(self, s: int | None, capacity: int, workers: int, drift: float = 0) -> None:
        table = Table(name="t", dim=2, optimizer=SGD(lr=float(workers)), init=Fill(value=0.0))  # gradients are averaged
        self.host = HostTier([table])
        clock = "unbounded" if s is None else s
        settings = Cache(capacity=capacity, policy="lru", clock=clock, drift=drift, sample=0)
        self.tiers = [Exactly(self.host, settings, world=World(w, workers)) for w in range(workers)]
        self.tickets: dict[tuple[int, int], list[tuple[list[Part], object]]] = {}
        self.step = 0

    def read(self, worker: int, key: int) -> float:
        self.step += 1
        parts, rows = [Part("t", 0, np.array([key]), None, 0)], np.empty(2, np.float32)
        ticket = self.tiers[worker].fetch(parts, rows, self.step)
        self.tickets.setdefault((worker, key), []).append((parts, ticket))
        assert rows[0] == rows[1]
        return float(rows[0])

    def update(self, worker: int, key: int) -> None:
        parts, ticket = self.tickets[worker, key].pop(0)
        self.tiers[worker].update(parts, Gradients(np.ones(2, np.float32)), self.step, ticket)

    def flush(self, worker: int) -> None:
        self.tiers[worker].flush()

    def same_as(self, model: Model) -> None:
        """Every row and every copy is the model's: clocks and values."""
        keys = np.array(sorted(model.rows), np.int64)
        found = {}
        for c in self.host.stores()["t"].export():
            rows = zip(c["clocks"].tolist(), c["values"][::2].tolist(), strict=True)
            found |= dict(zip(c["keys"].tolist(), rows, strict=True))
        assert found == {key: (row.clock, row.value) for key, row in model.rows.items()}
        for tier, cache in zip(self.tiers, model.caches, strict=True):
            start, current, _, here = tier.cache.clocks(0, keys)
            clocks = zip(keys[here > 0].tolist(), start[here > 0].tolist(), current[here > 0].tolist(), strict=True)
            copies = {key: (s, c) for key, s, c in clocks}
            assert copies == {key: (mine.start, mine.current) for key, mine in cache.items()}
            values = tier._copies["t"].read(np.array(sorted(cache), np.int64))[:, 0] if cache else []
            assert list(values) == [cache[key].value for key in sorted(cache)]


Event = tuple[str, int, int]


def events(workers: int, keys: int) -> list[Event]:
    turns = [("step", w, k) for w in range(workers) for k in range(keys)]
    halves = [(what, w, k) for what in ("read", "update") for w in range(workers) for k in range(keys)]
    return [*turns, *halves, *(("flush", w, 0) for w in range(workers))]


def possible(model: Model, event: Event) -> bool:
    what, worker, key = event
    mine = model.caches[worker].get(key)
    held = mine is not None and mine.held > 0
    return held if what == "update" else not held if what in ("read", "step") else True


def happen(model: Model, event: Event) -> None:
    what, worker, key = event
    if what in ("read", "step"):
        model.read(worker, key)
        model.check_read(worker, key)
    if what in ("update", "step"):
        model.update(worker, key)
    if what == "flush":
        model.flush(worker)


@pytest.mark.parametrize(
    ("s", "keys", "capacity", "depth", "drift"),
    [
        *((0, 1, 1, 8, 0), (1, 1, 1, 8, 0), (2, 1, 1, 8, 0), (None, 1, 1, 8, 0)),
        *((0, 2, 1, 5, 0), (1, 2, 1, 5, 0), (2, 2, 2, 4, 0)),
        *((2, 1, 1, 8, 0.5), (2, 2, 2, 4, 0.5)),
    ],
)
def test_every_order_of_events_keeps_the_promises_of_a_read(s, keys, capacity, depth, drift):
    """Whatever two workers do: a read sees the worker's own updates and is within the bound of what the server has."""
    states = {(m := Model(s, capacity, 2, drift=drift)).state(): m}
    seen = 0
    for _ in range(depth):
        following: dict[tuple[object, ...], Model] = {}
        for model in states.values():
            for event in events(2, keys):
                if possible(model, event):
                    happen(after := model.fork(), event)
                    following.setdefault(after.state(), after)
        states = following
        seen += len(states)
        for model in states.values():
            model.fork().check_end()
    assert seen > 300


def margin_of(s: int, workers: int) -> int:
    """What the tier keeps off a bound."""
    return CachedTier(HostTier([Table(name="t", dim=1)]), Cache(clock=s), world=World(0, workers)).margin


@pytest.mark.parametrize("drift", [0, 0.5])
@pytest.mark.parametrize("s", [1, 2, 4])
def test_copies_that_workers_in_step_read_never_differ_by_more_than_twice_the_bound(s, drift):
    """In step: nobody updates before all have read, or reads again before it has updated. A batch may lack the row."""
    states = {((m := Model(s, 1, 2, margin_of(s, 2), drift)).state(), (0, 0), (None, None)): m}
    seen, most = set(states), 0
    while states:
        following = {}
        for (_, done, clocks), model in states.items():
            for worker, uses in itertools.product(range(2), (True, False)):
                after, halves, read = model.fork(), list(done), list(clocks)
                if halves[worker] % 2 == 0:
                    read[worker] = after.read(worker, 0).current if uses else None
                    halves[worker] += 1
                elif min(halves) < halves[worker]:
                    continue  # the others have not read yet
                else:
                    if read[worker] is not None:
                        after.update(worker, 0)
                    halves[worker] += 1
                if halves[0] == halves[1] and halves[0] % 2 and None not in read:
                    most = max(most, abs(read[0] - read[1]))
                state = (after.state(), tuple(halves), tuple(read))
                if state not in seen and max(halves) <= 2 * (s + 4):
                    seen.add(state)
                    following[state] = after
        states = following
    assert most <= 2 * s
    assert most > 0


@settings(max_examples=300)
@given(
    st.sampled_from([(2, 6), (3, 10), (4, 12), (4, 20), (8, 24), (8, 40)]),
    st.sampled_from([0, 0.05, 0.3]),
    st.integers(0, 2**32),
)
def test_nor_do_those_of_many_workers_who_come_and_go(size, drift, seed):
    """The same with bounds that leave room for stale reads: how often each worker uses the row changes now and then."""
    (workers, s), random = size, Random(seed)
    model, often = Model(s, 1, workers, margin_of(s, workers), drift), [1.0] * workers
    for _ in range(150):
        if random.random() < 0.05:
            often = [random.choice([0.0, 0.05, 0.2, 0.5, 0.9, 1.0]) for _ in range(workers)]
        who = [w for w in range(workers) if random.random() < often[w]]
        random.shuffle(who)
        clocks = [model.read(w, 0).current for w in who]
        assert max(clocks, default=0) - min(clocks, default=0) <= 2 * s
        for w in who:
            model.update(w, 0)
    model.check_end()


@pytest.mark.parametrize(("s", "drift"), [(0, 0), (1, 0), (2, 0), (None, 0), (2, 0.5), (None, 0.5)])
def test_the_native_cache_does_what_the_model_does_in_every_order(s, drift):
    tried = 0
    around = [("step", 0, 1), ("step", 1, 1)]  # of a second row, for which the first makes room
    for order in itertools.product([*events(2, 1), *around], repeat=3):
        model, native = Model(s, 1, 2, drift=drift), Native(s, 1, 2, drift)
        for event in [("step", 0, 0), ("step", 1, 0), *order]:
            if not possible(model, event):
                break
            happen(model, event)
            perform(native, event)
        else:
            tried += 1
            native.same_as(model)
    assert tried > 200


def perform(native: Native, event: Event) -> None:
    what, worker, key = event
    if what in ("read", "step"):
        native.read(worker, key)
    if what in ("update", "step"):
        native.update(worker, key)
    if what == "flush":
        native.flush(worker)


class Beside(RuleBasedStateMachine):
    """The model and the native caches, through the same events."""

    @initialize(
        s=st.sampled_from([0, 1, 2, 5, None]),
        capacity=st.integers(1, 6),
        workers=st.integers(2, 3),
        drift=st.sampled_from([0, 0.1, 0.5]),
    )
    def begin(self, s: int | None, capacity: int, workers: int, drift: float) -> None:
        self.model, self.native = Model(s, capacity, workers, drift=drift), Native(s, capacity, workers, drift)

    @rule(worker=st.integers(0, 2), key=st.integers(0, 5))
    def read(self, worker: int, key: int) -> None:
        event = ("read", worker % self.model.workers, key)
        if possible(self.model, event):
            mine = self.model.read(*event[1:])
            self.model.check_read(*event[1:])
            assert self.native.read(*event[1:]) == mine.value

    @rule(worker=st.integers(0, 2), key=st.integers(0, 5))
    def update(self, worker: int, key: int) -> None:
        event = ("update", worker % self.model.workers, key)
        if possible(self.model, event):
            happen(self.model, event)
            perform(self.native, event)

    @rule(worker=st.integers(0, 2), key=st.integers(0, 5), times=st.integers(1, 9))
    def train(self, worker: int, key: int, times: int) -> None:
        event = ("step", worker % self.model.workers, key)
        for _ in range(times if possible(self.model, event) else 0):
            happen(self.model, event)
            perform(self.native, event)

    @rule(worker=st.integers(0, 2))
    def flush(self, worker: int) -> None:
        self.model.flush(worker % self.model.workers)
        self.native.flush(worker % self.model.workers)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "model"):
            self.native.same_as(self.model)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.check_end()
            for worker in range(self.model.workers):
                self.native.flush(worker)
            self.native.same_as(self.model)


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
