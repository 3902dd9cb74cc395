"""Every source system's claim and every peer has a figure, a reason, or a benchmark that gives one."""

import json

import pytest

from hotrow.bench import BENCHES, everything
from hotrow.bench.claims import CLAIMS, PARTS, PEERS, claims_table, command_of, kind_of, peers_table
from hotrow.bench.page import page
from hotrow.bench.report import add, missing, new_report
from hotrow.report.benchmarks import benchmarks_page


@pytest.fixture
def report():
    """One figure reached, one not, one missing."""
    made = new_report("all", {"quick": True})
    add(made, "dedup.storage", 5.2, "x", must=3.71)
    add(made, "cache.auc_gap", 0.02, "AUC", must=0.0005, better="lower")
    missing(made, "hot.vs_cpu", "there is no CUDA device here")
    return made


def test_every_system_is_there_and_every_figure_has_a_benchmark():
    assert {claim.system for claim in CLAIMS} == {"RecD", "FAE", "HET", "Persia", "FlexShard"}
    assert {command_of(id) for id in [c.id for c in CLAIMS] + [id for _, id in PEERS]} <= set(BENCHES)


def test_a_figure_of_a_part_is_never_shown_as_one_of_a_users_run(report):
    assert set(PARTS) == set(BENCHES)
    for id in ("hot.vs_cpu", "hot.vs_fbgemm_uvm", "dedup.batch", "store.vs_torch", "kernels.ikjt5", "hybrid.vs_persia"):
        assert kind_of(id) == "part"
    assert {
        kind_of(id) for id in ("train.own_loop", "dedup.storage", "dedup.train", "hot.auc_gap", "hybrid.auc_gap")
    } == {"product"}
    for columns, rows in (claims_table([report]), peers_table([report])):
        assert all(row[columns.index("kind")] in ("product", "part") and len(row) == len(columns) for row in rows)
    text = page([{**report, "name": name} for name in BENCHES])
    assert all(f"What it runs: {said}" in text for said in PARTS.values())


def test_a_claim_is_reached_not_reached_or_missing_with_a_reason(report):
    columns, rows = claims_table([report])
    said = {row[columns.index("figure here")]: row for row in rows}
    assert len(rows) == len(CLAIMS)
    assert {"5.20 x (must 3.71)", "reached"} <= set(said["dedup.storage"])
    assert "**not reached**" in said["cache.auc_gap"]
    assert "there is no CUDA device here" in said["hot.vs_cpu"]
    assert "this benchmark was not run" in said["shard.comm"]


def test_what_one_report_misses_another_may_have(report):
    other = new_report("hot", {})
    other["machine"]["device"] = "NVIDIA H200"
    add(other, "hot.vs_cpu", 20.8, "x", must=2.3)
    for reports in ([report, other], [other, report]):
        (row,) = (row for row in claims_table(reports)[1] if "hot.vs_cpu" in row)
        assert "NVIDIA H200" in row and "reached" in row


def test_the_page_of_full_runs_begins_with_what_was_published_and_draws_the_curve(report):
    for s, auc in (("0", 0.75), ("100", 0.749), ("unbounded", 0.7)):
        add(report, f"cache.auc.wide_deep.s{s}", auc, "AUC")
    text = page([report])
    assert text.index("## What the source systems published") < text.index("## Against peers") < text.index("## all")
    assert 'x-axis "s" [0, 100, unbounded]' in text and "line [0.7500, 0.7490, 0.7000]" in text


def test_the_html_page_has_every_claim_and_no_marks_of_markdown(report, monkeypatch):
    monkeypatch.setattr("hotrow.report.benchmarks.find_spec", lambda name: None)
    html = benchmarks_page(report).html()
    assert all(claim.published in html for claim in CLAIMS)
    assert "A quick run" in html and "**" not in html and "plotly.js v" not in html
    assert len(html) < 100_000


def test_ratios_are_drawn_as_shares_of_what_they_must_be(report):
    pytest.importorskip("plotly")
    add(report, "store.growth", 4.0, "x", must=2, better="lower")
    (plot,) = benchmarks_page(report).plots
    assert plot.traces[0]["x"] == pytest.approx([5.2 / 3.71, 0.5])


def test_all_runs_each_by_itself_and_one_that_fails_costs_its_own_figures(monkeypatch, call, tmp_path):
    """Benchmarks are stand-ins: processes of their own that write a report, fail, or say nothing."""

    def stand_in(name):
        if name == "store":
            return "hotrow bench store --quick failed and said: boom"
        made = new_report(name, {"name": name})
        add(made, f"{name}.figure", 1.0, "x")
        missing(made, "cache.figure", "not here")
        return made

    monkeypatch.setattr(everything, "_one", stand_in)
    code, _, err = call("bench", "all", "--json", tmp_path / "all.json", "--page", tmp_path / "all.html")
    said = json.loads((tmp_path / "all.json").read_text())
    assert code == 0 and f"hybrid: {len(BENCHES)} of {len(BENCHES)}" in err and "all.html" in err
    assert {r["id"] for r in said["results"]} == {f"{name}.figure" for name in BENCHES if name != "store"}
    assert {m["id"] for m in said["missing"]} == {"store.vs_fbgemm_cpu", "store.vs_fbgemm_cpu_2m", "store.vs_torch"}
    assert set(said["workload"]) == {"quick", *BENCHES} - {"store"}
    assert "boom" in (tmp_path / "all.html").read_text()


def test_a_benchmark_that_fails_says_its_last_words(monkeypatch):
    monkeypatch.setattr(everything.sys, "executable", "false")
    assert everything._one("store") == "hotrow bench store --quick failed and said: nothing"
