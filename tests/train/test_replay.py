"""A step of a run is made again bit for bit, whatever the run has done meanwhile, and the run is not changed by it."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from own_parts import Tower
from test_causes import IN_ORDER, Spoil, spoiled
from test_trainer import Interrupt, lines
from typer.testing import CliRunner

from hotrow import Hook, Trainer
from hotrow.cli import app
from hotrow.errors import CheckpointError, SettingsError
from hotrow.train.replay import replay
from hotrow.train.trainer import train
from serving import shards as served_by

EACH = {"train__log_every": 1, "train__checkpoint_every": 8, "train__keep": 9}


def files(folder):
    """All files of a run folder that are not of replays, with what is in them."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "replay" not in path.parts}


def loss_at(run, step):
    return next(line["loss"] for line in lines(run, "train") if line["step"] == step)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__evaluate_every": 3, "train__epochs": 2},
        {"policy": {"name": "exact"}},
        {"policy": {"name": "hybrid", "staleness": 3, "worst": True}, "train__evaluate_every": 5},
        {"plan": {"memory": 2000}},
        {"cluster": {"cache": {"capacity": 50}}},
        {"tables__dtype": "bfloat16", "tables__eviction": {"capacity": 40}},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [5, 21])
def test_a_step_is_made_again_bit_for_bit_and_the_run_is_left_as_it_is(make_run, changes, step):
    run = make_run(**EACH | changes)
    train(run)
    before = files(run.output.folder)
    found = replay(run.output.folder, step)
    assert files(run.output.folder) == before
    assert (found["step"], found["samples"]) == (step, 64)
    assert (found["began"] == 0) == (step == 5)  # later ones may have waited for one that was still being written
    assert found["loss"] == loss_at(run, step)
    assert (found["logged"], found["differs_at"], found["wrong"]) == (step - found["began"], None, "")
    assert json.loads((run.output.folder / "replay" / f"step-{step:08d}" / "replay.json").read_text()) == found


def test_without_a_checkpoint_before_it_all_steps_are_made_again(make_run):
    run = make_run(**EACH)
    train(run)
    shutil.rmtree(run.output.folder / "checkpoints")
    found = replay(run.output.folder, 10)
    assert (found["began"], found["loss"], found["logged"]) == (0, loss_at(run, 10), 10)
    assert "from the run's beginning" in found["notes"][0]


@pytest.mark.parametrize("policy", [{"name": "sync"}, {"name": "hybrid", "staleness": 2, "worst": True}], ids=str)
def test_a_step_of_a_run_that_was_stopped_and_resumed(make_run, policy):
    run = make_run(**EACH, policy=policy)
    train(run, progress=Interrupt(11))
    train(run, resume=True)
    for step in (11, 12, 15):
        assert replay(run.output.folder, step)["loss"] == loss_at(run, step)


class Killed(BaseException):
    """Ends a run where it stands."""


class Die(Hook):
    def step(self, trainer, event):
        if event.step == 14:
            raise Killed


def test_a_step_of_a_run_that_was_killed_and_one_that_it_had_not_come_to(make_run):
    run = make_run(**EACH)
    with pytest.raises(Killed), Trainer(run, hooks=[Die()]) as trainer:
        trainer.fit()
    assert lines(run, "train")[-1]["step"] == 13
    assert replay(run.output.folder, 13)["loss"] == loss_at(run, 13)
    ahead = replay(run.output.folder, 20)["loss"]
    train(run, resume=True)
    assert loss_at(run, 20) == ahead


def test_rows_of_shards_are_brought_here(make_run):
    with served_by(2) as addresses:
        run = make_run(**EACH, cluster={"shards": addresses})
        train(run)
    assert replay(run.output.folder, 13)["loss"] == loss_at(run, 13)


def test_the_batch_is_written_as_it_went_into_the_step(make_run, tmp_path):
    run = make_run(**EACH, data__shuffle=False)
    train(run)
    found = replay(run.output.folder, 3, out=tmp_path / "step")
    table = pq.read_table(tmp_path / "step" / "batch.parquet")
    with Trainer(run.model_copy(update={"output": run.output.model_copy(update={"folder": tmp_path / "b"})})) as t:
        batches = []
        for ready in t.pipeline():
            batches.append(ready.batch)
            t.step(ready)
    batch = batches[2].expand()
    assert table["click"].to_pylist() == batch.labels.tolist()
    assert table["price"].to_pylist() == batch.dense[:, 0].tolist()
    assert [key for keys in table["history"].to_pylist() for key in keys] == batch["history"].values.tolist()
    assert {row["table"]: row["rows"] for row in found["rows"]}["user"] == len(batch["user"].values.unique())
    assert all(row["largest"][0]["norm"] > 0 for row in found["rows"])
    assert found["gradients"][0]["weight"] == "dense_weights.weight"
    assert {g["feature"] for g in found["features"]} == {"user", "item", "history"}


def test_the_first_step_that_is_not_finite_is_the_one_that_is_shown(make_run, with_nan_price):
    run = make_run(**IN_ORDER, data__path=str(with_nan_price))
    spoiled(run, hooks=[Spoil(0, None)])
    for step in (4, 6):
        found = replay(run.output.folder, step)
        assert (found["step"], found["loss"]) == (4, None)
        assert found["wrong"].startswith("Step 4: The loss is nan. Dense column price is not finite in sample 8")


def test_the_command_says_what_it_found(make_run, data):
    run = make_run(**EACH)
    train(run)
    folder = str(run.output.folder)
    shown = CliRunner().invoke(app, ["replay", folder, "--step", "9"]).output
    assert "the same at" in shown and "deep.0.weight" in shown
    again = CliRunner().invoke(app, ["replay", folder, "--step", "9", "--overwrite", "--json"])
    assert json.loads(again.stdout)["loss"] == loss_at(run, 9)


def test_a_step_that_cannot_be_made_again_is_a_sentence(make_run, tmp_path):
    run = make_run(train__steps=6)
    result = train(run)
    folder = run.output.folder
    for step, said in ((0, "counted from 1"), (-3, "counted from 1"), (7, "has steps 1 to 6")):
        with pytest.raises(SettingsError, match=said):
            replay(folder, step)
    with pytest.raises(SettingsError, match="give the run folder"):
        replay(result.checkpoint, 3)
    with pytest.raises(CheckpointError, match="no run folder"):
        replay(tmp_path / "nothing", 3)
    replay(folder, 3)
    with pytest.raises(SettingsError, match="is there already"):
        replay(folder, 3)


def test_what_several_made_or_what_is_read_once_is_refused(make_run, tmp_path, monkeypatch):
    folder = make_run(train__steps=2).output.folder
    folder.mkdir()

    def refused(said, **changes):
        (folder / "settings.toml").write_text(make_run(train__steps=2, **changes).to_toml())
        with pytest.raises(SettingsError, match=said):
            replay(folder, 1)

    refused("read once", data__follow={"path": str(tmp_path)})
    refused("bfloat16, which rounds", cluster={"shards": ["tcp://127.0.0.1:7"], "wire": "bfloat16"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    refused("several ranks together")


def test_a_class_of_ones_own_is_imported_only_if_it_is_trusted(make_run):
    run = make_run(train__steps=4, train__log_every=1, model={"width": 4})
    with Trainer(run, model=Tower) as trainer:
        trainer.fit()
    with pytest.raises(SettingsError, match=r"own_parts:Tower.*--trust-model"):
        replay(run.output.folder, 2)
    assert replay(run.output.folder, 2, trust_model=True)["loss"] == loss_at(run, 2)
