"""A turn of the benchmark of policies is a run of the Trainer, on a shard of this machine."""

import json

import numpy as np
import pytest

from hotrow.bench.drawn import drawn_log
from hotrow.bench.hybrid_worker import Turn, Work, take
from hotrow.service.local import ShardProcess

BATCH, WARM, STEPS = 16, 2, 5


@pytest.fixture
def shard():
    with ShardProcess() as process:
        yield process


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, ((WARM + STEPS) * BATCH, 3))
    return drawn_log(tmp_path_factory.mktemp("drawn"), "log", keys)


def test_a_drawn_log_has_the_keys_and_the_labels_that_were_drawn(data):
    (table,) = data.flat("train")
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, (len(table), 3))
    assert np.array_equal(table.column("c2").to_numpy(), keys[:, 2])
    assert set(table.column("label").to_pylist()) == {0.0, 1.0}


@pytest.mark.parametrize(("policy", "capacity"), [("sync", None), ("exact", None), ("hybrid", None), ("hybrid", 40)])
def test_a_turn_is_a_run_that_leaves_its_rows_on_the_shard_and_no_checkpoint(shard, data, tmp_path, policy, capacity):
    turn = Turn(policy, [shard.address], str(data.path), 4, [8], BATCH, WARM, STEPS, capacity)
    said = take(turn, None, tmp_path / "run")
    assert said["samples_a_second"] == pytest.approx(STEPS * BATCH / said["seconds"])
    assert said["bytes_out"] > BATCH * 3 * 4 * 4 and {"model", "wait"} <= set(said["phases_ms"])
    assert f'name = "{policy}"' in (tmp_path / "run" / "settings.toml").read_text()
    assert not any((tmp_path / "run" / "checkpoints").glob("step*"))


def test_the_bound_of_hybrid_does_not_grow_while_it_is_measured(tmp_path):
    settings = Turn("hybrid", ["tcp://a:1"], "data", 4, [8], 16, 2, 5).settings(None, tmp_path)
    assert settings["policy"] == {"name": "hybrid", "staleness": 8, "ramp": 0}


def test_a_trainer_is_told_its_turns_as_json():
    work = Work("key", [Turn("sync", ["tcp://a:1"], "data", 4, [8], 16, 2, 5)])
    assert json.loads(work.command()[-1])["turns"][0]["policy"] == "sync"
