"""Training from a log that grows: as a data set would, each file once whatever is killed, seen by a predictor."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from hotrow import Predictor
from hotrow.cli import app
from hotrow.data import DataSet, DataSetWriter, Reader, prepare
from hotrow.errors import DataError, HotrowError, SettingsError
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker
from hotrow.train.follow import Following
from hotrow.train.trainer import train
from train.conftest import SCHEMA, samples
from train.test_kill import KILLED, start

FILES = {f"part-{i}.parquet": (20 + i, 100 + 40 * i) for i in range(4)}


def table(name):
    seed, count = FILES[name]
    return samples(count, seed)


def put(folder, name, rows):
    pq.write_table(rows, folder / f".{name}")
    (folder / f".{name}").rename(folder / name)


@pytest.fixture
def incoming(tmp_path):
    folder = tmp_path / "incoming"
    folder.mkdir()
    return folder


def following(make_run, folder, **changes):
    follow = {"path": str(folder), "idle": 0, "look_every": 0.01, **changes.pop("follow", {})}
    return make_run(data__follow=follow, **changes)


def trained_files(run):
    lines = [json.loads(line) for line in (run.output.folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["file"], line["samples"]) for line in lines if line["kind"] == "follow" and "file" in line]


def test_a_followed_log_trains_as_a_data_set_of_the_same_samples_does(make_run, incoming, tmp_path, same_weights):
    rows = samples(64 * 6, 9)
    for i in range(3):
        put(incoming, f"{i}.parquet", rows.slice(i * 128, 128))
    with DataSetWriter(tmp_path / "same", SCHEMA, row_group=256) as writer:
        writer.write("train", rows)
        writer.write("test", samples(200, 2))
    followed = following(make_run, incoming, output__folder=str(tmp_path / "followed"))
    result = train(followed)
    assert (result.stopped, result.steps, result.samples) == ("idle", 6, 384)
    assert 0.5 < result.metrics["auc"] < 1
    whole = make_run(data__path=str(tmp_path / "same"), data__shuffle=False)
    train(whole)
    same_weights(followed, whole)


def test_sessions_that_repeat_are_kept_once_within_a_batch(sessions, make_run, incoming):
    dataset = DataSet.open(sessions)
    put(incoming, "a.parquet", next(dataset.flat("train")).slice(0, 128))
    run = following(make_run, incoming, data__path=str(sessions), train__steps=1)
    train(run)
    batch = next(iter(Reader(dataset, "train", 64, shuffle=False)))
    with Predictor(run.output.folder) as predictor:
        feed = Following(Ranker(run))
        (first, *_) = feed._order()
        assert {g.features: g.inverse is not None for g in first.groups} == {
            g.features: g.inverse is not None for g in batch.groups
        }
        assert torch.isfinite(predictor.logits(first)).all()


def test_a_run_that_was_trained_goes_on_with_what_arrives(make_run, incoming):
    run = make_run(train__steps=5)
    train(run)
    put(incoming, "part-0.parquet", table("part-0.parquet"))
    on = following(make_run, incoming)
    result = train(on, resume=True)
    assert result.steps == 7
    assert trained_files(on) == [("part-0.parquet", 100)]
    again = train(on, resume=True)
    assert again.steps == 7
    put(incoming, "part-1.parquet", table("part-1.parquet"))
    assert train(on, resume=True).steps == 10
    assert trained_files(on) == [("part-0.parquet", 100), ("part-1.parquet", 140)]
    assert train(make_run(train__steps=12), resume=True).stopped == "end"  # and back to the data set


@pytest.mark.parametrize("policy", [{"name": "hybrid", "staleness": 2}, {"name": "exact"}])
def test_it_follows_under_every_policy(make_run, incoming, policy):
    for name in FILES:
        put(incoming, name, table(name))
    run = following(make_run, incoming, policy=policy)
    assert train(run).samples == sum(count for _, count in FILES.values())
    assert trained_files(run) == [(name, count) for name, (_, count) in FILES.items()]


def test_a_following_run_killed_again_and_again_trains_on_every_file_once(make_run, incoming, tmp_path, same_weights):
    for name in FILES:
        put(incoming, name, table(name))
    settings = {"train__checkpoint_every": 2, "train__incremental": 3, "data__batch_size": 32}
    never = following(make_run, incoming, output__folder=str(tmp_path / "never"), **settings)
    train(never)
    run = following(make_run, incoming, **settings)
    run_file = tmp_path / "run.toml"
    run_file.write_text(run.to_toml())
    for changes in (35, 60):
        killed = start(["-c", KILLED, run_file, run.output.folder, changes])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert 0 < Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest()).step < 24
    train(run, resume=True)
    assert trained_files(run) == [(name, count) for name, (_, count) in FILES.items()]
    same_weights(run, never)


def until(condition, process):
    """Waits for another process; fails if that ends instead."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_a_predictor_sees_what_a_training_process_learns(make_run, incoming, tmp_path):
    run = following(
        make_run,
        incoming,
        train__incremental=50,
        train__keep=3,
        follow={"idle": None, "checkpoint_every": 0},
    )
    run_file = tmp_path / "run.toml"
    run_file.write_text(run.to_toml())
    process = subprocess.Popen(
        [sys.executable, "-m", "hotrow", "train", str(run_file), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        put(incoming, "part-0.parquet", table("part-0.parquet"))
        checkpoints = Checkpoints(run.output.folder / "checkpoints")
        at_first = checkpoints.at(2)
        until(lambda: (at_first / "manifest.json").is_file(), process)
        batch = next(iter(Reader(DataSet.open(run.data.path), "test", 64, shuffle=False)))
        with Predictor(run.output.folder) as predictor:
            rows, before = predictor._now.embeddings, predictor.score(batch)
            predictor.follow(0.02)
            steps = predictor.step
            for name in list(FILES)[1:]:
                put(incoming, name, table(name))
                steps += -(-len(table(name)) // 64)
                until(lambda wanted=steps: predictor.step == wanted, process)
            assert predictor.trouble == ""
            assert predictor._now.embeddings is rows  # only what changed was taken over
            after = predictor.score(batch)
            assert not torch.equal(before, after)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert json.loads(out)["stopped"] == "SIGTERM"
        with Predictor(run.output.folder) as afresh:
            assert torch.equal(afresh.score(batch), after)
        assert Checkpoint(checkpoints.latest()).manifest["base"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_files_without_a_sample_stand_in_the_metrics_though_nothing_comes_after_them(make_run, incoming):
    rows = samples(64, 9)
    put(incoming, "a.parquet", rows)
    label = rows.schema.get_field_index(SCHEMA.label)
    put(incoming, "b.parquet", rows.slice(0, 5).set_column(label, SCHEMA.label, pa.array([7.0] * 5)))
    (incoming / "c.parquet").write_bytes(b"")
    run = following(make_run, incoming, follow={"bad": "skip"})
    assert train(run).samples == 64
    assert trained_files(run) == [("a.parquet", 64), ("b.parquet", 0), ("c.parquet", 0)]
    lines = [json.loads(line) for line in (run.output.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["set_aside"] for line in lines if "set_aside" in line] == [0, 5, 0]
    assert any("c.parquet is empty" in line.get("said", "") for line in lines)


def test_texts_where_the_log_of_the_data_set_had_integers_end_the_run(make_run, incoming, tmp_path):
    log = samples(200, 9)
    pq.write_table(log, tmp_path / "log.parquet")
    prepare(tmp_path / "log.parquet", tmp_path / "made", schema=SCHEMA, split="last:0.3")
    key = SCHEMA.features[0].column
    texts = pa.array([f"k{value}" for value in log.column(key).to_pylist()])
    put(incoming, "a.parquet", log.set_column(log.schema.get_field_index(key), key, texts))
    with pytest.raises(DataError, match=f'a.parquet, row 1: column "{key}" holds .*its keys are'):
        train(following(make_run, incoming, data__path=str(tmp_path / "made")))


def test_what_a_file_says_wrongly_ends_the_run_with_its_place(make_run, incoming):
    put(incoming, "a.parquet", samples(70, 1).set_column(0, "click", pa.array([3.0] * 70)))
    with pytest.raises(DataError, match=r'a\.parquet, row 1: column "click" holds 3\.0'):
        train(following(make_run, incoming))
    put(incoming, "b.parquet", samples(70, 1))
    run = following(make_run, incoming, follow={"bad": "skip"})
    assert train(run, overwrite=True).samples == 70
    assert trained_files(run) == [("a.parquet", 0), ("b.parquet", 70)]


def test_settings_that_cannot_be_are_refused(make_run, incoming, tmp_path):
    with pytest.raises(DataError, match="There is no folder"):
        train(following(make_run, tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="idle"):
        following(make_run, incoming, follow={"idle": -1})
    with pytest.raises(HotrowError, match="kafka://HOST:PORT/TOPIC"):
        train(following(make_run, "kafka://broker"))


def test_the_command_follows_a_folder(make_run, incoming, tmp_path):
    put(incoming, "part-0.parquet", table("part-0.parquet"))
    run_file = tmp_path / "run.toml"
    run_file.write_text(make_run().to_toml())
    command = ["train", str(run_file), "--follow", str(incoming), "--set", "data.follow.idle=0", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 100
