"""`hotrow up`: a run of real processes is the run of one process, and goes on when one of them is killed."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotrow.cli import app
from hotrow.cluster.local import LocalCluster
from hotrow.cluster.process import Command
from hotrow.cluster.status import status
from hotrow.errors import CheckpointError, HotrowError, SettingsError
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import evaluate_path
from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train
from watching import Watching

EXACT = {"model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}, "data__batch_size": 40}


class Watched(Watching, LocalCluster):
    pass


def kill(role, number, how=signal.SIGKILL):
    return lambda cluster: os.kill(getattr(cluster, role)[number].pid, how)


class Ended(Command):
    """A process that has ended with some code."""

    pid, code = 7, 0

    def __init__(self, name, code, log):
        super().__init__(name, log, print, None)
        self.code = code
        log.write_text("Starting.\nThe disk is full.\n")


def test_killed_shards_and_trainers_are_started_again_and_the_run_ends_as_it_would_have(make_run, tmp_path):
    one = make_run(**{**EXACT, "data__batch_size": 80}, train__epochs=4, output__folder=str(tmp_path / "one"))
    expected = train(one)
    run = make_run(
        **EXACT, train__epochs=4, train__checkpoint_every=6, output__folder=str(tmp_path / "many"), train__keep=9
    )
    cluster = Watched(run, [(20, kill("shards", 1)), ("Shard 1 is back", kill("trainers", 1))], shards=2, trainers=2)
    result = cluster.up()
    assert [death["who"] for death in result["deaths"]] == ["shard 1", "trainer 1"]
    assert all(death["how"] == "was ended by SIGKILL" and death["back_after"] > 0 for death in result["deaths"])
    assert (result["stopped"], result["steps"], result["samples"]) == ("end", expected.steps, expected.samples)
    assert result["metrics"]["auc"] == pytest.approx(expected.metrics["auc"], abs=1e-3)
    losses = [
        [line["loss"] for line in RunFolder(r.output.folder).lines() if line["kind"] == "train"] for r in (one, run)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert any(text.startswith("[trainer 0] ") for text in cluster.heard)
    assert any("Trainer 1" in text and "SIGKILL" in text for text in cluster.heard)
    # What the shards held is in the checkpoint, which loads in one process.
    assert evaluate_path(run.output.folder)[2]["auc"] == pytest.approx(result["metrics"]["auc"], abs=1e-6)
    said = status(run.output.folder)
    assert said["phase"] == "ended"
    assert not any(process["alive"] for process in (*said["shards"], *said["trainers"]))
    assert said["training"]["step"] == expected.steps
    assert len(said["deaths"]) == 2
    assert {path.name for path in (run.output.folder / "cluster").glob("*.log")} == {
        "shard-0.log",
        "shard-1.log",
        "trainer-0.log",
        "trainer-1.log",
    }


def test_a_run_that_is_stopped_leaves_a_checkpoint_says_its_status_and_goes_on_on_other_shards(make_run, tmp_path):
    run = make_run(**EXACT, train__epochs=60, policy={"name": "hybrid", "staleness": 4}, train__checkpoint_every=50)
    seen = []

    def look_and_stop(cluster):
        seen.append(status(run.output.folder))
        cluster.stop()

    result = Watched(run, [(8, look_and_stop)], shards=1, trainers=1).up()
    assert result["stopped_by"] == "SIGTERM"
    (said,) = seen
    assert said["phase"] == "running"
    assert all(process["alive"] for process in (*said["shards"], *said["trainers"]))
    assert said["shards"][0]["rows"] > 0
    assert said["training"]["samples_per_second"] > 0
    stopped = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest()).step
    assert stopped >= 8
    longer = make_run(**EXACT, train__epochs=60, train__steps=stopped + 5, policy={"name": "hybrid", "staleness": 4})
    result = Watched(longer, shards=3, trainers=1, resume=True).up()
    assert (result["stopped"], result["steps"]) == ("end", stopped + 5)


def test_a_trainer_that_fails_by_itself_is_not_started_again(make_run):
    run = make_run(**EXACT, optimizer={"name": "sgd", "lr": 1e30})
    cluster = Watched(run, shards=1, trainers=1)
    with pytest.raises(HotrowError, match=r"Trainer 0 ended with code 1; it said last: .*Lower the learning rates"):
        cluster.up()
    assert cluster.deaths == []
    assert all(shard.code is not None for shard in cluster.shards)


def test_a_shard_that_is_asked_to_end_is_started_again(make_run):
    run = make_run(**EXACT, train__epochs=4, train__checkpoint_every=6)
    result = Watched(run, [(8, kill("shards", 0, signal.SIGTERM))], shards=1, trainers=1).up()
    (death,) = result["deaths"]
    assert (death["who"], death["how"]) == ("shard 0", "ended with code 0")
    assert death["back_after"] > 0
    assert result["stopped"] == "end"


def test_a_shard_that_fails_by_itself_is_not_started_again(make_run, tmp_path):
    cluster = LocalCluster(make_run(), shards=1, trainers=1)
    cluster.shards = [Ended("shard 0", 1, tmp_path / "shard-0.log")]
    with pytest.raises(
        HotrowError, match=r"Shard 0 ended with code 1; it said last: The disk is full. Its log is .*shard-0.log"
    ):
        cluster._handle(cluster.shards[0])
    assert cluster.deaths == []


class KilledAtStart(Watched):
    """Its next `left` processes of a role are killed as soon as they have started."""

    role, left = "shard", 1

    def _start(self, name, *arguments):
        process = super()._start(name, *arguments)
        if name.startswith(self.role) and self.left:
            self.left -= 1
            process.send(signal.SIGKILL)
        return process


def test_a_shard_that_is_killed_while_it_starts_is_started_again_and_counted(make_run):
    def again(cluster):
        cluster.left = 1
        kill("shards", 0)(cluster)

    run = make_run(**EXACT, train__epochs=4, train__checkpoint_every=6)
    cluster = KilledAtStart(run, [(8, again)], shards=1, trainers=1)
    result = cluster.up()
    assert [death["who"] for death in result["deaths"]] == ["shard 0"] * 3
    assert all(death["how"] == "was ended by SIGKILL" and death["back_after"] > 0 for death in result["deaths"])
    assert result["stopped"] == "end"


def test_shards_that_are_killed_while_they_start_again_and_again_end_the_run(make_run):
    cluster = KilledAtStart(make_run(**EXACT), shards=1, trainers=1, deaths=1)
    cluster.left = 9
    with pytest.raises(HotrowError, match=r"2 processes died, more than --deaths 1; the run is given up"):
        cluster.up()
    assert cluster.trainers == []


def test_a_port_that_another_process_holds_is_named_with_what_to_do(make_run):
    cluster = LocalCluster(make_run(**EXACT), shards=1, trainers=1)
    cluster.folder.mkdir(parents=True)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cluster.addresses = [f"tcp://127.0.0.1:{port}"]  # as of one that died
        said = (
            rf"Shard 0 ended with code 1; it said last: .*another process holds port {port} .*End that one, or choose"
        )
        with pytest.raises(HotrowError, match=said):
            cluster._start_shard(0)
    assert cluster.deaths == []


def test_a_trainer_that_is_killed_before_it_has_begun_does_not_go_on_with_the_run_that_it_overwrites(make_run):
    train(make_run(**EXACT, train__steps=3))
    run = make_run(**EXACT, train__steps=5)
    cluster = KilledAtStart(run, shards=0, trainers=1, overwrite=True)
    cluster.role = "trainer"
    result = cluster.up()
    assert (result["steps"], result["deaths"][0]["who"]) == (5, "trainer 0")
    assert not any("Going on after step" in text for text in cluster.heard)


class StoppedWhileShardsStart(Watched):
    def _start_shard(self, number):
        super()._start_shard(number)
        signal.raise_signal(signal.SIGINT)


class StoppedWhileTrainersStart(Watched):
    def _trainer_places(self):
        signal.raise_signal(signal.SIGINT)
        return super()._trainer_places()


class StoppedWhileATrainerIsDead(Watched):
    def _trainer_died(self, trainer):
        signal.raise_signal(signal.SIGINT)
        super()._trainer_died(trainer)


@pytest.mark.parametrize(
    ("kind", "started"),
    [(StoppedWhileShardsStart, (1, 0)), (StoppedWhileTrainersStart, (2, 1)), (StoppedWhileATrainerIsDead, (2, 1))],
)
def test_a_run_that_is_stopped_while_processes_start_ends_with_them(make_run, kind, started):
    cluster = kind(make_run(**EXACT, train__epochs=60), [(8, kill("trainers", 0))], shards=2, trainers=1)
    result = cluster.up()
    assert result["stopped_by"] == "SIGINT"
    assert (len(cluster.shards), len(cluster.trainers)) == started
    assert all(process.code is not None for process in (*cluster.shards, *cluster.trainers))
    assert cluster.deaths == []
    assert status(cluster.folder.parent)["phase"] == "ended"


def test_a_folder_with_a_run_and_shards_that_run_already_are_refused(make_run):
    run = make_run(train__steps=2)
    train(run)
    with pytest.raises(SettingsError, match="already holds a run"):
        LocalCluster(run, shards=1, trainers=1)
    other = make_run(cluster={"shards": ["tcp://127.0.0.1:7700"]})
    with pytest.raises(SettingsError, match="would start others"):
        LocalCluster(other, shards=1, trainers=1, overwrite=True)
    with pytest.raises(CheckpointError, match="not started by hotrow up"):
        status(run.output.folder)


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}, {}])
def test_a_run_that_is_supervised_is_left_alone_by_another(make_run, how):
    run = make_run()
    first = LocalCluster(run, shards=1, trainers=1)
    rows = first.folder / "shard-0"
    rows.mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"is in use: this process has had it since .*another output.folder"):
        LocalCluster(run, shards=1, trainers=1, **how)
    with pytest.raises(SettingsError, match="is in use: this process has had it since"):
        train(run, **how)
    assert rows.is_dir()
    del first
    LocalCluster(run, shards=1, trainers=1, **how)


def test_the_command_says_its_status_as_json_and_as_a_table(make_run, tmp_path):
    run = make_run()
    folder = Path(run.output.folder) / "cluster"
    folder.mkdir(parents=True)
    dead = {
        "name": "shard 0",
        "pid": 2**22 + 7,
        "since": 0.0,
        "log": "x.log",
        "address": "tcp://127.0.0.1:1",
        "metrics": 1,
    }
    state = {"phase": "running", "pid": 2**22 + 7, "shards": [dead], "trainers": [], "deaths": []}
    (folder / "state.json").write_text(json.dumps(state))
    said = CliRunner().invoke(app, ["status", str(run.output.folder), "--json"])
    assert said.exit_code == 0
    assert json.loads(said.stdout)["phase"] == "abandoned"
    shown = CliRunner().invoke(app, ["status", str(run.output.folder)])
    assert "tcp://127.0.0.1:1" in shown.stdout
    assert "ended" in shown.stdout


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"phase": "ended", "pid": 1, "shards": [{}], "trainers": [], "deaths": []}']
)
def test_a_state_that_was_altered_is_said_to_be(make_run, text):
    folder = Path(make_run().output.folder) / "cluster"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state.json was altered: it cannot be read"):
        status(folder.parent)
