"""The row store's own promises: keys, initial values, admission, eviction, export and threads."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow import Table, _native
from hotrow.errors import StoreError
from hotrow.store.optimizers import SGD, Adagrad, Adam
from hotrow.store.store import Cut, RowStore, salt
from hotrow.table import ByCount, ByProbability, Eviction, Fill, Normal, Uniform

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=200)


def array(keys) -> np.ndarray:
    return np.array(keys, np.int64)


def ones(n: int, dim: int) -> np.ndarray:
    return np.ones((n, dim), np.float32)


def held(store: RowStore) -> dict[int, tuple]:
    """Everything a store holds, by key."""
    out = {}
    dim, state = store.native.dim, store.native.state_dim
    for c in store.export():
        n = len(c["keys"])
        values, states = c["values"].reshape(n, dim), c["state"].reshape(n, state)
        for i in range(n):
            meta = (int(c["clocks"][i]), int(c["uses"][i]), int(c["last"][i]))
            out[int(c["keys"][i])] = (values[i].tobytes(), states[i].tobytes(), *meta)
    return out


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def initial_twin(table: Table, seed: int, keys: np.ndarray) -> np.ndarray:
    """The published formula for a new row, in NumPy."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    base = mix(keys.view(np.uint64) ^ np.uint64(salt(seed, table.name)))
    pairs = np.arange(1, (table.dim + 1) // 2 + 1, dtype=np.uint64)
    r = mix(base[:, None] + pairs * golden)
    u0 = (r >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    u1 = ((r >> np.uint64(16)) & np.uint64(0xFFFFFF)).astype(np.float32) * np.float32(2**-24)
    if isinstance(table.init, Uniform):
        a, b = (np.float32(table.init.scale) * (2 * u - 1) for u in (u0, u1))
    else:
        assert isinstance(table.init, Normal)
        radius = np.sqrt(-2 * np.log(u0.astype(np.float64) + 2**-25))
        angle = 2 * np.pi * u1.astype(np.float64)
        a, b = radius * np.cos(angle) * table.init.std, radius * np.sin(angle) * table.init.std
    return np.stack([a, b], -1).reshape(len(keys), 2 * len(pairs))[:, : table.dim].astype(np.float32)


@given(KEYS, st.integers(1, 9), st.sampled_from([Uniform(scale=0.1), Normal(std=0.3)]), st.integers(0, 2**70))
def test_new_rows_depend_on_seed_table_and_key_alone(keys, dim, init, seed):
    table = Table(name="t", dim=dim, init=init)
    store = RowStore(table, seed)
    rows = store.fetch(array(keys), step=0)
    np.testing.assert_allclose(rows, initial_twin(table, seed, array(keys)), rtol=1e-6, atol=1e-7)
    backwards = RowStore(table, seed).fetch(array(keys[::-1]), step=7)[::-1]
    assert (rows == backwards).all()
    assert (rows == store.initial(array(keys))).all()


def test_rows_of_another_table_or_seed_start_elsewhere():
    keys = np.arange(100)
    rows = [RowStore(Table(name=n, dim=4), s).initial(keys) for n, s in (("a", 0), ("b", 0), ("a", 1))]
    assert not (rows[0] == rows[1]).any()
    assert not (rows[0] == rows[2]).any()


def test_initial_values_have_the_distribution_they_name():
    keys = np.arange(20_000)
    uniform = RowStore(Table(name="t", dim=8, init=Uniform(scale=0.5))).initial(keys)
    assert abs(uniform.mean()) < 0.005
    assert abs(uniform.std() - 0.5 / 3**0.5) < 0.005
    normal = RowStore(Table(name="t", dim=8, init=Normal(std=2.0))).initial(keys)
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 2.0) < 0.02
    assert (RowStore(Table(name="t", dim=8, init=Fill(value=0.25))).initial(keys) == 0.25).all()


@given(st.lists(st.tuples(st.sampled_from("fue"), KEYS), max_size=12))
def test_a_store_holds_what_a_dictionary_would(calls):
    store = RowStore(Table(name="t", dim=2, init=Fill(), optimizer=SGD(lr=1.0)))
    expected: dict[int, float] = {}
    for what, keys in calls:
        if what == "f":
            store.fetch(array(keys), step=0)
            expected |= {k: expected.get(k, 0.0) for k in keys}
        elif what == "u":
            store.update(array(keys), ones(len(keys), 2), lr=1.0)
            expected |= {k: expected[k] - 1 for k in keys if k in expected}
        else:
            assert store.erase(array(keys)) == sum(k in expected for k in keys)
            expected = {k: v for k, v in expected.items() if k not in set(keys)}
    assert len(store) == len(expected)
    keys = array(list(expected))
    assert (store.read(keys)[:, 0] == np.array(list(expected.values()), np.float32)).all()
    assert set(held(store)) == set(expected)


@pytest.mark.parametrize("n", [100_000])
def test_many_rows_are_found_again_through_every_growth_of_the_index(n):
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63, n, dtype=np.int64)
    store = RowStore(Table(name="t", dim=1, optimizer=SGD(), init=Fill()))
    for part in np.array_split(keys, 37):
        store.fetch(part, step=0)
    assert len(store) == n
    store.update(keys, np.arange(n, dtype=np.float32)[:, None], lr=-1.0)
    assert (store.read(keys)[:, 0] == np.arange(n)).all()
    gone = keys[rng.permutation(n)[: n // 2]]
    assert store.erase(gone) == n // 2
    left = np.setdiff1d(keys, gone)
    assert set(held(store)) == set(left.tolist())
    assert (store.read(gone) == 0).all()


def test_reading_makes_no_rows_and_counts_no_use():
    store = RowStore(Table(name="t", dim=4))
    store.fetch(array([1]), step=3)
    before = held(store)
    rows = store.read(array([1, 2]))
    assert held(store) == before
    assert (rows == store.initial(array([1, 2]))).all()


def test_uses_clock_and_last_step_are_counted_per_row():
    store = RowStore(Table(name="t", dim=1, optimizer=SGD()))
    store.fetch(array([1, 2]), step=0)
    store.update(array([1]), ones(1, 1), lr=0.1)
    store.fetch(array([1]), step=5)
    meta = {k: v[2:] for k, v in held(store).items()}
    assert meta == {1: (1, 2, 5), 2: (0, 1, 0)}


def test_a_key_is_admitted_at_its_nth_batch_and_not_before():
    store = RowStore(Table(name="t", dim=1, admission=ByCount(count=3), optimizer=SGD(), init=Fill(value=1.0)))
    for step, rows in enumerate([0, 0, 1, 1]):
        values = store.fetch(array([9]), step)
        store.update(array([9]), ones(1, 1), lr=0.5)
        assert len(store) == rows
        assert values[0, 0] == (1.0 if step <= 2 else 0.5)


def test_rare_keys_cost_no_rows():
    rng = np.random.default_rng(1)
    store = RowStore(Table(name="t", dim=1, admission=ByCount(count=2, bytes=1 << 20)))
    common = np.arange(50)
    for step in range(40):
        store.fetch(np.concatenate([common, rng.integers(2**40, 2**62, 100)]), step)
    assert 50 <= len(store) <= 60


def test_admission_by_chance_admits_that_share_and_the_same_keys_every_time():
    table = Table(name="t", dim=1, admission=ByProbability(probability=0.25))
    keys = np.arange(20_000)
    first, second = RowStore(table), RowStore(table)
    first.fetch(keys, step=0)
    second.fetch(keys[::-1].copy(), step=0)
    assert 0.23 < len(first) / 20_000 < 0.27
    assert set(held(first)) == set(held(second))
    first.fetch(keys, step=1)
    assert 0.42 < len(first) / 20_000 < 0.46


@given(st.data())
def test_a_key_that_is_not_admitted_loses_its_gradient_and_nobody_elses(data):
    keys = data.draw(st.lists(st.integers(-50, 50), unique=True, min_size=1))
    table = Table(name="t", dim=2, admission=ByProbability(probability=0.5), optimizer=SGD(lr=1.0))
    store = RowStore(table, seed=data.draw(st.integers(0, 99)))
    rows = store.fetch(array(keys), step=0)
    assert (rows == store.initial(array(keys))).all()
    grads = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    admitted = set(held(store))
    store.update(array(keys), grads, lr=1.0)
    changed = store.read(array(keys))
    for i, key in enumerate(keys):
        assert (changed[i] == (rows[i] - grads[i] if key in admitted else rows[i])).all()


def test_capacity_is_never_passed_and_the_least_recently_used_go_first():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(capacity=64)))
    for step in range(100):
        store.fetch(array([step, 1000]), step)
        assert len(store) <= 64
    left = set(held(store))
    assert 1000 in left
    assert left - {1000} == set(range(100 - len(left) + 1, 100))


def test_the_least_often_used_go_first_with_lfu():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(capacity=10, policy="lfu")))
    for step in range(5):
        store.fetch(array([1, 2, 3]), step)
    for step in range(5, 50):
        store.fetch(array([100 + step]), step)
    assert len(store) <= 10
    assert {1, 2, 3} <= set(held(store))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_of_many_rows_some_of_the_least_valuable_go_and_the_same_in_every_run(policy):
    """Past a few thousand rows a sample decides: which rows lie where must not matter, and the old must go first."""
    table = Table(name="t", dim=1, eviction=Eviction(capacity=20_000, policy=policy))
    stores = [RowStore(table), RowStore(table)]
    junk = RowStore(Table(name="t", dim=1))
    junk.fetch(np.arange(-5000, 0), step=0)
    stores[1].import_(next(junk.export(1 << 20)))  # so that its rows lie in other slots
    stores[1].erase(np.arange(-5000, 0)[::-1])
    hot = np.arange(10_000)
    for step in range(60):
        new = np.arange(300) + 1_000_000 + 300 * step
        for store in stores:
            if step % 5 == 0:
                store.fetch(hot, step)
            store.fetch(np.concatenate([new, hot[step * 150 : step * 150 + 150]]), step)
            assert len(store) <= 20_000
        if step == 40:  # a resumed run goes on the same
            resumed = RowStore(table)
            for columns in stores[0].export(1000):
                resumed.import_(columns)
            stores[0] = resumed
    assert held(stores[0]) == held(stores[1])
    assert stores[0].contains(hot).all(), "no hot row goes while thousands are older or used once"
    age = 59 - np.repeat(np.arange(60), 300)
    there = stores[0].contains(np.arange(60 * 300) + 1_000_000)
    assert there[age < 10].mean() == 1
    assert there.sum() > 20_000 - 10_000 - 1024 - 300
    assert there[age > 45].mean() < 0.1


def test_a_batch_larger_than_the_capacity_fills_it_and_the_rest_read_as_new():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(capacity=5), optimizer=SGD()))
    keys = np.arange(20)
    rows = store.fetch(keys, step=0)
    assert len(store) == 5
    assert (rows == store.initial(keys)).all()
    store.update(keys, ones(20, 1), lr=1.0)
    assert int((store.read(keys) != rows).sum()) == 5


def test_an_evicted_row_starts_again_from_its_beginning():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(capacity=1), optimizer=SGD()))
    start = store.fetch(array([1]), step=0)
    store.update(array([1]), ones(1, 1), lr=1.0)
    store.fetch(array([2]), step=1)
    assert (store.fetch(array([1]), step=2) == start).all()
    assert held(store)[1][2:] == (0, 1, 2)


def test_a_row_is_forgotten_once_it_was_unused_for_its_time_to_live():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(ttl=10), optimizer=SGD()))
    start = store.fetch(array([1]), step=0)
    store.update(array([1]), ones(1, 1), lr=1.0)
    assert (store.read(array([1]), step=10) != start).all()
    assert (store.read(array([1]), step=11) == start).all()
    assert (store.fetch(array([1]), step=10) != start).all()
    assert (store.fetch(array([1]), step=21) == start).all()
    store.fetch(array([2]), step=40)
    assert set(held(store)) == {2}


def test_an_export_is_one_moment_while_others_write():
    store = RowStore(Table(name="t", dim=4, optimizer=SGD(), init=Fill()))
    keys = np.arange(30_000)
    store.fetch(keys, step=0)
    before = held(store)
    export = store.export(chunk=500)
    seen = [next(export)]
    store.update(keys, ones(len(keys), 4), lr=1.0)
    store.erase(keys[:1000])
    store.fetch(np.arange(50_000, 60_000), step=1)
    seen += list(export)
    found = {}
    for c in seen:
        for key, values in zip(c["keys"].tolist(), c["values"].reshape(-1, 4), strict=True):
            assert key not in found
            found[key] = values.tobytes()
    assert found == {k: v[0] for k, v in before.items()}


def cut(store: RowStore, which: Cut, kept: bool = True) -> set[int]:
    """The keys of one cut."""
    assert store.begin_cut(which) is store.native
    keys: set[int] = set()
    while len(found := store.native.read_snapshot(7)["keys"]):
        keys |= set(found.tolist())
    store.native.end_snapshot(kept)
    return keys


def test_a_cut_of_changes_has_what_changed_since_the_last():
    store = RowStore(Table(name="t", dim=1, optimizer=SGD()))
    store.fetch(np.arange(1000), step=0)
    assert len(cut(store, Cut.FULL)) == 1000
    store.update(array([5, 6]), ones(2, 1), lr=1.0)
    store.fetch(array([7, 2000]), step=1)
    assert len(held(store)) == 1001
    assert cut(store, Cut.CHANGED) == {5, 6, 7, 2000}
    assert cut(store, Cut.CHANGED) == set()


def test_a_cut_given_up_loses_no_change():
    store = RowStore(Table(name="t", dim=1, optimizer=SGD()))
    store.fetch(np.arange(1000), step=0)
    cut(store, Cut.FULL)
    store.update(array([5]), ones(1, 1), lr=1.0)
    cut(store, Cut.CHANGED, kept=False)
    assert 5 in cut(store, Cut.CHANGED)


def test_one_cut_at_a_time():
    store = RowStore(Table(name="t", dim=1))
    store.fetch(np.arange(10), step=0)
    export = store.export(chunk=1)
    next(export)
    with pytest.raises(StoreError, match="Table t: a snapshot or export of it is already under way"):
        store.begin_cut(Cut.FULL)
    export.close()
    assert len(held(store)) == 10


def test_rows_are_written_as_new_and_found():
    for dtype in ("float32", "bfloat16"):
        store = RowStore(Table(name="t", dim=2, dtype=dtype, optimizer=Adam()))
        store.fetch(array([1]), step=0)
        store.update(array([1]), ones(1, 2), lr=1.0)
        store.write(array([1, -7]), np.array([[0.5, 1.0], [2.0, -3.0]], np.float32), step=9)
        assert store.read(array([1, -7])).tolist() == [[0.5, 1.0], [2.0, -3.0]]
        assert {v[2:] for v in held(store).values()} == {(0, 0, 9)}
        assert store.contains(array([1, 2, -7])).tolist() == [True, False, True]
        with pytest.raises(StoreError, match=r"1 keys need rows \[1, 2\], not \[1, 3\]"):
            store.write(array([1]), ones(1, 3))


@given(KEYS, st.sampled_from(["float32", "bfloat16"]))
def test_what_is_exported_imports_to_the_same_store(keys, dtype):
    table = Table(name="t", dim=3, dtype=dtype, optimizer=Adam(lr=0.1))
    store = RowStore(table)
    store.fetch(array(keys), step=4)
    store.update(array(keys[::2]), ones(len(keys[::2]), 3), lr=0.1)
    other = RowStore(table)
    for columns in store.export():
        other.import_(columns)
    assert held(other) == held(store)


def test_columns_that_do_not_fit_are_refused():
    store = RowStore(Table(name="t", dim=3))
    store.fetch(array([1]), step=0)
    (columns,) = store.export()
    with pytest.raises(StoreError, match=r"Table u: the columns do not have one row for each key"):
        RowStore(Table(name="u", dim=4)).import_(columns)
    with pytest.raises(StoreError, match=r"gradients are \[1, 2\]"):
        store.update(array([1]), ones(1, 2), lr=1.0)


def test_bfloat16_rows_lose_no_small_updates_on_average():
    store = RowStore(Table(name="t", dim=4, dtype="bfloat16", init=Fill(value=1.0), optimizer=SGD()))
    keys = np.arange(500)
    store.fetch(keys, step=0)
    for _ in range(100):
        store.update(keys, ones(500, 4), lr=1e-4)
    rows = store.read(keys)
    assert abs(float(rows.mean()) - 0.99) < 5e-4
    assert (rows.view(np.uint32) & 0xFFFF == 0).all()


def test_threads_may_call_at_once_and_every_update_counts():
    store = RowStore(Table(name="t", dim=2, init=Fill(), optimizer=SGD()))
    keys, rounds, threads = np.arange(3000), 20, 6

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for step in range(rounds):
            mine = rng.permutation(keys)
            store.fetch(mine, step)
            store.update(mine, ones(len(mine), 2), lr=1.0)
            store.read(mine)

    running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    assert (store.read(keys) == -float(rounds * threads)).all()
    assert {v[2:4] for v in held(store).values()} == {(rounds * threads, rounds * threads)}


def test_a_store_holds_the_same_on_any_number_of_threads():
    """Calls this large are cut into pieces and sorted on several threads, and taken as they come on one."""
    before, found = _native.threads(), []
    try:
        for threads in (1, 3):
            _native.set_threads(threads)
            rng = np.random.default_rng(3)
            store = RowStore(Table(name="t", dim=4, optimizer=Adagrad()))
            for step in range(6):
                keys = rng.integers(step * 8000, step * 8000 + 40_000, 30_000)  # some new, some there, some twice
                store.fetch(keys, step)
                store.update(keys, rng.standard_normal((len(keys), 4), np.float32), lr=0.1)
            found.append(held(store))
    finally:
        _native.set_threads(before)
    assert found[0] == found[1]


def test_an_export_under_fire_has_every_row_once():
    store = RowStore(Table(name="t", dim=1, init=Fill(), optimizer=SGD()))
    keys = np.arange(20_000)
    store.fetch(keys, step=0)
    stop = threading.Event()

    def churn() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            store.update(rng.permutation(keys)[:5000], ones(5000, 1), lr=-1.0)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(5):
            seen = np.concatenate([c["keys"] for c in store.export(chunk=2000)])
            assert sorted(seen.tolist()) == keys.tolist()
    finally:
        stop.set()
        thread.join()


def test_searching_ends_when_every_bucket_was_once_passed():
    """Keys made to share a bucket: fill one, pass on to the next, erase, and the other way round."""
    store = RowStore(Table(name="t", dim=1))
    rng = np.random.default_rng(0)
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def hashed(key: int) -> int:
        return int(mix(np.array([(key + golden) & mask], np.uint64))[0])

    keys = [int(k) for k in rng.integers(0, 2**62, 60_000) if (hashed(int(k)) >> 8) % 16 == 0]
    low = [k for k in keys if hashed(k) >> 63 == 0]
    high = [k for k in keys if hashed(k) >> 63 == 1]
    store.fetch(array(low[:13]), step=0)
    store.erase(array(low[:12]))
    store.fetch(array(high[:12]), step=0)
    assert not store.contains(array(low[:12])).any()
    assert store.contains(array([low[12], *high[:12]])).all()


def test_capacity_holds_when_several_threads_bring_new_keys():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(capacity=1000)))
    most = []

    def work(number: int) -> None:
        for step in range(20):
            store.fetch(np.arange(300) + 1_000_000 * number + 1000 * step, step)
            most.append(len(store))

    running = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    assert max(most) <= 1000


def test_erased_keys_are_not_remembered_for_ever():
    store = RowStore(Table(name="t", dim=1, eviction=Eviction(capacity=100)))
    store.fetch(np.arange(50), step=0)
    cut(store, Cut.FULL)
    for step in range(1, 400):
        store.fetch(np.arange(step * 1000, step * 1000 + 100 * 10), step)
    assert store.bytes < 3_000_000
