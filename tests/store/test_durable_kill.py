"""Rows in a folder survive kill -9 at any instruction: nothing acknowledged is lost, and nothing is applied twice."""

import random

import numpy as np
import pytest
from killed import COUNTED, KEYS, client, one_push, push, pushed_keys, zygote

from hotrow import Table
from hotrow.store.exchange import Exchange
from hotrow.store.journal import Journal
from hotrow.store.optimizers import Adagrad, Adam, Momentum
from hotrow.store.store import RowStore
from hotrow.table import Eviction
from hotrow.tiers import Cache, CachedTier, Gradients, HostTier, Part
from hotrow.world import World


@pytest.fixture(scope="module")
def start():
    with zygote() as start:
        yield start


def test_pushes_of_two_threads_are_applied_once_through_many_kills(start, tmp_path):
    clock = random.Random(7)
    sent = {1: 0, 2: 0}  # the last push of each client
    expected = np.zeros(KEYS, np.int64)
    for _ in range(25):
        child = start("push_for_ever", str(tmp_path), {n: s + 1 for n, s in sent.items()})
        said = [child.says() for _ in range(clock.randint(1, 12))]
        for _ in range(clock.randint(0, 20_000)):  # somewhere within a push
            pass
        said += child.kill()
        store, journal = RowStore(COUNTED, folder=tmp_path / "rows"), Journal(tmp_path)
        acknowledged = dict(sent)
        for number, sequence in said:
            acknowledged[int(number)] = max(acknowledged[int(number)], int(sequence))
        for number in sent:
            unsure = acknowledged[number] + 1
            push(store, journal, number, unsure)
            for sequence in range(sent[number] + 1, unsure + 1):
                expected[pushed_keys(number, sequence)] += 1
            sent[number] = unsure
        rows = store.read(np.arange(KEYS))
        assert (rows == -expected[:, None]).all()
        assert journal.unfinished == 0
        assert store.steps == sum(sent.values())
        clocks = {int(k): int(c) for part in store.export() for k, c in zip(part["keys"], part["clocks"], strict=True)}
        assert clocks == dict(enumerate(expected.tolist()))
        store.close()
        journal.close()


@pytest.mark.parametrize("capacity", [None, 1000])
def test_a_row_found_after_a_kill_is_whole_and_an_erased_one_stays_erased(start, tmp_path, capacity):
    table = COUNTED.model_copy(update={"eviction": capacity and Eviction(capacity=capacity)})
    clock = random.Random(3)
    for _ in range(6):
        child = start("come_and_go", str(tmp_path), capacity)
        steps = [int(child.says()[0]) for _ in range(clock.randint(1, 30))]
        for _ in range(clock.randint(0, 20_000)):
            pass
        last = max(steps + [int(words[0]) for words in child.kill()])
        store = RowStore(table, folder=tmp_path)
        done = np.arange(200 * (last + 1))
        there = store.contains(done)
        assert not there[::2].any()
        if capacity is None:
            assert there[1::2].all()
        else:
            assert len(store) <= capacity
            assert there[-200:][1::2].all()
        found = np.concatenate([c["keys"] for c in store.export()])
        assert len(found) == len(store) == len(set(found.tolist())) == store.contains(found).sum()
        assert (store.read(found) == 0).all()
        for columns in store.export():
            assert (columns["uses"] > 0).all()
        store.clear()
        store.close()


OPTIMIZERS = [Momentum(momentum=0.9), Adam()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_push_killed_at_any_step_ends_as_if_it_had_not_been(start, tmp_path, optimizer):
    """Bit for bit: values, state, clocks and the step that Adam's correction goes by."""
    table = Table(name="t", dim=3, dtype="bfloat16", optimizer=optimizer)

    def made(folder):
        store = RowStore(table, folder=folder)
        store.fetch(np.arange(10), step=1)
        for _ in range(2):
            store.update(np.arange(10), np.full((10, 3), 0.5, np.float32), lr=0.1)
        return store

    keys, grads = one_push(3)
    plain = made(None)
    plain.update(keys, grads, lr=0.1)
    undone, n, ended = 0, 0, False
    while not ended:
        n += 1
        folder = tmp_path / str(n)
        made(folder / "rows").close()
        ended = start("push_once", str(folder), table.model_dump(), n).rest() == [["done"]]
        store, journal = RowStore(table, folder=folder / "rows"), Journal(folder)
        undone += store.native.undone
        ticket = journal.begin(client(1), 1)
        assert ticket is None or not ended
        if ticket is not None:
            store.update(keys, grads, lr=0.1, push=ticket.push)
            ticket.done()
        assert _held(store) == _held(plain)
        assert store.steps == plain.steps
        store.close()
        journal.close()
    assert n == 5 * 6 + 3 * 5 + 1  # five steps for each row that is there, three for what head and journal note
    assert undone == 2 * 6  # two of them with the row in doubt


class Recording(HostTier):
    """Keeps the last request of a cache, and what the rows were before it."""

    def exchange(self, requests):
        self.request, self.before = requests[0], list(self.stores()["t"].export())
        return super().exchange(requests)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_cache_writes_back_is_taken_once_whatever_step_it_is_killed_at(start, tmp_path, workers):
    """Rows as they are from the only cache, changes from one of several."""
    table = Table(name="t", dim=3, optimizer=Adagrad())
    host = Recording([table])
    cached = CachedTier(host, Cache(capacity=100, clock=5), world=World(0, workers))
    parts, rows = [Part("t", 0, np.arange(7), None, 0)], np.empty(21, np.float32)
    for step in range(2):
        ticket = cached.fetch(parts, rows, step)
        cached.update(parts, Gradients(np.linspace(1, 2, 21, dtype=np.float32)), step, ticket)
    cached.flush()
    undone, n, ended = 0, 0, False
    while not ended:
        n += 1
        folder = tmp_path / str(n)
        store = RowStore(table, folder=folder / "rows")
        for columns in host.before:
            store.import_(columns)
        store.close()
        host.request.tofile(folder / "request")
        ended = start("answer_once", str(folder), table.model_dump(), n).rest() == [["done"]]
        store, journal = RowStore(table, folder=folder / "rows"), Journal(folder)
        undone += store.native.undone
        ticket = journal.begin(client(1), 1)
        push = None if ticket is None else ticket.push
        Exchange([store]).answer(host.request, again=ticket is None, push=push)
        assert _held(store) == _held(host.stores()["t"])
        store.close()
        journal.close()
    assert n == 5 * 7 + 3 * 6 + 1
    assert undone == 2 * 7


def test_rows_that_come_and_go_are_there_or_not_whatever_step_it_is_killed_at(start, tmp_path):
    n, ended = 0, False
    while not ended:
        n += 1
        store = RowStore(COUNTED, folder=tmp_path / str(n))
        store.fetch(np.arange(4), step=0)
        store.close()
        ended = start("change_once", str(tmp_path / str(n)), n).rest() == [["done"]]
        store = RowStore(COUNTED, folder=tmp_path / str(n))
        there = set(_held(store))
        assert there in [set(range(k, m)) for k in range(3) for m in range(4, 9)]
        assert (store.read(np.arange(8)) == 0).all()
        store.fetch(np.arange(8), step=2)
        assert len(store) == 8
        store.close()
        assert len(RowStore(COUNTED, folder=tmp_path / str(n))) == 8
    assert n > 3 * 6


def test_a_full_disk_is_a_sentence_and_the_rows_there_are_stay(start, tmp_path):
    child = start("fill_up", str(tmp_path), 3 << 20)
    held, rows, *sentence = child.says()
    assert held == rows and int(rows) > 5000
    assert str(tmp_path) in " ".join(sentence)
    assert child.rest() == []
    assert RowStore(COUNTED, folder=tmp_path).recovered == int(rows)


def _held(store: RowStore) -> dict[int, tuple]:
    out = {}
    for c in store.export():
        n = len(c["keys"])
        for i, (key, values, state) in enumerate(
            zip(c["keys"], c["values"].reshape(n, -1), c["state"].reshape(n, -1), strict=True)
        ):
            out[int(key)] = (values.tobytes(), state.tobytes(), *(int(c[m][i]) for m in ("clocks", "uses", "last")))
    return out
