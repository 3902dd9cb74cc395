"""The parts of the shard benchmark that need no cluster give figures that hold together."""

from hotrow.bench.shard_plan import NVLINK_100G, plan_large, simulate_large


def test_many_tables_are_planned_from_histograms():
    found = plan_large(tables=20, rows=100_000)
    assert found["rows"] == 2_000_000 and found["classes"] < 200_000
    assert found["seconds"] > 0 and found["peak_bytes"] > 0 and found["dedup"] in ("node", "rank")


def test_a_cluster_that_is_not_here_is_simulated():
    found = simulate_large(quick=True)
    assert found["topology"] == NVLINK_100G.model_dump()
    rows = {row["name"]: row for row in found["compare"]}
    assert rows["row-wise"]["between"] > rows["rank dedup"]["between"] > rows["node dedup"]["between"]
    assert rows["this plan"]["seconds"] <= 1.02 * min(row["seconds"] for row in rows.values())
    assert all(abs(row["error"]["between"]) < 0.05 and abs(row["error"]["seconds"]) < 0.25 for row in rows.values())
    assert rows["this plan"]["memory"] <= NVLINK_100G.memory
