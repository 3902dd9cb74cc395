"""The cached tier is the plain table, bit for bit, for one worker; for several it is what its docstring says."""

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import SettingsError, StoreError
from hotrow.plan import Plan, Share
from hotrow.service.local import ShardProcess
from hotrow.settings import parse
from hotrow.store.optimizers import SGD, Adagrad, Adam
from hotrow.table import ByCount, ByProbability, Eviction, Fill
from hotrow.tiers import Cache, CachedTier, Gradients, HostTier, Part
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.served import ServedTier
from hotrow.world import World
from serving import Breaking, served, shards
from shapes import OPTIMIZERS, Case, cases
from test_embeddings import assert_same_rows, both, loss_of, train

CACHES = st.builds(
    Cache,
    capacity=st.one_of(st.integers(1, 30), st.sampled_from(["1kB", "20kB"])),
    policy=st.sampled_from(["lru", "lfu", "pinned"]),
    popular=st.integers(1, 3),
    clock=st.sampled_from([0, 1, 3, 100, "unbounded"]),
    ahead=st.integers(0, 3),
)


def on_cache(case: Case, tier: CachedTier) -> dict[str, object]:
    return {"tiers": {"cached": tier}, "plan": Plan.all_on("cached", case.tables)}


ROOM = 12


def rows_of(store) -> dict[int, tuple]:
    """Every row of a store: values, state and clock, to the last bit."""
    return {
        key: (values.tobytes(), state.tobytes(), int(clock))
        for c in store.export()
        for key, values, state, clock in zip(
            c["keys"].tolist(),
            c["values"].reshape(len(c["keys"]), -1),
            c["state"].reshape(len(c["keys"]), -1),
            c["clocks"],
            strict=True,
        )
    }


@given(cases(), CACHES)
def test_every_optimizer_through_a_cache_equals_the_plain_table(case, cache):
    ours, plain = both(case, **on_cache(case, tier := CachedTier(HostTier(case.tables, seed=5), cache, seed=5)))
    train(case, ours, plain)
    assert_same_rows(case, ours, plain)
    tier.flush()
    assert_same_rows(case, ours, plain)


@given(cases(steps=5), CACHES, st.data())
def test_one_worker_is_the_host_tier_bit_for_bit_with_state_clocks_and_steps(case, cache, data):
    """Rows are fetched ahead at will, and dtypes, admission and eviction are any."""
    tables = [
        table.model_copy(
            update={
                "dtype": data.draw(st.sampled_from(["float32", "bfloat16"])),
                "admission": data.draw(st.sampled_from([None, None, ByCount(count=2), ByProbability(probability=0.5)])),
                "eviction": data.draw(st.sampled_from([None, None, Eviction(capacity=ROOM), Eviction(ttl=2)])),
            }
        )
        for table in case.tables
    ]
    if any(table.eviction and table.eviction.capacity for table in tables):  # who gets the room of a batch is not said
        assume(all(len(torch.unique(torch.cat([g.values for g in b.groups]))) <= ROOM for b in case.batches))
    host, backing = HostTier(tables, seed=5), HostTier(tables, seed=5)
    tier = CachedTier(backing, cache, seed=5)
    case = Case(tables, case.features, case.batches)
    one = Embeddings(tables, case.features, seed=5, tiers={"host": host})
    ours = Embeddings(tables, case.features, seed=5, **on_cache(case, tier))
    grouped = [ours.group(batch) for batch in case.batches]
    for i, batch in enumerate(case.batches):
        seen, expected = ours.embed(ours.fetch(grouped[i])), one(batch)
        for name in expected.pooled_features:
            assert torch.equal(seen.vector(name), expected.vector(name))
        for step in range(i + 1, data.draw(st.integers(i + 1, len(grouped)))):
            ours.prefetch(grouped[step], step)  # of no effect where rows come and go, in the order of fetches
        for each, embedded in ((ours, seen), (one, expected)):
            loss_of(embedded).backward()
            each.step()
    tier.flush()
    for name in host.stores():
        assert rows_of(backing.stores()[name]) == rows_of(host.stores()[name])
        assert backing.stores()[name].steps == host.stores()[name].steps == len(case.batches)


@given(cases(), CACHES)
def test_evaluation_sees_changes_that_are_still_in_the_cache_and_changes_nothing(case, cache):
    ours, plain = both(case, **on_cache(case, tier := CachedTier(HostTier(case.tables, seed=5), cache, seed=5)))
    train(case, ours, plain)
    before = tier.counters()
    ours.eval()
    plain.eval()
    for batch in case.batches:
        torch.testing.assert_close(loss_of(ours(batch)), loss_of(plain(batch)), rtol=2e-4, atol=2e-4)
    assert tier.counters() == before


@given(cases(), CACHES, st.data())
def test_a_plan_may_split_tables_between_cache_and_host_and_change(case, cache, data):
    def plan() -> Plan:
        hot = {t.name: np.array(data.draw(st.lists(st.integers(-5, 20))), np.int64) for t in case.tables}
        return Plan({name: (Share("host", keys), Share("cached")) for name, keys in hot.items()})

    tiers = {"host": HostTier(case.tables, seed=5), "cached": CachedTier(HostTier(case.tables, seed=5), cache, seed=5)}
    ours, plain = both(case, tiers=tiers, plan=plan())
    for batch in case.batches:
        train(Case(case.tables, case.features, [batch]), ours, plain)
        ours.replan(plan())
    assert_same_rows(case, ours, plain)


def test_a_snapshot_through_the_cache_holds_what_was_changed_in_it_and_loads_anywhere(tmp_path):
    tables = [Table(name="a", dim=4, optimizer=Adam(lr=0.1)), Table(name="b", dim=3)]
    features = [Feature(name="a"), Feature(name="b")]
    tier = CachedTier(HostTier(tables), Cache(capacity=3))
    ours = Embeddings(tables, features, tiers={"cached": tier}, plan=Plan.all_on("cached", tables))
    one = Embeddings(tables, features)

    def step(keys: list[int], *those: Embeddings) -> None:
        for each in those:
            batch = Batch.plain({"a": torch.tensor(keys), "b": torch.tensor(keys)})
            each(batch).vectors().square().sum().backward()
            each.step()

    step([1, 2, 3], ours, one)
    step([3, 4, 5], ours, one)
    ours.snapshot(tmp_path / "rows").write()
    step([1, 5, 9], ours)  # forgotten by the restore
    for each in (ours, host := Embeddings(tables, features)):
        each.restore(tmp_path / "rows")
    step([1, 3, 7], ours, host, one)
    step([1, 3, 7], ours, host, one)
    tier.flush()
    for name in ("a", "b"):
        expected = rows_of(one.router.tiers["host"].stores()[name])
        assert rows_of(tier.backing.stores()[name]) == expected
        assert rows_of(host.router.tiers["host"].stores()[name]) == expected


# ---- several workers ----


def in_step(workers: int, work: Callable[[int, threading.Barrier], None]) -> None:
    """Runs work(rank, barrier) in threads; raises what one of them raised."""
    barrier, errors = threading.Barrier(workers), []

    def run(rank: int) -> None:
        try:
            work(rank, barrier)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])


DIMS = {"a": 2, "b": 5}
KEYS = 60


def batches(rank: int, steps: int, most: int = 12) -> list[tuple[list[Part], int]]:
    """Skewed keys of two tables, and how many floats their rows are."""
    rng = np.random.default_rng(rank)
    out = []
    for _ in range(steps):
        parts, start = [], 0
        for i, (name, dim) in enumerate(DIMS.items()):
            keys = np.unique((KEYS * rng.random(rng.integers(0, most)) ** 3).astype(np.int64))
            parts.append(Part(name, i, keys, None, start))
            start += len(keys) * dim
        out.append((parts, start))
    return out


def train_worker(tier: CachedTier, steps: int, barrier: threading.Barrier, uses: dict[str, np.ndarray]) -> None:
    """Gradients of 1.0, batches brought ahead; a barrier where the dense gradients would be averaged."""
    coming = batches(tier.world.rank, steps)
    for step, (parts, floats) in enumerate(coming):
        for part in parts:
            uses[part.table][part.keys] += 1
        ticket = tier.fetch(parts, np.empty(floats, np.float32), step)
        for ahead in range(1, 4):
            if step + ahead < steps:
                tier.prefetch(coming[step + ahead][0], step + ahead)
        barrier.wait()
        tier.update(parts, Gradients(np.ones(floats, np.float32)), step, ticket)
    tier.flush()


def counting_tables(workers: int, optimizer=SGD, **more: float) -> list[Table]:
    """Gradients are averaged over workers, so that a rate of `workers` takes 1.0 off a row at each use."""
    rule = optimizer(lr=float(workers), **more)
    return [Table(name=name, dim=dim, optimizer=rule, init=Fill(value=0.0)) for name, dim in DIMS.items()]


@pytest.mark.parametrize(
    ("clock", "capacity", "policy"),
    [(0, 4, "lru"), (1, 2, "lfu"), (8, 10, "pinned"), (100, 20, "lfu"), (100, 1, "lru"), ("unbounded", 15, "lfu")],
)
def test_each_row_is_minus_its_uses_after_several_workers_flushed(clock, capacity, policy):
    workers, tables = 4, counting_tables(4)
    host = HostTier(tables)
    uses = [{name: np.zeros(KEYS) for name in DIMS} for _ in range(workers)]
    checker = Checker(None if clock == "unbounded" else clock)
    cache = Cache(clock=clock, drift=0, capacity=capacity, policy=policy, sample=2)
    tiers = [CachedTier(host, cache, world=World(w, workers), checker=checker) for w in range(workers)]
    in_step(workers, lambda w, barrier: train_worker(tiers[w], 150, barrier, uses[w]))
    for name, dim in DIMS.items():
        expected = -np.sum([u[name] for u in uses], axis=0)
        assert np.array_equal(host.stores()[name].read(np.arange(KEYS)), np.repeat(expected[:, None], dim, 1))
    assert checker.unseen == 0
    if clock == "unbounded" or clock >= workers:  # closer than that, what others write back in the same step shows
        assert checker.violations() == 0
    assert len(checker.differences()) > 500
    assert sum(tier.counters()["evictions"] for tier in tiers) > 100


def test_a_bound_keeps_the_staleness_of_every_row_within_it_at_every_read():
    """A copy is compared with the server when its batch is brought, before others go on."""
    workers, tables = 3, counting_tables(3)
    host = HostTier(tables)
    tiers = [
        CachedTier(host, Cache(clock=20, drift=0, capacity=60, sample=1), world=World(w, workers))
        for w in range(workers)
    ]
    uses = [{name: np.zeros(KEYS) for name in DIMS} for _ in range(workers)]
    in_step(workers, lambda w, barrier: train_worker(tiers[w], 200, barrier, uses[w]))
    for tier in tiers:
        counters = tier.counters()
        assert 0 < counters["most_behind"] <= 20
        assert sum(counters["staleness"].values()) > 1000
        assert counters["invalid"] > 0


def test_a_young_row_is_written_back_sooner_than_an_old_one():
    tier = CachedTier(HostTier([Table(name="t", dim=2)]), Cache(clock=20, drift=0.1), world=World(0, 2))
    parts, written = [Part("t", 0, np.array([7]), None, 0)], []
    for step in range(1000):
        ticket = fetch(tier, parts, step)
        written.append(tier.counters()["written_rows"])
        tier.update(parts, Gradients(np.ones(2, np.float32)), step, ticket)
    gaps = np.diff(np.flatnonzero(np.diff(written)))
    assert gaps[0] == 1
    assert gaps[-1] == 21
    assert (np.diff(gaps) >= 0).all()


def test_adagrads_accumulators_are_the_sums_of_all_workers_squared_gradients():
    workers, tables = 4, counting_tables(4, Adagrad, initial=1.0)
    host = HostTier(tables)
    uses = [{name: np.zeros(KEYS) for name in DIMS} for _ in range(workers)]
    tiers = [CachedTier(host, Cache(clock=10, drift=0, capacity=8), world=World(w, workers)) for w in range(workers)]
    in_step(workers, lambda w, barrier: train_worker(tiers[w], 100, barrier, uses[w]))
    for name, dim in DIMS.items():
        times = np.sum([u[name] for u in uses], axis=0)
        (columns,) = host.stores()[name].export()
        state = columns["state"].reshape(-1, dim)
        expected = 1.0 + times[columns["keys"]] / 16  # averaged gradients are a quarter each; sixteenths add up exactly
        assert np.array_equal(state, np.repeat(expected[:, None], dim, 1).astype(np.float32))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40), CACHES)
def test_sgd_of_several_workers_is_the_sum_of_all_updates_to_rounding(turns, cache):
    table = Table(name="t", dim=3, optimizer=SGD(lr=0.3))
    host, plain = HostTier([table]), HostTier([table])
    tiers = [CachedTier(host, cache, world=World(w, 3)) for w in range(3)]
    rng = np.random.default_rng(0)
    for step, (worker, key) in enumerate(turns):
        parts, rows = [Part("t", 0, np.array([key]), None, 0)], np.empty(3, np.float32)
        grads = Gradients(rng.standard_normal(3).astype(np.float32))
        tiers[worker].update(parts, grads, step, tiers[worker].fetch(parts, rows, step))
        third = Gradients(grads.flat / np.float32(3))
        plain.update(parts, third, step, plain.fetch(parts, rows, step))
    for tier in tiers:
        tier.flush()
    keys = np.arange(6)
    np.testing.assert_allclose(host.stores()["t"].read(keys), plain.stores()["t"].read(keys), rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(CACHES, OPTIMIZERS)
def test_workers_whose_rows_do_not_meet_have_what_one_table_gives_to_rounding(cache, optimizer):
    """Of every optimizer, Adam's count of steps too: changes of row and state are added to what they came from."""
    table = Table(name="t", dim=3, optimizer=optimizer)
    host, plain = HostTier([table]), HostTier([table])
    tiers = [CachedTier(host, cache, world=World(w, 2)) for w in range(2)]
    rng = np.random.default_rng(0)

    def step(tier: CachedTier | HostTier, keys: np.ndarray, grads: np.ndarray, number: int) -> None:
        parts = [Part("t", 0, keys, None, 0)]
        tier.update(parts, Gradients(grads), number, tier.fetch(parts, np.empty(grads.size, np.float32), number))

    for number in range(12):
        keys = [np.unique(2 * rng.integers(0, 6, 3) + worker) for worker in range(2)]
        grads = [rng.standard_normal(3 * len(k)).astype(np.float32) for k in keys]
        for tier, mine, grad in zip(tiers, keys, grads, strict=True):
            step(tier, mine, grad, number)
        step(plain, np.concatenate(keys), np.concatenate(grads) / np.float32(2), number)
    for tier in tiers:
        tier.flush()
    every = np.arange(12)
    np.testing.assert_allclose(host.stores()["t"].read(every), plain.stores()["t"].read(every), rtol=1e-4, atol=1e-5)
    assert host.stores()["t"].steps == plain.stores()["t"].steps == 12


def test_a_worker_that_joins_later_goes_on_from_the_others_count_of_steps():
    table = Table(name="t", dim=2, optimizer=Adam(lr=0.1))
    host = HostTier([table])
    parts = [Part("t", 0, np.array([1, 2]), None, 0)]

    def step(tier: CachedTier, number: int) -> None:
        tier.update(
            parts, Gradients(np.ones(4, np.float32)), number, tier.fetch(parts, np.empty(4, np.float32), number)
        )

    first = CachedTier(host, Cache(clock=0))
    for number in range(7):
        step(first, number)
    first.close()
    late = CachedTier(host, Cache(clock=0))
    step(late, 7)
    late.flush()
    assert host.stores()["t"].steps == 8


# ---- what an exchange costs ----


class Counting(HostTier):
    """Counts exchanges and their bytes."""

    asked = 0
    nbytes = 0

    def exchange(self, requests):
        answers = super().exchange(requests)
        self.asked += 1
        self.nbytes += sum(len(blob) for blob in (*requests, *answers) if blob is not None)
        return answers


def fetch(tier: CachedTier, parts: list[Part], step: int) -> object:
    floats = sum(len(p.keys) * tier.tables[p.table].dim for p in parts)
    return tier.fetch(parts, np.empty(floats, np.float32), step)


def test_a_batch_brought_ahead_costs_no_round_trip_at_its_step():
    backing = Counting([Table(name="t", dim=4)])
    tier = CachedTier(backing, Cache(capacity=10), world=World(0, 2))
    coming = [[Part("t", 0, np.array([k, k + 1, 50]), None, 0)] for k in range(6)]
    for step, parts in enumerate(coming):
        tier.prefetch(parts, step)
        asked = backing.asked
        ticket = fetch(tier, parts, step)
        tier.update(parts, Gradients(np.ones(12, np.float32)), step, ticket)
        assert backing.asked == asked == step + 1


@pytest.mark.parametrize("clock", [1000, "unbounded"])
def test_a_caller_that_narrows_its_parts_still_finds_the_batch_brought_ahead(clock):
    backing = Counting([Table(name="t", dim=4)])
    tier = CachedTier(backing, Cache(capacity=10, clock=clock), world=World(0, 2))
    for step in range(20):  # more than may be brought ahead at a time: none is left behind
        whole = Part("t", 0, np.array([step, step + 1, 50]), None, 0)
        tier.prefetch([whole], step)
        asked = backing.asked
        some = whole._replace(keys=whole.keys[1:], positions=np.array([1, 2]))
        rows = np.full(12, np.nan, np.float32)
        ticket = tier.fetch([some], rows, step)
        assert np.array_equal(rows[4:].reshape(2, 4), backing.stores()["t"].initial(some.keys))
        tier.update([some], Gradients(np.zeros(12, np.float32)), step, ticket)
        assert backing.asked == asked == step + 1


def test_what_was_brought_for_another_batch_of_a_step_is_not_taken_for_its_own():
    host = HostTier([Table(name="t", dim=4, optimizer=SGD(lr=1.0), init=Fill(value=0.0))])
    tier = CachedTier(host, Cache(capacity=2), world=World(0, 2))
    for step in range(6):
        tier.prefetch([Part("t", 0, np.array([100 + step]), None, 0)], step)
        parts = [Part("t", 0, np.array([7]), None, 0)]
        tier.update(parts, Gradients(np.full(4, 2.0, np.float32)), step, fetch(tier, parts, step))
    tier.flush()
    assert host.stores()["t"].read(np.array([7]))[0].tolist() == [-6.0] * 4
    tier.prefetch([Part("t", 0, np.array([8]), None, 0)], 6)
    fetch(tier, [Part("t", 0, np.array([100]), None, 0)], 9)
    fetch(tier, [Part("t", 0, np.array([101]), None, 0)], 10)
    assert tier.counters()["rows"] == 2  # nothing is held for steps that are past


def test_an_evaluation_of_several_workers_reads_the_rows_behind_their_caches():
    """Worker 0 has copies of two rows; the other trains one of them more often than the bound, and the other once."""
    host = HostTier([Table(name="t", dim=2, optimizer=SGD(lr=2.0), init=Fill(value=0.0))])
    cache = Cache(capacity=100, clock=200, drift=0, ahead=0, sample=0)
    mine, theirs = (CachedTier(host, cache, world=World(rank, 2)) for rank in range(2))

    def train(tier: CachedTier, keys: list[int], step: int) -> None:
        parts = [Part("t", 0, np.array(keys), None, 0)]
        tier.update(parts, Gradients(np.ones(2 * len(keys), np.float32)), step, fetch(tier, parts, step))

    train(mine, [1, 2], 0)
    mine.flush()
    for step in range(100):
        train(theirs, [1, 2] if step == 0 else [1], step)
    theirs.flush()
    rows = np.empty(4, np.float32)
    mine.read([Part("t", 0, np.array([1, 2]), None, 0)], rows, 101)
    assert rows.tolist() == [-101.0, -101.0, -2.0, -2.0] == host.stores()["t"].read(np.array([1, 2])).ravel().tolist()


def test_the_only_worker_asks_for_nothing_while_its_copies_are_good():
    backing = Counting([Table(name="t", dim=4)])
    tier = CachedTier(backing, Cache(capacity=10, clock=5))
    parts = [Part("t", 0, np.arange(8), None, 0)]
    for step in range(6):
        tier.update(parts, Gradients(np.ones(32, np.float32)), step, fetch(tier, parts, step))
    assert backing.asked == 1
    fetch(tier, parts, 6)
    assert backing.asked == 2


def test_good_copies_cost_no_bytes_though_others_train_too():
    """Neither keys nor clocks of good copies travel: what others wrote back comes to a few bytes a row."""
    backing = Counting([Table(name="t", dim=128)])
    tiers = [
        CachedTier(backing, Cache(capacity=5000, clock=1000, drift=0, sample=0), world=World(w, 2)) for w in range(2)
    ]
    parts = [Part("t", 0, np.arange(4000), None, 0)]
    for step in range(10):
        if step == 2:
            backing.nbytes = 0
        for tier in tiers:
            tier.update(parts, Gradients(np.zeros(4000 * 128, np.float32)), step, fetch(tier, parts, step))
    assert backing.nbytes <= 2 * 8 * 2 * 64  # of each worker and step: two heads


def test_rows_that_were_never_updated_are_not_sent():
    backing = Counting([Table(name="t", dim=128)])
    tier = CachedTier(backing, Cache(capacity=1000))
    parts = [Part("t", 0, np.arange(1000), None, 0)]
    rows = np.empty(128_000, np.float32)
    tier.fetch(parts, rows, 0)
    assert backing.nbytes < 1000 * 12
    assert np.array_equal(rows.reshape(1000, 128), backing.stores()["t"].initial(np.arange(1000)))


def test_a_row_that_was_written_without_an_update_is_not_taken_for_a_new_one():
    backing = HostTier([Table(name="t", dim=2)])
    backing.stores()["t"].write(np.array([3]), np.array([[7.0, 8.0]], np.float32))
    tier, rows = CachedTier(backing), np.empty(2, np.float32)
    tier.fetch([Part("t", 0, np.array([3]), None, 0)], rows, 0)
    assert rows.tolist() == [7.0, 8.0]


@pytest.mark.parametrize(("policy", "stays"), [("lru", {2, 3, 4}), ("lfu", {1, 2, 4}), ("pinned", {1, 3, 4})])
def test_policies_keep_the_rows_they_say(policy, stays):
    tier = CachedTier(HostTier([Table(name="t", dim=2)]), Cache(capacity=3, policy=policy, popular=3))
    for step, key in enumerate([1, 1, 1, 2, 2, 3, 4]):
        parts = [Part("t", 0, np.array([key]), None, 0)]
        tier.update(parts, Gradients(np.ones(2, np.float32)), step, fetch(tier, parts, step))
    assert set(tier.cache.keys()[0].tolist()) == stays


def test_a_capacity_in_bytes_counts_state_and_what_the_cache_keeps_beside():
    table = Table(name="t", dim=16, optimizer=Adam())
    tier = CachedTier(HostTier([table]), Cache(capacity="64kB"), world=World(0, 2))
    (row_bytes,) = tier.cache.row_bytes()
    assert row_bytes >= 2 * 3 * 16 * 4  # row and state, twice: as they are and as they came
    for step in range(40):
        parts = [Part("t", 0, np.arange(20 * step, 20 * step + 20), None, 0)]
        tier.update(parts, Gradients(np.ones(320, np.float32)), step, fetch(tier, parts, step))
    assert 60_000 - 20 * row_bytes < tier.cache.used() <= 64_000


# ---- over a service ----


@settings(max_examples=15)
@given(cases(), CACHES, st.integers(1, 3))
def test_a_cache_in_front_of_shards_equals_the_plain_table(case, cache, count):
    with shards(count) as addresses, served(addresses, case.tables, seed=5) as backing:
        ours, plain = both(case, **on_cache(case, tier := CachedTier(backing, cache, seed=5)))
        train(case, ours, plain)
        assert_same_rows(case, ours, plain)
        tier.flush()
        assert_same_rows(case, ours, plain)


def test_each_row_is_minus_its_uses_over_lines_that_break():
    workers, steps, tables = 2, 150, counting_tables(2)
    uses = [{name: np.zeros(KEYS) for name in DIMS} for _ in range(workers)]
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(shards(2))
        lines = [
            [stack.enter_context(Breaking(a, 10 * w + s, (500, 20_000))) for s, a in enumerate(addresses)]
            for w in range(workers)
        ]

        def work(w: int, barrier: threading.Barrier) -> None:
            with served([line.address for line in lines[w]], tables) as backing:
                cache = Cache(clock=20, drift=0, capacity=12)
                train_worker(CachedTier(backing, cache, world=World(w, workers)), steps, barrier, uses[w])

        in_step(workers, work)
        assert sum(line.broken for of in lines for line in of) > 3
        with served(addresses, tables) as tier:
            for i, (name, dim) in enumerate(DIMS.items()):
                rows = np.empty(KEYS * dim, np.float32)
                tier.read([Part(name, i, np.arange(KEYS), None, 0)], rows, 0)
                expected = -np.sum([u[name] for u in uses], axis=0)
                assert np.array_equal(rows.reshape(KEYS, dim), np.repeat(expected[:, None], dim, 1))


def test_each_row_is_minus_its_uses_though_the_shard_process_is_killed_again_and_again(tmp_path):
    """Rows are in its folder, the ledger is not: caches check what they hold, and what was sent comes again."""
    workers, steps, tables = 2, 120, counting_tables(2)
    uses = [{name: np.zeros(KEYS) for name in DIMS} for _ in range(workers)]
    process = ShardProcess(folder=tmp_path / "rows")
    backings = [ServedTier([process.address], tables, timeout=60, retry=0.05) for _ in range(workers)]
    tiers = [
        CachedTier(b, Cache(clock=20, drift=0, capacity=12), world=World(w, workers)) for w, b in enumerate(backings)
    ]
    exchange, exchanged, kills = backings[0].exchange, [0], [threading.Event() for _ in range(3)]

    def counted(requests):
        exchanged[0] += 1
        for k, kill in enumerate(kills):
            if exchanged[0] == 20 + 30 * k:
                kill.set()
        return exchange(requests)

    backings[0].exchange = counted
    trained = threading.Thread(target=in_step, args=(workers, lambda w, b: train_worker(tiers[w], steps, b, uses[w])))
    trained.start()
    for kill in kills:
        assert kill.wait(60)
        process.kill()
        process = ShardProcess(process.address, folder=tmp_path / "rows")
    trained.join()
    for i, (name, dim) in enumerate(DIMS.items()):
        rows = np.empty(KEYS * dim, np.float32)
        backings[0].read([Part(name, i, np.arange(KEYS), None, 0)], rows, 0)
        expected = -np.sum([u[name] for u in uses], axis=0)
        assert np.array_equal(rows.reshape(KEYS, dim), np.repeat(expected[:, None], dim, 1))
    for backing in backings:
        backing.close()
    process.stop()


# ---- what goes wrong ----


def test_a_cache_that_takes_itself_for_the_only_one_says_so_when_it_is_not():
    host = HostTier([Table(name="t", dim=2)])
    tier, parts = CachedTier(host, Cache(clock=0)), [Part("t", 0, np.array([1]), None, 0)]
    tier.update(parts, Gradients(np.ones(2, np.float32)), 0, fetch(tier, parts, 0))
    host.update(parts, Gradients(np.ones(2, np.float32)), 0)
    with pytest.raises(SettingsError, match="how many workers"):
        tier.flush()
    with pytest.raises(StoreError, match="failed before"):
        fetch(tier, parts, 1)


@pytest.mark.parametrize("other", [{"seed": 1}, {"dim": 3}])
def test_a_cache_with_another_seed_or_shape_is_refused_before_a_row_is_touched(other):
    host = HostTier([Table(name="t", dim=other.get("dim", 2))])
    tier = CachedTier(host, seed=other.get("seed", 0))
    tier.backing = HostTier([Table(name="t", dim=2)])
    with pytest.raises(StoreError, match="another seed or other tables"):
        fetch(tier, [Part("t", 0, np.array([1]), None, 0)], 0)
    assert len(tier.backing.stores()["t"]) == 0


class Failing(HostTier):
    """Answers until it does not."""

    down = False

    def exchange(self, requests):
        if self.down:
            raise StoreError("Shard tcp://127.0.0.1:1 does not answer.")
        return super().exchange(requests)


def test_an_exchange_that_failed_is_never_forgotten():
    backing = Failing([Table(name="t", dim=2)])
    tier, parts = CachedTier(backing, Cache(clock=0)), [Part("t", 0, np.array([1]), None, 0)]
    tier.update(parts, Gradients(np.ones(2, np.float32)), 0, fetch(tier, parts, 0))
    backing.down = True
    with pytest.raises(StoreError, match="does not answer"):
        tier.flush()
    backing.down = False
    with pytest.raises(StoreError, match="its changes are lost: Shard tcp://127.0.0.1:1 does not answer"):
        tier.flush()


def test_settings_of_a_cache_are_checked():
    assert parse(Cache, {"capacity": "1.5MB", "clock": "unbounded"}).bound is None
    for wrong in ({"capacity": 0}, {"capacity": "many"}, {"clock": -1}, {"clock": "never"}, {"policy": "fifo"}):
        with pytest.raises(SettingsError):
            parse(Cache, wrong)


def test_a_checker_sees_copies_that_drift_apart_and_updates_that_are_not_seen(tmp_path):
    checkers = [Checker(clock=2) for _ in range(2)]
    keys = np.array([7, 8])
    checkers[0].read(0, "t", 5, keys, np.array([4, 9]))
    checkers[1].read(1, "t", 5, keys, np.array([8, 4]))  # 7 differs by 4 clocks, 8 by 5
    checkers[0].updated(0, "t", keys, np.array([5, 10]))
    checkers[0].read(0, "t", 6, keys, np.array([5, 9]))  # 8 without its own update
    for i, checker in enumerate(checkers):
        assert checker.violations() == (1 if i == 0 else 0)
        checker.save(tmp_path / f"{i}.npz")
    together = Checker.load([tmp_path / "0.npz", tmp_path / "1.npz"], clock=2)
    assert sorted(together.differences().tolist()) == [4, 5]
    assert together.violations() == 2
