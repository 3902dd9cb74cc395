"""`hotrow advise`: what it says follows from the data, and the run file it writes trains."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from hotrow.advise import advise, relative
from hotrow.cli import main
from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.plan.topology import Link, Topology
from hotrow.profile import find_groups
from hotrow.run import load_run
from hotrow.train.trainer import train

FEATURES = (
    Column(name="user"),
    Column(name="item"),
    Column(name="past", kind="keys", table="item", pooling="sequence"),
)
CLUSTER = Topology(
    nodes=2,
    ranks=2,
    memory="1GiB",
    between=Link(bandwidth="1Gbit/s", latency="100us"),
    within=Link(bandwidth="10GB/s", latency="10us"),
)


def samples(n, per_session):
    """Sessions whose user and past stay; items by Zipf's law."""
    random = np.random.default_rng(1)
    session = np.arange(n) // per_session
    past = random.integers(0, 300, (session[-1] + 1, 8))[session]
    columns = {
        "click": random.integers(0, 2, n).astype(np.float32),
        "session": session,
        "user": session % 40,
        "item": random.zipf(1.4, n) % 1000,
        "past": pa.array(list(past), pa.list_(pa.int64())),
    }
    return pa.table(columns)


def write(path, *, per_session=10, session="session", dedup=True, features=FEATURES, test=True):
    table = samples(4000, per_session)
    schema = Schema(label="click", features=features, session=session)
    groups = find_groups(table, schema) if session and dedup else None
    with DataSetWriter(path, schema.model_copy(update={"groups": groups or ()}), row_group=512) as writer:
        writer.write("train", table)
        if test:
            writer.write("test", samples(500, per_session))
    return path


def found(path, **options):
    advice = advise(DataSet.open(path), **{"memory": 1 << 20, "accelerator": False, **options})
    return advice, {t.source: t for t in advice.techniques}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("advise") / "data")


def test_sessions_that_repeat_are_worth_keeping_once(data, tmp_path):
    _, by_source = found(data)
    assert by_source["RecD"].pays and by_source["RecD"].figures["factor"] > 2
    assert "nothing to do" in by_source["RecD"].said
    _, flat = found(write(tmp_path / "flat", dedup=False))
    assert flat["RecD"].pays and "--no-dedup" in flat["RecD"].said
    assert flat["RecD"].figures["factor"] == pytest.approx(by_source["RecD"].figures["factor"], rel=0.1)


def test_where_nothing_repeats_it_says_so(tmp_path):
    _, short = found(write(tmp_path / "short", per_session=1))
    assert not short["RecD"].pays
    _, none = found(write(tmp_path / "none", session=None))
    assert not none["RecD"].pays and "no session" in none["RecD"].said


def test_hot_rows_pay_only_where_there_is_a_gpu_and_enough_memory(data):
    _, cpu = found(data)
    assert not cpu["FAE"].pays and cpu["FAE"].figures["share"] == 1
    advice, gpu = found(data, accelerator=True)
    assert gpu["FAE"].pays and advice.run["plan"] == {"memory": "1MiB"} and advice.run["train"]["device"] == "cuda"
    _, little = found(data, accelerator=True, memory=500)
    assert not little["FAE"].pays and 0 < little["FAE"].figures["share"] < 0.5


def test_a_cluster_makes_sharding_and_fetching_ahead_pay(data):
    advice, by_source = found(data, topology=CLUSTER)
    assert by_source["FlexShard"].pays and 0 < by_source["FlexShard"].figures["bytes_saved_between_nodes"] < 1
    assert by_source["Persia"].pays and advice.run["policy"] == {"name": "exact"}
    _, alone = found(data)
    assert not alone["FlexShard"].pays and not alone["HET"].pays and not alone["Persia"].pays
    top = by_source["HET"].figures["share_of_top_10_percent"]
    assert 0.1 < top < 1 and by_source["HET"].pays == (top >= 0.5)


def test_tables_that_fill_the_machine_are_told_to_leave_rare_keys_out(data, monkeypatch):
    monkeypatch.setattr("hotrow.advise.machine_memory", lambda: 100_000)
    advice, by_source = found(data)
    assert by_source["admission"].pays and advice.run["tables"]["admission"] == {"name": "count", "count": 2}


def test_the_run_file_is_valid_and_trains(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hotrow", "advise", str(data), "--out", str(tmp_path / "run.toml"), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["written"] == str(tmp_path / "run.toml") and said["run"]["model"]["targets"] == {"past": "item"}
    run = load_run(tmp_path / "run.toml", ["train.steps=3", "output.tensorboard=false"])
    assert run.model.name == "transformer" and run.data.batch_size == 32
    assert train(run).steps == 3


def test_without_history_or_test_split_the_run_file_is_valid_too(tmp_path):
    path = write(tmp_path / "plain", features=FEATURES[:2], test=False)
    advice, _ = found(path)
    (tmp_path / "run.toml").write_text(advice.run_file(relative(path, tmp_path / "run.toml")))
    run = load_run(tmp_path / "run.toml")
    assert run.model.name == "dlrm" and run.data.test == "" and run.data.path == path


def test_a_file_that_is_there_is_not_replaced(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "run.toml").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["hotrow", "advise", str(data), "--out", str(tmp_path / "run.toml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "already there" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == "mine"
