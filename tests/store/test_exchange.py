"""What answers caches: a request is whole or it is refused, and is applied once however often it comes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow import Table, _native
from hotrow.errors import StoreError
from hotrow.store.exchange import Exchange
from hotrow.store.optimizers import SGD, Adagrad
from hotrow.store.store import RowStore, read
from hotrow.table import Fill

TABLES = [
    Table(name="a", dim=3, optimizer=SGD(lr=2.0), init=Fill(value=0.0)),
    Table(name="b", dim=2, optimizer=Adagrad(), dtype="bfloat16"),
]


class Worker:
    """A cache and what its batches do, without a tier around it."""

    def __init__(
        self, exchange: Exchange, *, sole: bool = False, bound: int | None = 10, capacity: int = 100, sample: int = 0
    ) -> None:
        self.exchange, self.stores = exchange, [RowStore(table) for table in TABLES]
        self.cache = _native.Cache(
            stores=[store.native for store in self.stores],
            evicts=[False, False],
            capacity=capacity,
            in_bytes=False,
            keep=0,
            popular=1,
            bound=bound,
            drift=0.0,
            margin=0,
            sole=sole,
            sample=sample,
            shards=1,
            client=id(self),
        )

    def plan(self, keys: list[int], step: int = 0, flush: bool = False) -> _native.Trip:
        trip = _native.Trip(self.cache)
        trip.plan(self.cache, [0, 1], [np.array(keys, np.int64)] * 2, step, flush)
        return trip

    def go(self, trip: _native.Trip) -> _native.Trip:
        (request,) = trip.requests
        if request is not None:
            trip.absorb(0, self.exchange.answer(request))
        if trip.go_again():
            self.go(trip)
        return trip

    def train(self, keys: list[int], times: int = 1) -> None:
        for step in range(times):
            trip = self.go(self.plan(keys, step))
            for store in self.stores:
                store.update(np.array(keys, np.int64), np.ones((len(keys), store.table.dim), np.float32), 1.0)
            trip.release()

    def rows(self, keys: list[int]) -> list[float]:
        return self.stores[0].read(np.array(keys, np.int64))[:, 0].tolist()


@pytest.fixture
def stores() -> list[RowStore]:
    return [RowStore(table) for table in TABLES]


@given(st.data())
def test_a_request_that_is_not_whole_is_refused_and_touches_nothing(data):
    stores = [RowStore(table) for table in TABLES]
    exchange = Exchange(stores)
    worker = Worker(exchange)
    worker.train([1, 2, 3])
    (request,) = worker.plan([2, 3, 4], flush=False).requests
    whole = bytes(request)
    at = data.draw(st.integers(0, len(whole)))
    wrong = data.draw(
        st.sampled_from(
            [whole[:at], whole + b"\0" * 8, b"", whole[:4] + b"\xff" + whole[5:], whole[:6] + b"\xff\xff" + whole[8:]]
        )
    )
    before = [list(store.export()) for store in stores]
    if wrong != whole:
        with pytest.raises(StoreError, match="cannot be answered"):
            exchange.answer(np.frombuffer(wrong, np.uint8))
    np.testing.assert_equal([list(store.export()) for store in stores], before)


@given(st.binary(max_size=400), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6))
def test_any_bytes_at_all_are_answered_or_refused(noise, changes):
    exchange = Exchange([RowStore(table) for table in TABLES])
    worker = Worker(exchange)
    worker.train([1, 2, 3])
    blob = np.array(worker.plan([2, 3, 4]).requests[0])
    for at, value in changes:
        blob[at % len(blob)] = value
    for request in (np.frombuffer(noise, np.uint8), blob):
        try:
            exchange.answer(request)
        except StoreError:
            continue


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6), st.integers(0, 8))
def test_an_answer_that_is_damaged_is_refused_or_fits(changes, cut):
    worker = Worker(Exchange([RowStore(table) for table in TABLES]))
    worker.train([1, 2, 3])
    trip = worker.plan([2, 3, 4])
    answer = np.array(worker.exchange.answer(trip.requests[0]))
    for at, value in changes:
        answer[at % len(answer)] = value
    try:
        trip.absorb(0, answer[: len(answer) - cut])
    except ValueError as error:
        assert "not the answer" in str(error)


@pytest.mark.parametrize("sole", [True, False])
def test_a_request_that_comes_again_is_answered_and_not_applied_twice(stores, sole):
    exchange = Exchange(stores)
    worker = Worker(exchange, sole=sole, bound=0)
    worker.train([1, 2])
    trip = worker.plan([1, 2, 3])
    (request,) = trip.requests
    exchange.answer(request)
    trip.absorb(0, exchange.answer(request, again=True))
    assert worker.rows([1, 2, 3]) == [-1.0, -1.0, 0.0]
    assert stores[0].read(np.array([1, 2, 3]))[:, 0].tolist() == [-1.0, -1.0, 0.0]


def test_what_one_cache_writes_back_another_sees_under_its_own_changes(stores):
    exchange = Exchange(stores)
    one, two = Worker(exchange, bound=1), Worker(exchange, bound=1)
    two.train([7])
    one.train([7], times=6)  # written back when the bound was passed
    two.go(two.plan([7]))
    assert two.rows([7]) == [-1.0 + stores[0].read(np.array([7]))[0, 0]]
    for worker in (one, two):
        worker.go(worker.plan([7], flush=True))
    assert stores[0].read(np.array([7]))[0, 0] == -7.0


def test_a_server_that_was_started_anew_makes_caches_check_what_they_hold(stores):
    """The ledger is gone with its process: each copy is checked at its next use, and only then."""
    exchange = Exchange(stores)
    worker, other = (Worker(exchange, bound=2) for _ in range(2))
    worker.go(worker.plan([1, 2, 3]))
    other.train([1], times=9)
    other.go(other.plan([1], flush=True))
    worker.exchange = Exchange(stores)
    worker.go(worker.plan([1, 2]))
    counts = worker.cache.counts()
    assert counts["checked"] == 4  # two keys of two tables
    assert worker.rows([1]) == [-9.0]
    worker.go(worker.plan([1, 2]))
    assert worker.cache.counts()["checked"] == 4


def test_a_cache_that_was_away_for_longer_than_the_server_remembers_checks_what_it_holds(stores):
    exchange = Exchange(stores)
    away, busy = Worker(exchange, bound=1), Worker(exchange, bound=None, capacity=1 << 20)
    away.go(away.plan([1, 2]))
    keys = np.arange(1 << 14)
    for _ in range(18):  # more than the ring of the ledger holds
        trip = _native.Trip(busy.cache)
        trip.plan(busy.cache, [0], [keys], 0)
        busy.go(trip)
        busy.stores[0].update(keys, np.ones((len(keys), 3), np.float32), 1.0)
        trip = _native.Trip(busy.cache)
        trip.plan(busy.cache, [0], [keys], 0, flush=True)
        busy.go(trip)
    away.go(away.plan([1, 2]))
    assert away.cache.counts()["checked"] == 4
    assert away.rows([1, 2]) == [-18.0, -18.0]


def test_the_clocks_of_sampled_rows_are_told(stores):
    exchange = Exchange(stores)
    watched, other = Worker(exchange, bound=50, sample=1), Worker(exchange, bound=50)
    watched.go(watched.plan([1]))
    other.train([1], times=20)
    other.go(other.plan([1], flush=True))
    watched.go(watched.plan([1]))
    assert watched.cache.counts()["most_behind"] == 20
    assert watched.cache.behind()[20] == 2  # of two tables


def test_copies_round_as_the_server_does(stores):
    """bfloat16 rows that nobody else changed are the same here and there after a write-back."""
    worker = Worker(Exchange(stores), bound=3)
    keys = np.arange(50)
    worker.train(keys.tolist(), times=9)
    worker.go(worker.plan(keys.tolist(), flush=True))
    rows = [np.empty(100, np.float32) for _ in range(2)]
    for store, out in zip((worker.stores[1], stores[1]), rows, strict=True):
        read([store], [keys], [None], out, [0], 0)
    assert np.array_equal(*rows)
