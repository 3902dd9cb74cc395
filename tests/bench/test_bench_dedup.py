"""The benchmark of deduplication, made small, and the page about it."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hotrow.bench import dedup, dedup_step, dedup_train, real_logs
from hotrow.bench.page import page
from hotrow.cli import app
from hotrow.data import DataSet, prepare
from hotrow.data.synth import SynthSettings, preset_settings, write_log
from hotrow.errors import DataError
from hotrow.models import TransformerSettings

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = ["dedup.storage", "dedup.read", "dedup.factor_error", "dedup.batch", "dedup.train"]
REAL = [f"dedup.{log}.{figure}" for log in real_logs.LOGS for figure in ("storage", "read", "factor_error")]


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "log"
    small = {"samples": 2000, "users": 200, "items": 300, "history_length": 20, "past": 20, "vocabulary": 50}
    write_log(SynthSettings.model_validate({**preset_settings("recd"), **small}), folder)
    return folder


@pytest.fixture
def small(monkeypatch, log):
    """A run of seconds: the small log, a small model, batches of 128, no pauses, peaks that are computed."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(dedup, "write_log", lambda _, out: Path(out).symlink_to(log))
    monkeypatch.setattr(dedup, "BATCH", 128)
    monkeypatch.setattr(dedup, "keep_memory", lambda: False)
    monkeypatch.setattr(dedup, "trained", lambda data, *given: dedup_train.train(data, dedup.BATCH, *given))
    monkeypatch.setattr(dedup, "_peak_of", lambda data: lambda n: n << (10 if "ours" in data.name else 12))
    for module in (dedup_step, dedup_train):
        monkeypatch.setattr(module, "MODEL", TransformerSettings(layers=1, length=8))
        monkeypatch.setattr(module, "DIM", 8)
    monkeypatch.setattr(dedup, "QUICK", dedup.QUICK._replace(memory=1 << 22))


def test_every_figure_is_there_or_missing_with_a_reason(small, monkeypatch):
    monkeypatch.delenv(real_logs.FOLDER, raising=False)
    report = dedup.run(quick=True)
    assert [r["id"] for r in report["results"]] == FIGURES
    assert [m["id"] for m in report["missing"]] == [*REAL, "dedup.train_one_core"]
    found = {r["id"]: r for r in report["results"]}
    assert found["dedup.storage"]["value"] > 1.5
    assert found["dedup.factor_error"]["value"] < 0.05
    assert found["dedup.batch"]["value"] == pytest.approx(4, rel=0.5)
    assert all(r["must"] is not None and r["aim"] is not None for r in report["results"])
    assert "`hotrow train`" in found["dedup.train"]["note"]
    assert "dedup.train" in page([json.loads(json.dumps(report))])


def test_real_logs_are_reported_and_must_reach_nothing(small, monkeypatch, tmp_path):
    write_clicks(tmp_path)
    monkeypatch.setenv(real_logs.FOLDER, str(tmp_path))
    monkeypatch.setattr(dedup, "QUICK", dedup.QUICK._replace(real_samples=240, one_core=(1, 1, 1)))
    report = dedup.run(quick=True)
    real = [r for r in report["results"] if r["id"] in REAL]
    assert [r["id"] for r in real] == REAL
    assert all(r["must"] is None and r["met"] is None for r in real)
    assert report["missing"] == []
    assert "dedup.train_one_core" in [r["id"] for r in report["results"]]


def test_both_sides_hold_the_same_samples_and_only_ours_repeats_nothing(log, tmp_path):
    (tmp_path / "log").symlink_to(log)
    ours, plain = dedup._prepared(tmp_path / "log")
    flat = [pa.concat_tables(side.flat("train")).sort_by("time") for side in (ours, plain)]
    assert flat[0].equals(flat[1])
    assert ours.schema.groups and not plain.schema.groups
    log_order = pa.concat_tables(plain.flat("train")).column("time").to_numpy()
    assert (np.diff(log_order) > 0).all()


def test_both_sides_of_training_are_whole_runs_of_the_same_samples(small, log, tmp_path):
    (tmp_path / "log").symlink_to(log)
    ours, plain = (dedup_train.train(side.path, 128, 1, 2, 20) for side in dedup._prepared(tmp_path / "log"))
    assert ours.samples == plain.samples == sum(min(128, 2000 - at % 2048) for at in range(256, 2816, 128))
    assert ours.rate > 0 and plain.rate > 0


def test_a_step_in_a_process_of_its_own_says_what_it_took(log, tmp_path):
    if not dedup_step.PEAK_RESET.exists():
        pytest.skip("peaks are taken from /proc, which this system does not have")
    peak = dedup._peak_of(prepare(log, tmp_path / "data", split="none").path)
    assert 1 << 20 < peak(64) < peak(1900) < 1 << 30


def test_batches_larger_than_the_data_are_refused(log, tmp_path):
    data = prepare(log, tmp_path / "data", split="none")
    with pytest.raises(DataError, match="fewer than 5000 samples"):
        next(dedup_step.whole_batches(DataSet.open(data.path), 5000))


@given(
    each=st.integers(1, 10**6),
    always=st.integers(0, 10**8),
    batch=st.integers(40, 20_000),
    precision=st.sampled_from([0.03, 0.15]),
)
def test_the_largest_batch_is_found_as_precisely_as_told(each, always, batch, precision):
    memory = always + each * batch
    found, peaks = dedup.largest(lambda n: always + each * n, memory, precision)
    assert found <= batch
    above = min(n for n, p in peaks.items() if p > memory)
    assert above > batch
    assert above - found <= max(1, precision * 512 * memory / peaks[512])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_a_history_is_what_the_owner_had_before(clicks):
    owner, item = (np.array([c[i] for c in clicks], dtype=np.int64) for i in (0, 1))
    before = [[i for o, i in clicks[:at] if o == clicks[at][0]][-real_logs.HISTORY :] for at in range(len(clicks))]
    assert real_logs.histories(owner, item).to_pylist() == before


def write_clicks(folder: Path) -> None:
    rng, count = np.random.default_rng(0), 300
    user = rng.integers(0, 20, count)
    columns = {"user_id": user, "session": user * 10, "click_article_id": rng.integers(0, 40, count)}
    columns |= {"click_timestamp": rng.permutation(count)}
    columns |= {f"click_{name}": user % 3 for name in real_logs.CONTEXT}
    pq.write_table(
        pa.table({name: values.astype(np.int32) for name, values in columns.items()}), folder / "globo.parquet"
    )
    lines = "\n".join(" ".join(map(str, rng.integers(1, 50, 5))) for _ in range(80)) + "\n"
    with pa.output_stream(str(folder / "diginetica.txt.zst"), compression="zstd") as out:
        out.write(lines.encode())


def test_clicks_come_in_order_of_time_each_followed_by_its_negatives(tmp_path):
    write_clicks(tmp_path)
    rows, schema = real_logs.globo(tmp_path / "globo.parquet", 50, negatives=3)
    assert rows.column_names == list(dict.fromkeys([*rows.column_names, *schema.columns]))
    assert rows.column("label").to_pylist() == [1.0, 0.0, 0.0, 0.0] * 50
    assert rows.column("time").to_pylist() == [time for time in range(50) for _ in range(4)]
    assert rows.column("history").to_pylist()[::4] == rows.column("history").to_pylist()[3::4]


def test_a_session_is_a_line(tmp_path):
    write_clicks(tmp_path)
    rows, _ = real_logs.diginetica(tmp_path / "diginetica.txt.zst", 23)
    assert rows.column("session").to_pylist() == [session for session in range(5) for _ in range(5)]
    assert [len(h) for h in rows.column("history").to_pylist()] == [0, 1, 2, 3, 4] * 5


@pytest.mark.parametrize(("folder", "reason"), [(None, "names no folder"), ("here", "has no diginetica.txt.zst")])
def test_a_log_that_is_not_there_is_named(folder, reason, monkeypatch, tmp_path):
    monkeypatch.delenv(real_logs.FOLDER, raising=False)
    if folder:
        monkeypatch.setenv(real_logs.FOLDER, str(tmp_path))
    assert reason in str(real_logs.find("diginetica", 10))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / "dedup.md").read_text(), re.DOTALL)


def test_the_commands_of_the_page_run_in_the_order_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(blocks("toml")[0])
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line.split("#")[0])[1:]
        if words[:1] == ["bench"]:
            continue  # it has tests of its own
        words = ["3000" if word == "400000" else word for word in words]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}: {result.output}"
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    assert names["batch"].size == 512  # type: ignore[attr-defined]


def test_the_page_claims_no_more_than_the_recorded_run_shows():
    recorded = {r["id"]: r for r in json.loads((DOCS / "benchmarks" / "dedup.json").read_text())["results"]}
    claims = re.findall(r"^\| `(dedup\.\w+)` \|.*\| ([\d.]+)(?: x)? \|$", (DOCS / "dedup.md").read_text(), re.MULTILINE)
    assert {id for id, _ in claims} == set(FIGURES)
    for id, claim in claims:
        value = recorded[id]["value"]
        assert value <= float(claim) if id.endswith("error") else value >= float(claim), f"{id}: {value}"
