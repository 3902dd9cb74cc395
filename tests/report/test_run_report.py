"""The report: what stands in it comes from the run, and what is missing says what would give it."""

import json
import shutil

import pytest

from hotrow.errors import DataError
from hotrow.report.report import report
from hotrow.report.runs import names
from hotrow.report.section import Series, line_plot, thinned
from run_folders import data_set, run_folder


def section(page, id):
    return next(s for s in page.sections if s.id == id)


def plot(page, id):
    return next(p for p in page.plots if p.id == id)


def test_a_full_run_has_every_section(runs):
    page = report([runs[0]])
    assert [s.id for s in page.sections if s.missing] == []
    ids = {p.id for p in page.plots}
    assert ids >= {"loss", "quality-auc", "throughput", "step-in-turn", "step-beside", "hits", "staleness", "traffic"}
    assert ids >= {"memory-process", "memory-tables", "table-rows", "access-0", "factor"}
    assert "quality-normalized_entropy" not in ids  # it was never a number


def test_what_a_run_does_not_have_is_named_with_what_would_give_it(runs):
    page = report([runs[1]])
    missing = {s.id: s.missing for s in page.sections if s.missing}
    assert missing.keys() == {"step", "hits", "traffic", "memory"}
    assert "[plan]" in missing["hits"] and "served" in missing["traffic"]
    assert any("hotrow plan" in line for line in section(page, "access").lines)


def test_curves_are_the_metrics_of_the_run(runs):
    page = report([runs[0]])
    (loss,) = plot(page, "loss").traces
    assert loss["x"][0] == 4 * 32 and loss["y"][0] == 0.25 and loss["x"][-1] == 40 * 32
    auc, best = plot(page, "quality-auc").traces
    assert (auc["x"], auc["y"]) == ([640.0, 1280.0], [0.62, 0.64])
    assert set(best["y"]) == {0.81}
    (rate,) = plot(page, "throughput").traces
    assert rate["y"] == pytest.approx([1000.0] * 10)


def test_the_phases_of_a_step_and_what_is_left_add_up_to_its_time(runs):
    bars = plot(report([runs[0]]), "step-in-turn").traces
    assert [bar["name"] for bar in bars] == ["wait for a batch", "fetch rows", "model", "update rows", "other"]
    assert sum(bar["x"][0] for bar in bars) == pytest.approx(32.0)  # 32 samples at 1000 a second
    assert bars[2]["x"][0] == pytest.approx(1000 * 0.001 * sum(range(4, 41, 4)) / 40)


def test_hits_staleness_and_traffic_are_what_tiers_counted(runs):
    page = report([runs[0]])
    by_name = {t["name"]: t for t in plot(page, "hits").traces}
    assert by_name["full"]["y"][0] == 0.4
    assert by_name["full, cached"]["y"] == pytest.approx([0.9] * 10)
    missed, ages = plot(page, "staleness").traces
    assert missed["name"] == "full" and ages["name"] == "full, cached"
    assert ages["x"][:3] == ["0", "1", "2 to 3"] and ages["x"][-1] == "64 to 127"
    assert [y for y in ages["y"] if y] == pytest.approx([50 / 81, 30 / 81, 1 / 81])
    assert missed["y"][:2] == pytest.approx([0.75, 0.25])
    table = plot(page, "traffic").table.rows
    assert [row[0] for row in table] == ["cached", "world, within nodes", "world, across nodes"]
    received, sent = plot(page, "traffic").traces
    assert received["x"] == [5000, None, None] and sent["x"] == [700, 900 / 40, 80 / 40]


def test_the_plan_stands_on_the_curve_where_its_rows_end(runs):
    page = report([runs[0]])
    curve, device = plot(page, "access-0").traces
    (size,) = device["x"]
    assert size == 10 * 84  # dim 16, row-wise Adagrad's one number, 16 bytes of index
    assert curve["y"] == sorted(curve["y"]) and curve["y"][-1] == pytest.approx(1)
    assert 0.2 < device["y"][0] < 1


def test_runs_are_overlaid_by_samples_and_told_apart(runs):
    page = report(list(runs))
    full, bare = plot(page, "loss").traces
    assert full["x"][-1] == 1280 and bare["x"][-1] == 2560
    assert full["name"] != bare["name"] and full["line"]["dash"] != bare["line"]["dash"]
    assert full["colour"] != bare["colour"]
    assert {t["name"] for t in plot(page, "auc-by-time").traces} == {"full", "bare"}
    assert [row[0] for row in section(page, "runs").table.rows] == ["full", "bare"]
    assert len(plot(page, "factor").traces) == 2  # one for each batch size


def test_every_plot_has_a_table_with_figures_and_a_sentence(runs):
    for p in report(list(runs)).plots:
        assert p.table.rows and all(len(row) == len(p.table.columns) for row in p.table.rows), p.id
        assert p.said.endswith(".") and len(p.said) > 20


def test_a_run_that_has_just_begun_has_a_page_too(data, tmp_path):
    path = run_folder(tmp_path / "new", data, steps=0)
    page = report([path])
    assert section(page, "progress").missing and not section(page, "runs").missing
    page.html()


def test_a_data_set_that_is_gone_leaves_the_rest(data, tmp_path):
    shutil.copytree(data, tmp_path / "clicks")
    path = run_folder(tmp_path / "run", tmp_path / "clicks")
    shutil.rmtree(tmp_path / "clicks")
    page = report([path])
    assert "clicks" in section(page, "access").missing and "clicks" in section(page, "repetition").missing
    assert not section(page, "progress").missing


def test_a_line_cut_short_by_a_kill_is_left_out(data, tmp_path):
    path = run_folder(tmp_path / "run", data)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert plot(report([path]), "loss").traces[0]["x"][-1] == 1280


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run folder"):
        report([tmp_path])


def test_names_are_as_short_as_they_can_be(tmp_path):
    a, b, c = tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"
    assert names([a, b, c]) == ["a/run", "b/run", "c"]
    assert names([c, c]) == ["c", "c (2)"]
    assert names([a]) == ["a/run"]


def test_long_runs_are_thinned_but_keep_their_ends():
    drawn = line_plot("p", "P", [Series("run", list(range(50_000)), list(range(50_000)))], x="x", y="y")
    assert len(drawn.traces[0]["x"]) <= 1200 and drawn.traces[0]["x"][-1] == 49_999
    assert len(drawn.table.rows) <= 30
    assert thinned(3, 5) == [0, 1, 2]


def test_names_from_the_data_cannot_write_html(data, tmp_path):
    path = run_folder(tmp_path / "<script>alert(1)<", data)
    text = report([path]).html()
    assert "<script>alert(1)" not in text
    shown = text.split('id="page-data">')[1].split("</script>")[0]
    assert json.loads(shown)["plots"]


def test_a_split_is_a_line_of_its_own_and_what_a_run_stands_for_is_said(tmp_path):
    run = run_folder(tmp_path / "early", data_set(tmp_path / "data"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "evaluate":
            line["split"] = "validation"
    lines.append({"kind": "evaluate", "step": 40, "best_step": 20, "split": "test", "auc": 0.61})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report([run])
    by_name = {trace["name"]: trace for trace in plot(page, "quality-auc").traces}
    assert by_name["early, validation"]["y"] == [0.62, 0.64]
    assert (by_name["early, test"]["x"], by_name["early, test"]["y"]) == ([20 * 32], [0.61])
    said = section(page, "quality").lines
    assert said[0].startswith("On validation and test.") and "early was best at step 20 of 40" in said[1]
