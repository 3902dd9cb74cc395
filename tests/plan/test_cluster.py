"""On a real log, whose sessions repeat themselves, bytes are expected within 5% and time within 25% of a replay."""

import pytest

from clusters import cluster
from hotrow.bench.real_logs import diginetica
from hotrow.data import DataSet, DataSetWriter
from hotrow.plan.budget import count_keys
from hotrow.plan.cluster import plan_for_topology, used_tables
from hotrow.plan.replay import replay_data_set
from hotrow.plan.uses import Use
from hotrow.table import Table

TABLES = [Table(name="item", dim=32)]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory, shared_data):
    log = diginetica(shared_data / "diginetica.txt.zst", 60_000)
    path = tmp_path_factory.mktemp("clicks") / "set"
    with DataSetWriter(path, log.schema, row_group=5000) as writer:
        writer.write("train", log.rows)
    return DataSet.open(path)


def test_a_real_log_exchanges_what_was_expected(clicks):
    topology, counted = cluster(2, 2), count_keys(clicks)
    found = replay_data_set(clicks, TABLES, counted, topology, 500, steps=30)
    for row in found["compare"]:
        assert abs(row["error"]["between"]) < 0.05 and abs(row["error"]["within"]) < 0.05
        assert abs(row["error"]["seconds"]) < 0.25
    (used,) = used_tables(clicks, TABLES, counted, topology, 500)
    apart = Use.of_counts(used.counts, clicks.samples("train"), 500, topology)
    assert float(used.keys @ apart.rank) > 1.3 * float(used.keys @ used.use.rank), "samples are not independent"


def test_forced_to_deduplicate_per_rank_the_plan_copies_hot_rows_within_its_memory(clicks):
    topology, counted = cluster(2, 2), count_keys(clicks)
    used = used_tables(clicks, TABLES, counted, topology, 500)
    plan, told = plan_for_topology(used, counted.counts, topology, extra=1 << 18, dedups=("rank",))
    copied = plan.keys_on("node").get("item", ())
    assert len(copied) == told["tables"]["item"]["tiers"]["node"]["rows"]
    assert told["memory"]["plan"] <= told["memory"]["row_wise"] + (1 << 18)
    if len(copied):
        hottest, _ = counted.counts["item"].hottest(1)
        assert hottest[0] in copied and "pay for copies" in told["tables"]["item"]["why"]
