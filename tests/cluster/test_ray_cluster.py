"""`hotrow up --cluster ray`: the same run on hosts that Ray holds, through the death of actors; and what it refuses."""

import os
import signal
import sys

import pytest
from typer.testing import CliRunner

from hotrow.cli import app
from hotrow.cluster.local import environments
from hotrow.cluster.ray_cluster import RayCluster
from hotrow.cluster.ray_host import Host
from hotrow.cluster.ray_room import Needs, resources_text
from hotrow.cluster.status import status
from hotrow.errors import ServiceError, SettingsError
from hotrow.report.report import report
from hotrow.run import Run, load_run
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train
from hotrow.world import World
from test_pages import ROOT, run_page
from watching import Watching

EXACT = {"model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}, "data__batch_size": 40}
HALF = {"shard_needs": Needs(cpus=0.5), "trainer_needs": Needs(cpus=0.5)}


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'hotrow[ray]'")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


class Watched(Watching, RayCluster):
    pass


class Apart(Watched):
    """A cluster that is treated as if its hosts were several."""

    def _on_one_host(self, ray):
        return False


def kill_actor(role, number):
    def kill(cluster):
        os.kill(cluster._seats[role][number].where["pid"], signal.SIGKILL)

    return kill


def move_shard(cluster):
    """As if Ray had found the shard a place on another host: its address and its rows are gone."""
    cluster._homes[0] = ("another node", cluster._homes[0][1])
    os.kill(cluster.shards[0].pid, signal.SIGKILL)


def losses(run):
    return [line["loss"] for line in RunFolder(run.output.folder).lines() if line["kind"] == "train"]


def test_actors_killed_are_started_again_by_ray_and_the_run_ends_as_one_process_would(ray, make_run, tmp_path):
    one = make_run(**{**EXACT, "data__batch_size": 80}, train__epochs=4, output__folder=str(tmp_path / "one"))
    expected = train(one)
    run = make_run(**EXACT, train__epochs=4, train__checkpoint_every=6, output__folder=str(tmp_path / "many"))
    seen = []
    cluster = Apart(
        run,
        [
            (4, lambda cluster: seen.append(status(run.output.folder))),
            (8, kill_actor("shard", 0)),
            ("Shard 0 is back", kill_actor("trainer", 1)),
            ("Trainer 1 is back", move_shard),
        ],
        shards=1,
        trainers=2,
        shard_folder=tmp_path / "rows",
        **HALF,
    )
    result = cluster.up()
    assert [death["who"] for death in result["deaths"]] == ["shard 0", "trainer 1", "shard 0"]
    assert all("lost with its actor" in death["how"] for death in result["deaths"][:2])
    assert result["deaths"][2]["how"] == "was ended by SIGKILL"
    assert all(death["back_after"] > 0 for death in result["deaths"])
    assert any("Shard 0 is on another host now" in text for text in cluster.heard)
    assert (result["stopped"], result["steps"], result["samples"]) == ("end", expected.steps, expected.samples)
    assert losses(run) == pytest.approx(losses(one), rel=1e-3)
    assert result["metrics"]["auc"] == pytest.approx(expected.metrics["auc"], abs=1e-3)
    (said,) = seen
    assert said["phase"] == "running"
    assert [process["name"] for process in said["shards"] + said["trainers"]] == ["shard 0", "trainer 0", "trainer 1"]
    assert all(process["alive"] and process["host"] for process in said["shards"] + said["trainers"])
    assert said["shards"][0]["rows"] > 0
    assert said["shards"][0]["host"] in said["shards"][0]["address"]
    said = status(run.output.folder)
    assert said["phase"] == "ended"
    assert not any(process["alive"] for process in said["shards"] + said["trainers"])
    assert {path.name for path in cluster.folder.glob("*.log")} == {"shard-0.log", "trainer-0.log", "trainer-1.log"}
    (left,) = (tmp_path / "rows").iterdir()  # as on a host that is lost
    assert left.name.endswith("-shard-0")
    assert not any("secret" in path.read_text() for path in cluster.folder.iterdir())
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}


def test_a_run_on_one_host_talks_over_loopback_and_is_stopped_with_a_checkpoint(ray, make_run):
    run = make_run(**EXACT, train__epochs=60)
    cluster = Watched(run, [(8, lambda cluster: cluster.stop())], shards=1, trainers=1, **HALF)
    result = cluster.up()
    assert result["stopped_by"] == "SIGTERM"
    assert result["steps"] >= 8
    assert Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest()).step == result["steps"]
    assert cluster.addresses[0].startswith("tcp://127.0.0.1:")


def test_a_model_of_ones_own_is_found_by_its_trainer_whose_host_must_see_its_module(
    ray, make_run, tmp_path, monkeypatch
):
    model = {"name": "own_parts:Tower", "folder": str(ROOT / "tests" / "train"), "width": 4}
    (tmp_path / "run.toml").write_text(make_run(model=model, train__steps=4, policy={"name": "hybrid"}).to_toml())
    run = load_run(tmp_path / "run.toml")
    assert run.sources == [ROOT / "tests" / "train" / "own_parts.py"]
    result = RayCluster(run, shards=1, trainers=1, **HALF).up()
    assert (result["stopped"], result["steps"]) == ("end", 4)
    monkeypatch.setattr(Run, "sources", [tmp_path / "moved.py"])
    with pytest.raises(SettingsError, match=r"Trainer 0 on host .* does not see .*moved\.py.*your own modules"):
        RayCluster(run, shards=0, trainers=1, overwrite=True, **HALF).up()


def test_the_example_runs_and_its_report_has_what_a_cluster_measures(ray, tmp_path, monkeypatch):
    run_page(ROOT / "examples/ray_cluster/README.md", tmp_path, monkeypatch)
    page = report([tmp_path / "examples/ray_cluster/run"])
    assert [section.id for section in page.sections if section.missing] == []
    assert {"step-beside", "staleness", "traffic", "memory-process", "factor"} <= {plot.id for plot in page.plots}


def test_a_cluster_without_room_says_what_was_asked_and_what_there_is(ray, make_run):
    needs = {"trainer_needs": Needs(cpus=1.0, gpus=8.0), "shard_needs": Needs(cpus=0.5)}
    cluster = RayCluster(make_run(), shards=1, trainers=2, wait=0.2, **needs)
    with pytest.raises(ServiceError, match=r"2 trainers with 1 CPU and 8 GPUs each, after 0.2 s.*has 2 CPUs.*1 host;"):
        cluster.up()
    assert status(cluster.folder.parent)["phase"] == "ended"


def test_hosts_that_do_not_see_the_run_folder_or_the_data_set_are_refused(ray, make_run, tmp_path, monkeypatch):
    run = make_run(data__path=str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match=r"Trainer 0 on host .* does not see .*nowhere.*all hosts share"):
        RayCluster(run, shards=0, trainers=1, **HALF).up()
    token = tmp_path / "run" / "token"
    token.write_text("another run's")
    assert Host().sees(token, "this run's", []) == [str(token.parent)]
    assert Host().sees(tmp_path / "none", "", [tmp_path]) == [str(tmp_path)]
    token.write_text("this run's")
    assert Host().sees(token, "this run's", [tmp_path]) == []


def test_a_cluster_that_cannot_be_reached_and_ray_that_is_not_there_are_sentences(make_run, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'hotrow[ray]'")

    def refuse(*_, **__):
        raise ConnectionError("ray client connection timeout\nand more")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ServiceError, match=r"at ray://head:1 cannot be reached: ray client connection timeout\. An"):
        RayCluster(make_run(), address="ray://head:1", shards=1, trainers=1).up()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"needs Ray. Install it with: pip install 'hotrow\[ray\]'"):
        RayCluster(make_run(), shards=1, trainers=1, overwrite=True).up()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "k8s"], '--cluster "k8s": there is "local"'),
        (["--cluster", "ray://head"], "--cluster ray://head: the port is missing"),
        (["--cluster", "local", "--trainer-gpus", "1"], "--trainer-gpus is for --cluster ray"),
        (["--cluster", "ray", "--shard-memory", "much"], '"much" is not a shard\'s memory'),
        (["--cluster", "ray", "--shard-folder", "rows"], "--shard-folder rows: give a path from the root"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(make_run, tmp_path, options, said):
    (tmp_path / "run.toml").write_text(make_run().to_toml())
    result = CliRunner().invoke(app, ["up", str(tmp_path / "run.toml"), *options])
    assert isinstance(result.exception, SettingsError)
    assert said in str(result.exception)


def test_ranks_of_a_host_are_a_node_where_hosts_have_equally_many():
    even = [World.here(place) for place in environments("a", 1, ["x", "x", "y", "y"])]
    assert [(world.node, world.node_rank) for world in even] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    uneven = [World.here(place) for place in environments("a", 1, ["x", "x", "y"])]
    assert [(world.node, world.node_rank, world.size) for world in uneven] == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]


def test_resources_are_said_as_people_say_them():
    assert resources_text({"CPU": 1.0, "GPU": 2.0, "memory": 1 << 30}) == "1 CPU, 2 GPUs and 1.0 GiB of memory"
    assert resources_text({"CPU": 0.5, "node:x": 1.0}) == "0.5 CPUs"
    assert resources_text({}) == "nothing"
