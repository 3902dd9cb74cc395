"""`hotrow profile`: the same figures as a table, as JSON and as a page."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data import Column, DataSet, DataSetWriter, Schema, prepare
from hotrow.data.synth import PRESETS, SynthSettings, generate
from hotrow.errors import SettingsError
from hotrow.profile import PROFILE, find_groups
from hotrow.report import draw_profile
from hotrow.report.page import Page

SETTINGS = SynthSettings(
    samples=6_000, **{**PRESETS["recd"], "users": 300, "items": 500, "history_length": 20, "past": 20}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data sets of one log: `once` keeps repeats once, `flat` does not, `apart` has no sessions."""
    path = tmp_path_factory.mktemp("profile")
    table = pa.Table.from_batches([rows for rows, _ in generate(SETTINGS)])
    table = table.sort_by([("session", "ascending"), ("time", "ascending")])
    schema = SETTINGS.log_schema().prepared()
    for name, update in {
        "once": {"groups": find_groups(table, schema)},
        "flat": {"groups": ()},
        "apart": {"session": None, "groups": None},
    }.items():
        with DataSetWriter(path / name, schema.model_copy(update=update), row_group=2048) as writer:
            writer.write("train", table)
    return path


@pytest.fixture
def call(call, monkeypatch):
    """Runs `hotrow profile`, which succeeds: its standard output."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        code, out, err = call("profile", *arguments)
        assert code == 0, err
        return out

    return run


def test_json_has_what_is_expected_and_what_is_reached(folder, call):
    data = json.loads(call(folder / "once", "--batch-size", 1000, "--json"))
    assert (data["samples"], data["kept_once"], data["batch_size"]) == (6000, True, 1000)
    assert data["factor"]["in_batches"] == pytest.approx(data["factor"]["expected"], rel=0.02)
    assert data["factor"]["in_files"] == pytest.approx(data["factor"]["expected"], rel=0.1)
    features = {f["name"]: f for f in data["features"]}
    assert features["history"]["slides"] and features["history"]["expected"] > 5 < features["slow_0"]["expected"]
    assert features["user"]["unchanged"] == 1.0 and features["user"]["distinct"] <= 300
    assert features["item"]["group"] is None and features["item"]["in_batches"] == 1.0
    assert [d["name"] for d in data["dense"]] == ["dense_0", "dense_1"]
    assert {g["name"] for g in data["groups"]} >= {features["history"]["group"]}
    assert data["profile"] == "made"
    assert json.loads(call(folder / "once", "--json", "--batches", 0))["profile"] == "saved"


def test_a_flat_data_set_shows_what_would_pay(folder, call):
    data = json.loads(call(folder / "flat", "--json"))
    assert not data["kept_once"] and data["groups"]
    assert data["factor"]["in_files"] is data["factor"]["in_batches"] is None
    once = json.loads(call(folder / "once", "--json", "--batches", 0))
    assert data["factor"]["expected"] == pytest.approx(once["factor"]["expected"], rel=0.02)


def test_the_table_is_for_people(folder, call):
    told = call(folder / "once", "--batches", 2)
    for word in ("sessions", "history_group", "█", "▒", "in batches", "top 1%", "Zipf", "interests_3", "dense_1"):
        assert word in told
    assert "those that would pay" in call(folder / "flat")
    apart = call(folder / "apart")
    assert "sessions" not in apart and "history" in apart


def test_samples_that_are_not_clustered_are_said_to_be_in_runs(call, tmp_path):
    table = pa.table({"y": [0.0] * 6, "k": range(6), "s": [1, 2, 1, 2, 1, 1]})
    pq.write_table(table, tmp_path / "log.parquet")
    schema = Schema(label="y", features=(Column(name="k"),), session="s")
    for cluster, sessions in ((True, 2), (False, 5)):
        out = tmp_path / f"{cluster}"
        prepare(tmp_path / "log.parquet", out, schema=schema, split="none", cluster=cluster)
        data = json.loads(call(out, "--json"))
        assert (data["clustered"], data["sessions"]) == (cluster, sessions)
        assert ("not clustered" in call(out)) != cluster


@pytest.mark.parametrize("name", ["once", "flat", "apart"])
def test_the_picture_is_one_page_that_needs_no_network(folder, call, tmp_path, name):
    pytest.importorskip("plotly")
    call(folder / name, "--picture", tmp_path / "page.html", "--json")
    text = (tmp_path / "page.html").read_text()
    assert "Plotly.react" in text and "history" in text and f"Profile of {folder / name}" in text
    assert '<script src="http' not in text
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_without_plotly_it_says_what_to_install(folder, call, monkeypatch, tmp_path):
    data = json.loads(call(folder / "once", "--json", "--batches", 0))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SettingsError, match="hotrow\\[report\\]"):
        draw_profile(data, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_names_from_the_data_cannot_write_html(tmp_path):
    pytest.importorskip("plotly")
    Page("<b>x</b>", ["<script>alert(1)</script>"], []).write(tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "<b>x</b>" not in text and "<script>alert(1)" not in text


def test_the_profile_is_no_part_that_verify_misses(folder, call):
    call(folder / "flat", "--json")
    dataset = DataSet.open(folder / "flat")
    dataset.verify()
    assert (dataset.path / PROFILE / "profile.json").is_file()
