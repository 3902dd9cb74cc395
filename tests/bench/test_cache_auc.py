"""`hotrow bench cache_auc`: what it says of its runs, what a rank counts, and a crew of two on a small log."""

import json
import sys

import numpy as np
import pytest

from hotrow.bench import BENCHES, cache_auc, cache_crew
from hotrow.bench.cache_crew import Came, Work
from hotrow.data import DataSet, prepare
from hotrow.data.synth import SynthSettings, write_log
from hotrow.errors import HotrowError
from hotrow.run import Run
from hotrow.service.local import ShardProcess
from hotrow.settings import parse
from hotrow.tiers.cache_check import Checker
from hotrow.train.compatibility import refuse_problems

BROKEN = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> DataSet:
    folder = tmp_path_factory.mktemp("small")
    write_log(SynthSettings(samples=2000, users=100, items=100, history_length=2, seed=1), folder / "log")
    return prepare(folder / "log", folder / "data", workers=1)


@pytest.fixture
def asked(small, monkeypatch) -> list[Run]:
    """The runs that a benchmark asks for; each comes to what its bound and drift say."""
    runs = []

    def came(settings, workers, clock):
        cluster = {**settings["cluster"], "shards": ["tcp://127.0.0.1:7700"]}
        run = parse(Run, {**settings, "cluster": cluster, "output": {"folder": "run"}})
        refuse_problems(run, ranks=workers)
        runs.append(run)
        return Came(0.7 if clock == 0 else 0.6999 if run.cluster.cache.drift else 0.68, 0.5, 0.25, BROKEN)

    monkeypatch.setattr(cache_auc, "_made_log", lambda *_: small)
    monkeypatch.setattr(cache_auc, "criteo_log", lambda *_: "it is not here")
    monkeypatch.setattr(cache_auc, "together", came)
    return runs


def test_it_tells_every_model_with_and_without_drift_and_the_gap(asked):
    report = BENCHES["cache_auc"](True)
    found = {result["id"]: result for result in report["results"]}
    models = [f"cache.auc.{name}" for name in cache_auc.MODELS]
    assert set(found) == {
        *(f"{model}.{what}" for model in models for what in ("s0", "s100", "s100.drift0")),
        "cache.auc_gap",
        "cache.by_size.lfu.10%",
    }
    assert found["cache.auc_gap"]["value"] == pytest.approx(0.0001) and found["cache.auc_gap"]["met"]
    assert found["cache.by_size.lfu.10%"]["value"] == 0.25
    assert f"-0.02000 to s = 0; bounds broken: {BROKEN}" in found["cache.auc.dcnv2.s100.drift0"]["note"]


def test_all_runs_are_bounded_with_rates_that_fall_to_their_end(asked, small):
    cache_auc.train(small.path, cache_auc.MODELS["deepfm"], 3, 100, 40, 32, "pinned", epochs=2, drift=0.0)
    (run,) = asked
    assert (run.policy.name, run.policy.clock, run.policy.ahead) == ("bounded", 100, 0)
    assert (run.cluster.cache.capacity, run.cluster.cache.policy, run.cluster.cache.drift) == (40, "pinned", 0.0)
    assert (run.data.seed, run.train.seed, run.train.epochs) == (3, 3, 2)
    steps = 2 * -(-small.samples("train") // (32 * cache_auc.WORKERS))
    assert run.optimizer.schedule.steps == run.tables.optimizer.schedule.steps == steps + 1


def settings(data: DataSet, clock: int, cache: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "data": {"path": str(data.path), "batch_size": 32},
        "tables": {"dim": 4, "optimizer": {"name": "rowwise_adagrad", "lr": 0.02}},
        "model": {"name": "dcnv2", "deep": [8], "layers": 1},
        "policy": {"name": "bounded", "clock": clock, "ahead": 0},
        "train": {"epochs": 2, "threads": 1},
        "cluster": {"cache": cache, **more},
    }


@pytest.mark.parametrize("clock", [0, 100])
def test_a_rank_counts_its_last_epoch_with_what_it_sends_past_the_cache(small, tmp_path, clock):
    """With room for every row: at s = 0 each update is pushed, at s = 100 a row's changes stay until they are many."""
    with ShardProcess() as shard:
        given = settings(small, clock, {"capacity": 10_000}, shards=[shard.address])
        given["output"] = {"folder": str(tmp_path / "run"), "tensorboard": False}
        said = cache_crew.main(Work(given, str(tmp_path / "checked.npz")))
    row = 8 + 4 * 4
    assert said["plain"] == 2 * row * (said["hits"] + said["misses"]), "the unique rows of one epoch"
    assert said["misses"] < said["hits"] / 10, "the first epoch brought nearly all"
    pushed = said["bytes"] > said["plain"] / 2
    assert pushed if clock == 0 else not pushed
    assert 0 < said["auc"] < 1
    with np.load(tmp_path / "checked.npz") as seen:
        assert seen["reads"].shape[1] > 0
    assert Checker.load([tmp_path / "checked.npz"], clock).violations() == 0


def test_ranks_of_a_crew_train_one_run_and_keep_the_bound(small):
    came = cache_crew.together(settings(small, 100, {"capacity": 40, "drift": 0.0}), 2, 100)
    assert 0 < came.auc < 1 and 0 < came.hit_share < 1 and came.saved < 1
    assert came.violations == 0


def test_what_ranks_said_last_is_told_when_one_fails(tmp_path):
    fine, fails = [sys.executable, "-c", "print(1)"], [sys.executable, "-c", "import sys; sys.exit('No such log.')"]
    assert cache_crew._all([fine, fine], tmp_path) == [1, 1]
    with pytest.raises(HotrowError, match=r"No such log\."):
        cache_crew._all([fine, fails], tmp_path)
    assert json.loads(Work({"a": 1}, "c").command()[-1]) == {"settings": {"a": 1}, "checked": "c"}
