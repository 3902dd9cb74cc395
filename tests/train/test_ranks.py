"""Several ranks: what they compute together is what one process computes; they stop, resume and checkpoint as one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from hotrow.data import DataSet
from hotrow.errors import SettingsError
from hotrow.policy import Sync
from hotrow.run import Cluster
from hotrow.service.shard import Shard
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker, evaluate, evaluate_path
from hotrow.train.logs import RunFolder
from hotrow.train.ranks import Ranks as OneRank
from hotrow.train.trainer import train
from hotrow.world import World
from ranks import Ranks
from serving import shards as served_by

CPU = torch.device("cpu")
EXACT = {"model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}, "train__epochs": 1}


class Processes:
    """`python -m hotrow train` on several ranks, as torchrun starts them."""

    def __init__(self, run_file: Path, size: int, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "hotrow", "train", str(run_file), "--json", *options],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def ended(self, code: int = 0) -> list[tuple[str, str]]:
        """What each wrote, once all have ended with this code."""
        said = []
        try:
            for process in self.processes:
                said.append(process.communicate(timeout=120))
        finally:
            for process in self.processes:
                process.kill()
        for process, (_, errors) in zip(self.processes, said, strict=True):
            assert process.returncode == code, errors
        return said


@pytest.fixture(scope="module")
def pool():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def trained(pool):
    """Trains a run on two ranks; the first one's result."""

    def go(run, resume=False):
        results = pool.run(2, "train_work:train_run", run.to_toml(), resume, timeout=120)
        assert results[0] == results[1]
        return results[0]

    return go


def end_of(run):
    """Dense arrays and rows of a run's last checkpoint, in one process."""
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    ranker = Ranker(run)
    ranker.restore(checkpoint, checkpoint.arrays())
    rows = {}
    for name, store in ranker.embeddings.router.tiers["host"].stores().items():
        chunks = list(store.export())
        columns = {c: np.concatenate([chunk[c] for chunk in chunks]) for c in chunks[0]}
        order = columns["keys"].argsort()
        rows[name] = {c: columns[c].reshape(len(order), -1)[order] for c in ("keys", "values", "state", "clocks")}
    return {name: a for name, a in checkpoint.arrays().items() if name.startswith("model/")}, rows


def assert_close(one, two):
    (dense_a, rows_a), (dense_b, rows_b) = one, two
    for name in dense_a:
        torch.testing.assert_close(dense_a[name], dense_b[name], rtol=1e-4, atol=1e-5, msg=name)
    for table in rows_a:
        assert np.array_equal(rows_a[table]["keys"], rows_b[table]["keys"])
        assert np.array_equal(rows_a[table]["clocks"], rows_b[table]["clocks"])
        np.testing.assert_allclose(rows_a[table]["values"], rows_b[table]["values"], rtol=1e-3, atol=1e-4)


def losses(run):
    return [line["loss"] for line in RunFolder(run.output.folder).lines() if line["kind"] == "train"]


@pytest.fixture
def shards():
    with Shard("tcp://127.0.0.1:*") as one, Shard("tcp://127.0.0.1:*") as two:
        yield [one.address, two.address]


ADAGRAD = {"dim": 4, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}}


@pytest.fixture(params=["served", "served exact", "served exact in parts", "sharded", "replicated"])
def places(request, shards):
    """Settings of where rows live and of the policy."""
    if request.param.startswith("served"):
        policy = {"name": "exact"} if "exact" in request.param else {"name": "sync"}
        tables = {"tables": ADAGRAD} if "parts" in request.param else {}  # Adam's updates go in one
        return {"cluster": {"shards": shards}, "policy": policy, **tables}
    return {"cluster": {"rows": request.param}, "policy": {"name": "exact" if request.param == "sharded" else "sync"}}


def test_two_ranks_are_one_process_with_twice_the_batch(make_run, tmp_path, places, trained):
    # 2000 samples in steps of 96: the last step has 80, and 48 a rank in others
    tables = {name: places[name] for name in places if name == "tables"}
    one = make_run(**EXACT, **tables, data__batch_size=96, output__folder=str(tmp_path / "one"))
    expected = train(one)
    two = make_run(
        **EXACT, data__batch_size=48, **places, output__folder=str(tmp_path / "two"), train__evaluate_every=9
    )
    result = trained(two)
    assert result["steps"] == expected.steps
    assert result["samples"] == expected.samples
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert result["metrics"]["auc"] == pytest.approx(expected.metrics["auc"], abs=1e-4)
    assert result["metrics"]["samples"] == 500
    assert_close(end_of(two), end_of(one))


def test_an_owner_that_is_slow_to_update_gives_no_rows_that_others_take_as_updated(make_run, tmp_path, pool):
    one = make_run(**EXACT, data__batch_size=96, output__folder=str(tmp_path / "one"))
    train(one)
    sharded = {"cluster": {"rows": "sharded"}, "policy": {"name": "exact"}}
    two = make_run(**EXACT, data__batch_size=48, **sharded, output__folder=str(tmp_path / "two"))
    pool.run(2, "train_work:train_unevenly", two.to_toml(), timeout=120)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert_close(end_of(two), end_of(one))


def test_a_signal_to_one_rank_stops_all_and_any_number_goes_on(make_run, tmp_path, shards, trained):
    one = make_run(**{**EXACT, "train__epochs": 6}, output__folder=str(tmp_path / "one"), data__batch_size=96)
    train(one)
    settings = {**EXACT, "train__epochs": 6, "data__batch_size": 48, "cluster": {"shards": shards}}
    run = make_run(**settings, output__folder=str(tmp_path / "two"), train__checkpoint_every=5)
    run_file = tmp_path / "run.toml"
    run_file.write_text(run.to_toml())
    ranks = Processes(run_file, 2)
    metrics = RunFolder(run.output.folder).metrics
    while not (metrics.exists() and metrics.read_text().count('"train"') >= 2):
        assert all(process.poll() is None for process in ranks.processes), ranks.ended()
    ranks.processes[1].send_signal(signal.SIGTERM)
    ranks.ended(128 + signal.SIGTERM)
    stopped = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    assert 0 < stopped.step < 126
    # Goes on in one process, on rows of its own, at the same sample; then two again, each owning a part of the rows.
    alone = make_run(**{**settings, "cluster": {}}, output__folder=str(tmp_path / "two"), train__steps=stopped.step + 4)
    train(alone, resume=True)
    again = make_run(**{**settings, "cluster": {"rows": "sharded"}}, output__folder=str(tmp_path / "two"))
    result = trained(again, resume=True)
    assert result["stopped"] == "end"
    assert result["samples"] == pytest.approx(12000, abs=96)


def test_a_hybrid_run_of_two_ranks_keeps_its_bound_and_learns(make_run, tmp_path, shards, trained):
    one = make_run(**{**EXACT, "train__epochs": 3}, output__folder=str(tmp_path / "one"))
    expected = train(one).metrics["auc"]
    two = make_run(
        **{**EXACT, "train__epochs": 3},
        data__batch_size=32,
        cluster={"shards": shards},
        policy={"name": "hybrid", "staleness": 4},
        output__folder=str(tmp_path / "two"),
    )
    result = trained(two)
    assert result["metrics"]["auc"] == pytest.approx(expected, abs=0.02)
    stale = [line for line in RunFolder(two.output.folder).lines() if line["kind"] == "staleness"]
    assert stale
    assert max(line["batches_most"] for line in stale) <= 4
    assert evaluate_path(two.output.folder)[2]["auc"] == pytest.approx(result["metrics"]["auc"], abs=1e-6)


def test_a_checkpoint_cut_under_load_has_the_same_loss_on_any_number_of_shards(make_run, tmp_path, shards, trained):
    """It is written while two ranks train on; its rows are those of the cut, as the evaluation just before saw them."""
    settings = {**EXACT, "train__epochs": 3, "data__batch_size": 32, "policy": {"name": "hybrid", "staleness": 4}}
    every = {"train__checkpoint_every": 12, "train__evaluate_every": 12, "train__keep": 9}
    run = make_run(**settings, **every, cluster={"shards": shards})
    steps = trained(run)["steps"]
    seen = {line["step"]: line for line in RunFolder(run.output.folder).lines() if line["kind"] == "evaluate"}
    found = [Checkpoint(path) for path in Checkpoints(run.output.folder / "checkpoints").all()]
    found = [checkpoint for checkpoint in found if checkpoint.step in seen and checkpoint.step < steps]
    assert len(found) > 1
    for checkpoint in (found[0], found[-1]):
        losses = []
        for count in (1, 3, 5):
            with served_by(count) as addresses:
                ranker = Ranker(make_run(**settings, cluster={"shards": addresses}), OneRank(World(), CPU))
                with contextlib.closing(ranker):
                    ranker.restore(checkpoint, checkpoint.arrays())
                    losses.append(evaluate(ranker, "test")["log_loss"])
        assert losses[0] == losses[1] == losses[2]
        assert losses[0] == pytest.approx(seen[checkpoint.step]["log_loss"], rel=1e-6)


@pytest.mark.parametrize("rows", ["sharded", "replicated"])
def test_rows_of_ranks_travel_as_the_run_says(make_run, tmp_path, trained, rows):
    found = {}
    for wire in (None, "float32", "bfloat16"):
        cluster = {"rows": rows} if wire is None else {"rows": rows, "wire": wire}
        run = make_run(**EXACT, cluster=cluster, train__steps=8, output__folder=str(tmp_path / f"{wire}"))
        trained(run)
        found[wire] = losses(run)
    assert found[None] == found["float32"] != found["bfloat16"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=1e-2)


def test_ranks_wait_for_each_other_as_long_as_the_run_says(make_run, pool):
    groups = pool.run(2, "train_work:groups", make_run(train__steps=1, cluster={"timeout": 77.0}).to_toml())
    assert all(groups) and {seconds for of_rank in groups for seconds in of_rank} == {77.0}


def test_drift_and_sample_of_a_cache_are_those_of_the_run(make_run, pool, shards):
    policy = {"name": "bounded", "clock": 9}
    run = make_run(train__steps=1, policy=policy, cluster={"shards": shards, "cache": {"drift": 0.5, "sample": 7}})
    made = pool.run(2, "train_work:caches", run.to_toml(), timeout=120)
    assert made == [[{"drift": 0.5, "sample": 7, "bound": 9}]] * 2


def test_behind_a_cache_a_run_measures_what_its_checkpoint_measures(make_run, shards, trained):
    run = make_run(policy={"name": "bounded", "clock": 50}, cluster={"shards": shards, "cache": {}})
    said = trained(run)["metrics"]
    alone = run.model_copy(update={"cluster": Cluster(), "policy": Sync()})
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    ranker = Ranker(alone)
    ranker.restore(checkpoint, checkpoint.arrays())
    assert said == pytest.approx(evaluate(ranker, "test"), rel=1e-6)


def test_what_the_first_rank_refuses_all_refuse_with_the_same_sentence(make_run, pool):
    run = make_run(train__steps=2)
    train(run)
    for kind, said, _ in pool.answers(2, "train_work:train_run", run.to_toml()):
        assert kind == "HotrowError"
        assert "already holds a run" in said


def test_rows_on_the_host_of_several_ranks_are_refused(make_run, pool):
    for kind, said, _ in pool.answers(2, "train_work:train_run", make_run(cluster={"rows": "host"}).to_toml()):
        assert kind == "SettingsError"
        assert 'cluster.rows: it is "host", but there are 2 ranks' in said


@pytest.mark.parametrize("tables", [ADAGRAD, {"dim": 4, "optimizer": {"name": "adam", "lr": 0.05}}], ids=str)
def test_one_process_trains_through_shards_as_without_them(make_run, tmp_path, shards, same_weights, tables):
    plain = make_run(tables=tables, output__folder=str(tmp_path / "plain"))
    train(plain)
    for policy in ({"name": "sync"}, {"name": "exact"}):
        folder = str(tmp_path / policy["name"])
        served = make_run(tables=tables, cluster={"shards": shards}, policy=policy, output__folder=folder)
        train(served, overwrite=True)  # what an earlier run left on the shards is gone
        same_weights(plain, served)


def test_a_cache_in_front_of_shards_or_of_this_process_changes_nothing_for_one_worker(make_run, tmp_path, shards):
    plain = make_run(output__folder=str(tmp_path / "plain"))
    train(plain)
    for name, cluster in (("served", {"shards": shards}), ("host", {})):
        cached = make_run(cluster={**cluster, "cache": {"capacity": 60}}, output__folder=str(tmp_path / name))
        train(cached)
        (dense, rows), (expected, expected_rows) = end_of(cached), end_of(plain)
        assert all(torch.equal(dense[name], expected[name]) for name in expected)
        for table, columns in expected_rows.items():
            assert all(np.array_equal(rows[table][name], columns[name]) for name in columns)


def test_settings_that_cannot_work_are_refused(make_run):
    with pytest.raises(SettingsError, match=r"rows = .served."):
        make_run(cluster={"shards": ["tcp://127.0.0.1:7700"], "rows": "sharded"})


@pytest.mark.parametrize("rows", ["sharded", "served"])
def test_ranks_that_stop_early_come_to_their_best_checkpoint(make_run, judged, trained, shards, rows):
    stopping = {
        "train__epochs": 9,
        "train__evaluate_every": 4,
        "train__early_stopping": {"metric": "auc", "patience": 2},
    }
    cluster = {"rows": "sharded"} if rows == "sharded" else {"shards": shards}
    run = make_run(
        **EXACT | stopping,
        data__path=str(judged),
        tables__optimizer={"name": "adam", "lr": 0.3},
        cluster=cluster,
    )
    said = trained(run)
    assert (said["stopped"], said["best_step"]) == ("early", said["steps"] - 8)
    best = Checkpoints(run.output.folder / "checkpoints").at(said["best_step"])
    assert said["checkpoint"] == str(best)
    checkpoint, split, metrics = evaluate_path(run.output.folder)
    assert (checkpoint, split) == (best, "test")
    assert metrics == pytest.approx(said["metrics"], rel=1e-5)
    assert evaluate_path(Checkpoints(best.parent).latest())[2]["auc"] != pytest.approx(metrics["auc"], abs=1e-6)


def test_ranks_whose_batches_weigh_nothing_go_on(make_run, data, trained, write_log, tmp_path):
    def weigh(table):
        return table.append_column("w", pa.array(np.where(np.arange(len(table)) < 128, 0.0, 1.0).astype(np.float32)))

    schema = DataSet.open(data).schema.model_copy(update={"weight": "w"})
    weighed = write_log(tmp_path / "weighed", schema=schema, change=weigh)
    run = make_run(
        **EXACT, data__path=str(weighed), data__shuffle=False, train__log_every=1, cluster={"rows": "sharded"}
    )
    assert trained(run)["stopped"] == "end"
    assert [step for step, loss in enumerate(losses(run), 1) if loss is None] == [1]


def test_a_rank_with_rows_that_are_not_finite_keeps_all_from_taking_them_for_a_snapshot(pool, tmp_path):
    for said in pool.run(2, "train_work:spoiled_snapshot", str(tmp_path / "rows"), timeout=120):
        assert said.startswith("NotFiniteError: ") and "Rows of table a hold values that are not finite" in said
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_on_one_rank_ends_all_with_the_same_sentence(pool, make_run):
    text = make_run(**EXACT, cluster={"rows": "sharded"}).to_toml()
    one, other = pool.run(2, "train_work:spoiled_step", text, timeout=120)
    assert one == other
    assert one.startswith("NotFiniteError: Step 4: The loss is nan. The values of weight ")
