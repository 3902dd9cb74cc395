"""A plan keeps each rank's memory, and no other choice of copies within it takes less time but for part of a step."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import cluster, drawn_table
from hotrow.errors import SettingsError
from hotrow.plan.cost import NAME_BYTES, TableUse, expected_traffic
from hotrow.plan.shard import copied, fullest, shard
from hotrow.plan.traffic import owners
from hotrow.table import Table

WIDE = {"latency": 0.0}


def tables_of(weights, draws, topology, dims=(8, 32)):
    return [
        drawn_table(w, draws, topology, dim=dim, name=f"t{at}")[1]
        for at, (w, dim) in enumerate(zip(weights, dims, strict=False))
    ]


def extra_bytes(tables, held, topology):
    return sum(
        int(rows["replicated"].sum()) * (t.row_bytes * (1 - 1 / topology.size) + NAME_BYTES)
        + int(rows["node"].sum()) * (t.row_bytes * (1 / topology.ranks - 1 / topology.size) + NAME_BYTES)
        for t, rows in zip(tables, held, strict=True)
    )


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 2), (3, 2), (2, 3)]),
    st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), min_size=1, max_size=2),
    st.integers(1, 30),
    st.integers(0, 300),
    st.lists(st.floats(0, 1), min_size=18, max_size=18),
)
def test_no_choice_within_the_memory_saves_more_but_for_one_step(shape, weights, draws, room, random):
    topology = cluster(*shape, **WIDE)
    tables = tables_of(weights, draws, topology)
    tiers = ("world", "node", "replicated")
    seconds = [dict(zip(tiers, np.array(random).reshape(2, 3, 3)[t, :, : table.rows], strict=True))
               for t, table in enumerate(tables)]  # fmt: skip
    held = copied(
        tables,
        topology,
        [s["world"] for s in seconds],
        {tier: [s[tier] for s in seconds] for tier in ("node", "replicated")},
        room,
    )
    assert extra_bytes(tables, held, topology) <= room

    def taken(rows_of):
        return sum(float(rows[tier] @ s[tier]) for rows, s in zip(rows_of, seconds, strict=True) for tier in tiers)

    places = [(t, row) for t, table in enumerate(tables) for row in range(table.rows)]
    best = np.inf
    for choice in itertools.product(tiers, repeat=len(places)):
        other = [{tier: np.zeros(table.rows, np.int64) for tier in tiers} for table in tables]
        for (t, row), tier in zip(places, choice, strict=True):
            other[t][tier][row] = 1
        if extra_bytes(tables, other, topology) <= room:
            best = min(best, taken(other))
    step = max(float((s[a] - s[b]).max()) for s in seconds for a, b in itertools.combinations(tiers, 2))
    assert best - 1e-9 <= taken(held) <= best + max(step, 0) + 1e-9


@given(
    st.sampled_from([(1, 3), (2, 2), (2, 4), (3, 1)]),
    st.lists(st.lists(st.floats(0.001, 1), min_size=1, max_size=60), min_size=1, max_size=2),
    st.integers(1, 300),
    st.integers(0, 5000),
)
def test_a_plan_keeps_the_memory_of_each_rank(shape, weights, draws, extra):
    topology = cluster(*shape)
    tables = tables_of(weights, draws, topology)
    for dedups in (("node", "rank"), ("rank",)):
        chosen = shard(tables, topology, extra=extra, dedups=dedups)
        assert chosen.memory <= chosen.row_wise_memory + extra
        for table, held in zip(tables, chosen.held, strict=True):
            assert all((rows >= 0).all() for rows in held.values())
            assert (sum(held.values()) == table.keys).all()
        assert chosen.seconds <= shard(tables, topology, extra=0, dedups=dedups).seconds + 1e-12


def test_without_extra_memory_the_plan_is_row_wise_to_the_byte():
    topology = cluster(2, 2, **WIDE)
    tables = tables_of([1 / np.arange(1, 500)], 300, topology)
    for dedups in (("node", "rank"), ("rank",)):
        chosen = shard(tables, topology, extra=0, dedups=dedups)
        assert chosen.memory == chosen.row_wise_memory and chosen.rows("world") == {"t0": 499}
    assert shard(tables, topology, extra=0).dedup == "node"


def test_where_keys_are_deduplicated_per_rank_hot_rows_get_copies_and_save_time():
    topology = cluster(2, 4, **WIDE)
    (table,) = tables_of([1 / np.arange(1, 2000) ** 1.1], 1000, topology)
    chosen = shard([table], topology, dedups=("rank",))
    copied = chosen.held[0]["node"] + chosen.held[0]["replicated"]
    assert 0 < copied.sum() < table.rows
    assert copied[0] == 1 and (np.diff(copied) <= 0).all(), "the hottest rows are those with copies"
    alone = expected_traffic([table], [{"world/rank": table.keys}], topology, "float32")
    assert chosen.traffic.between < 0.9 * alone.between
    assert chosen.seconds < alone.seconds(topology)


def test_the_plan_names_the_hottest_keys_of_each_tier():
    topology = cluster(2, 4, **WIDE)
    (table,) = tables_of([1 / np.arange(1, 800) ** 1.1], 1000, topology)
    chosen = shard([table], topology, dedups=("rank",))
    hottest = np.random.default_rng(0).permutation(10_000)[:799]
    plan = chosen.plan(lambda name, rows: hottest[:rows], {"batch_size": 7})
    begin = 0
    for share in plan.shares["t0"][:-1]:
        rows = chosen.rows(share.tier)["t0"]
        assert share.keys.tolist() == sorted(hottest[begin : begin + rows].tolist())
        begin += rows
    assert plan.shares["t0"][-1].tier == "world" and begin > 0
    assert plan.facts["dedup"] == "rank" and plan.facts["batch_size"] == 7
    plan.check([table.table])


def test_a_partly_copied_class_names_as_many_keys_as_fit():
    topology = cluster(2, 2, **WIDE)
    _, base = drawn_table(np.ones(1), 5, topology)
    use = base.use
    table = TableUse(base.table, base.row_bytes, base.counts, np.array([1000]), use)
    step = table.row_bytes * (1 / 2 - 1 / 4) + NAME_BYTES
    chosen = shard([table], topology, extra=int(10 * step) + 5, dedups=("rank",))
    copied = chosen.rows("node")["t"] + chosen.rows("replicated")["t"]
    assert 0 < copied <= 10
    plan = chosen.plan(lambda name, rows: np.arange(rows) * 3)
    assert sum(len(s.keys) for s in plan.shares["t"][:-1]) == copied


def test_few_very_hot_rows_load_no_rank_more_than_its_part():
    topology = cluster(2, 4)
    weights = np.r_[np.full(3, 20_000.0), np.ones(30_000)]
    (table,) = tables_of([weights], 60_000, topology)
    plain = expected_traffic([table], [{"world/none": table.keys}], topology, "float32")
    assert plain.imbalance(topology) > 1.2
    assert shard([table], topology).traffic.imbalance(topology) < 1.1


def test_memory_of_the_fullest_rank_is_close_to_the_real_one():
    topology = cluster(2, 4)
    (table,) = tables_of([np.ones(50_000)], 10, topology)
    real = np.bincount(owners(np.arange(50_000), 8), minlength=8).max() * table.row_bytes
    assert 50_000 * table.row_bytes / 8 < fullest([table], [{"world": table.keys}], topology)
    assert fullest([table], [{"world": table.keys}], topology) == pytest.approx(real, rel=0.01)


def test_what_does_not_fit_is_a_sentence():
    small = cluster(2, 2, memory=1000)
    tables = tables_of([np.ones(100)], 10, small)
    with pytest.raises(SettingsError, match="even in one copy, but the topology gives each 1,000 B"):
        shard(tables, small)
    topology = cluster(2, 2, memory=10_000)
    with pytest.raises(SettingsError, match="Copies of 1.0 MiB do not fit: .* Give at most --extra"):
        shard(tables, topology, extra=1 << 20)
    with pytest.raises(SettingsError, match="cannot take -1 bytes"):
        shard(tables, topology, extra=-1)


def test_one_rank_needs_no_plan():
    topology = cluster(1, 1)
    chosen = shard([drawn_table(np.ones(9), 5, topology)[1]], topology)
    assert chosen.seconds == 0 and chosen.rows("world") == {"t": 9}
    assert Table(name="t", dim=8) == chosen.tables[0].table


def test_slow_rails_send_keys_straight_to_their_owners():
    plain = cluster(2, 2, latency=0.0)
    tables = tables_of([1 / np.arange(1, 2001)], 1000, plain)
    assert shard(tables, plain, extra=0).dedup == "node"
    assert shard(tables, cluster(2, 2, latency=0.0, rail=1e8), extra=0).seconds == shard(tables, plain, extra=0).seconds
    assert shard(tables, cluster(2, 2, latency=0.0, rail=3e7), extra=0).dedup == "rank"
