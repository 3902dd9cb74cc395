"""What the cost model expects is what the mean of many steps is, and no more than FlexShard's table says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import CLUSTERS, cluster, drawn_steps, drawn_table, split_plan
from hotrow.plan import Link, Topology, row_bytes
from hotrow.plan.cost import TableUse, column_wise, expected_traffic, row_seconds, table_wise, units
from hotrow.plan.simulate import simulate
from hotrow.plan.uses import Use
from hotrow.table import Table


def expected(table, held, topology, dedup, wire="float32"):
    named = {f"world/{dedup}" if tier == "world" else tier: keys for tier, keys in held.items() if keys.any()}
    return expected_traffic([table], [named], topology, wire)


@settings(max_examples=25)
@given(
    CLUSTERS,
    st.lists(st.floats(0.01, 1), min_size=100, max_size=140),
    st.integers(20, 60),
    st.integers(0, 20),
    st.integers(0, 20),
    st.sampled_from(["none", "rank", "node"]),
)
def test_expected_bytes_are_the_mean_of_simulated_steps(topology, weights, draws, replicated, node, dedup):
    p, table = drawn_table(weights, draws, topology)
    plan, held = split_plan(len(p), replicated, node)
    found = simulate(plan, topology, drawn_steps(p, draws, topology, 60), [table.table], dedup=dedup)
    guess = expected(table, held, topology, dedup)
    assert guess.within == pytest.approx(found.traffic.within, rel=0.08)
    assert guess.between == pytest.approx(found.traffic.between, rel=0.14)  # 100 owners by hash are not evenly on nodes


def test_bytes_within_5_percent_and_time_within_25_of_a_zipf_table():
    topology = cluster(2, 2)
    p, table = drawn_table(1 / np.arange(1, 20_001) ** 1.05, 4000, topology, dim=32)
    steps = drawn_steps(p, 4000, topology, 3)
    for replicated, node in ((0, 0), (30, 200)):
        plan, held = split_plan(len(p), replicated, node)
        for dedup in ("none", "rank", "node"):
            found, guess = (
                simulate(plan, topology, steps, [table.table], dedup=dedup),
                expected(table, held, topology, dedup),
            )
            assert guess.within == pytest.approx(found.traffic.within, rel=0.05)
            assert guess.between == pytest.approx(found.traffic.between, rel=0.05)
            assert guess.seconds(topology) == pytest.approx(found.seconds, rel=0.25)
            assert guess.imbalance(topology) == pytest.approx(found.traffic.imbalance(topology), rel=0.1)


@pytest.mark.parametrize("shape", [(2, 2), (4, 8)])
def test_a_row_that_everyone_uses_costs_what_flexshard_says_and_its_keys(shape):
    topology = cluster(*shape)
    n, g, size = topology.nodes, topology.ranks, topology.size
    everyone = Use.of_probabilities(np.array([1.0]), 1, topology)
    table = TableUse(Table(name="t", dim=64), 1, np.ones(1, np.int64), np.ones(1, np.int64), everyone)
    held, d = np.ones(1, np.int64), 256

    def carried(way):
        kept = [
            e for e in expected_traffic([table], [{way: held}], topology, "float32").exchanges if "counts" not in e.name
        ]
        return sum(e.within for e in kept), sum(e.between for e in kept)

    assert carried("world/rank") == pytest.approx(
        (size * (1 / n - 1 / size) * (2 * d + 8), size * (1 - 1 / n) * (2 * d + 8))
    )
    assert carried("world/node") == pytest.approx((size * (1 - 1 / g) * (2 * d + 8), (n - 1) * (2 * d + 8)))
    assert carried("node") == pytest.approx((size * (1 - 1 / g) * (2 * d + 8), 2 * (n - 1) * (d + 8)))
    assert carried("replicated") == pytest.approx((2 * n * (g - 1) * (d + 8), 2 * (n - 1) * (d + 8)))


@given(CLUSTERS, st.floats(1e-6, 1), st.integers(1, 500), st.integers(1, 200))
def test_no_copy_costs_less_between_nodes_than_distinct_keys_of_nodes(topology, p, draws, dim):
    use, row = Use.of_probabilities(np.array([p]), draws, topology), 4 * dim
    star = units("owners", use, topology)[1] * (8 + 2 * row)
    copied = units("owners" if topology.nodes > 2 else "sums", use, topology)[1] * (8 + row)
    if topology.nodes > 2:
        copied = copied + units("copies", use, topology)[1] * (8 + row)
    assert star <= copied * (1 + 1e-9)


@given(CLUSTERS, st.lists(st.floats(1e-6, 1), min_size=1, max_size=20), st.integers(1, 200))
def test_uses_grow_from_rank_to_node_to_world(topology, weights, draws):
    p = np.array(weights) / sum(weights)
    use = Use.of_probabilities(p, draws, topology)
    assert (use.rank <= use.node + 1e-12).all() and (use.node <= use.world + 1e-12).all()
    assert (use.rank <= use.lookups + 1e-12).all() and (use.node <= topology.ranks * use.rank + 1e-12).all()


@pytest.mark.parametrize("rail", [None, 4e7])
def test_rows_seconds_add_up_to_the_time_of_bytes(rail):
    topology = cluster(2, 2, latency=0.0, rail=rail)
    _, table = drawn_table(np.ones(300), 100, topology)
    table = TableUse(table.table, table.row_bytes, table.counts, table.keys, table.use)
    for way in ("world/none", "world/rank", "world/node", "node", "replicated"):
        rows = row_seconds(way, table.use, 32, topology).sum()
        traffic = expected_traffic([table], [{way: table.keys}], topology, "float32")
        even = sum(
            topology.seconds(e.within / topology.size, e.between / topology.nodes, e.lane)
            for e in traffic.exchanges
            if "counts" not in e.name
        )
        assert rows == pytest.approx(even)


ON_RAILS = {"world/none": (), "world/rank": (), "world/node": ("counts", "keys", "rows", "gradients")}
COPIES_ON_RAILS = {
    2: ("counts of sums", "sums"),
    3: ("counts", "keys and gradients", "counts of sums", "sums"),
}


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("way", ["world/none", "world/rank", "world/node", "node", "replicated"])
def test_what_goes_over_rails_is_priced_by_the_rail_and_nothing_else(way, nodes):
    plain, slow = cluster(nodes, 2), cluster(nodes, 2, rail=2e7)
    same = cluster(nodes, 2, rail=1e8)
    _, table = drawn_table(np.ones(300), 100, plain)
    on_rails = ON_RAILS.get(way, COPIES_ON_RAILS[nodes])
    for e in expected_traffic([table], [{way: table.keys}], plain, "float32").exchanges:
        assert (e.lane == "rail") == (e.name in on_rails)
        assert e.seconds(same) == e.seconds(plain)
        carried = e.seconds(plain) - 1e-4
        assert e.seconds(slow) == (pytest.approx(1e-4 + 5 * carried) if e.lane == "rail" else e.seconds(plain))


def test_headers_are_those_of_the_link_that_carries():
    between, rail = Link(bandwidth=1e8, overhead=0.25), Link(bandwidth=1e8, overhead=0.5)
    topology = Topology(nodes=2, ranks=2, memory=1 << 30, between=between, within=Link(bandwidth=1e9), rail=rail)
    _, table = drawn_table(np.ones(300), 100, topology)
    for way, more in (("world/rank", 1.25), ("world/node", 1.5)):
        traffic = expected_traffic([table], [{way: table.keys}], topology, "float32")
        assert traffic.between_with_headers(topology) == pytest.approx(more * traffic.between)


def test_table_wise_and_column_wise_carry_every_lookup():
    topology = cluster(2, 2)
    tables = []
    for at, draws in enumerate((10, 40, 200, 15)):
        _, table = drawn_table(np.ones(50), draws, topology, dim=16, name=f"t{at}")
        tables.append(table)
    lookups = 4 * (10 + 40 + 200 + 15)
    traffic, memory = table_wise(tables, topology, "float32")
    assert traffic.between == pytest.approx(lookups / 2 * (8 + 2 * 64))
    assert traffic.within == pytest.approx(lookups / 4 * (8 + 2 * 64))
    assert memory == 50 * row_bytes(tables[0].table)
    assert traffic.imbalance(topology) > 1.4  # the third table is most of the load, and on one node
    traffic, memory = column_wise(tables, topology, "float32")
    assert traffic.between == pytest.approx(lookups / 2 * (4 * 8 + 2 * 64))
    assert memory == 50 * (row_bytes(tables[0].table) + 3 * 16)


def test_pooled_bags_come_back_as_one_row():
    topology = cluster(1, 2)
    _, table = drawn_table(np.ones(50), 100, topology, dim=16)
    pooled = TableUse(table.table, 1, table.counts, table.keys, table.use, bags=10.0, pooled=1.0)
    traffic, _ = table_wise([pooled], topology, "float32")
    assert traffic.within == pytest.approx(2 * (100 * 8 + 2 * 10 * 64) / 2)
