"""`hotrow report`: the page beside the run, several runs in one page, and wrong calls in a sentence."""

import functools
import json
import sys

import pytest

from run_folders import run_folder


@pytest.fixture
def call(call, monkeypatch):
    """Runs `hotrow report`."""
    monkeypatch.setenv("COLUMNS", "100")
    return functools.partial(call, "report")


def test_the_page_is_written_beside_the_run(data, tmp_path, call):
    pytest.importorskip("plotly")
    path = run_folder(tmp_path / "run", data)
    code, out, _ = call(path)
    assert code == 0 and "report.html" in out and "traffic by tier and link" in out
    assert "plot-loss" in (path / "report.html").read_text()


def test_several_runs_go_into_one_page_and_json_names_its_sections(runs, tmp_path, call):
    pytest.importorskip("plotly")
    code, out, _ = call(*runs, "--out", tmp_path / "two.html", "--json")
    said = json.loads(out)
    assert code == 0 and said["report"] == str(tmp_path / "two.html")
    assert {s["id"] for s in said["sections"]} >= {"progress", "quality", "access", "memory"}
    assert [p.name for p in tmp_path.iterdir()] == ["two.html"]


def test_wrong_calls_are_sentences(tmp_path, runs, call):
    assert call(tmp_path)[0] == 1 and "not a run folder" in call(tmp_path)[2]
    assert "--live" in call(runs[0], "--live", "--out", tmp_path / "x.html")[2]
    code, _, err = call(runs[0], "--out", tmp_path / "nowhere" / "x.html")
    assert code == 1 and "could not be written" in err


def test_without_plotly_it_says_what_to_install(runs, tmp_path, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, _, err = call(runs[0], "--out", tmp_path / "x.html")
    assert code == 1 and "hotrow[report]" in err and not list(tmp_path.iterdir())
