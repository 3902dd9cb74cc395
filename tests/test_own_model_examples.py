"""examples/own_model: a model of one's own is trained, killed, resumed, spread over shards, measured and shown like
any built-in one."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from hotrow import Predictor
from hotrow.cli import app
from hotrow.data import DataSet
from hotrow.run import load_run
from hotrow.train.logs import RunFolder
from train.conftest import same_weights  # noqa: F401
from train.test_ranks import Processes

EXAMPLES = Path(__file__).parents[1] / "examples" / "own_model"
FEW = ["train.threads=1", "train.log_every=5", "output.tensorboard=false"]
MODELS = {
    "two_tower": ("recall@10", 0.03, "recall@10"),
    "next_item": ("recall@10", 0.03, "recall@10"),
    "multi_task": ("buy.auc", 0.65, "buy AUC"),
}
"""Of each model a metric, what one that has learned nothing stays below, and what a report calls it."""

# Kills itself once it has made so many steps, of which the checkpoints due are written.
KILLED = """
import os, signal, sys
from hotrow import Trainer
whole, last = Trainer.step, int(sys.argv.pop(1))
def step(trainer, ready):
    if trainer.state.step == last:
        trainer.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(trainer, ready)
Trainer.step = step
from hotrow.cli import main
main()
"""


def settings(*given):
    return [word for one in (*FEW, *given) for word in ("--set", one)]


def hotrow(*arguments):
    """Runs a command in this process; what it gives as JSON."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, f"{arguments}: {result.output} {result.exception!r}"
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the example with its logs prepared, small."""
    folder = tmp_path_factory.mktemp("own") / "own_model"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("runs", "data", "shop", "__pycache__", "*.csv"))
    for script, log in (("make_log.py", "ratings.csv"), ("make_shop.py", "shop.parquet")):
        subprocess.run([sys.executable, folder / script, folder / log, "--events", "12000"], check=True)
    hotrow("prepare", folder / "ratings.csv", folder / "data")
    hotrow("prepare", folder / "shop.parquet", folder / "shop", "--schema", folder / "shop.toml", "--split", "last:0.2")
    return folder


@pytest.fixture(scope="module")
def trained(place):
    """Trains an example once, by its run file; the result."""
    found = {}

    def train(name):
        if name not in found:
            found[name] = hotrow("train", place / f"{name}.toml", *settings("train.epochs=1"))
        return found[name]

    return train


def samples(folder):
    """Columns of some samples of a data set."""
    dataset = DataSet.open(folder)
    table = next(dataset.flat("test")).slice(0, 40)
    return {name: table[name].to_pylist() for name in table.column_names}


@pytest.mark.parametrize("name", MODELS)
def test_each_has_fewer_than_150_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_and_is_evaluated_asked_and_reported_on(place, trained, tmp_path, name):
    result, (metric, least, words) = trained(name), MODELS[name]
    assert result["metrics"][metric] > least
    folder, run = place / "runs" / name, load_run(place / f"{name}.toml")
    found = hotrow("evaluate", folder, "--trust-model")["metrics"]
    assert found[metric] == pytest.approx(result["metrics"][metric], abs=1e-6)
    hotrow("predict", folder, run.data.path, "--out", tmp_path / "scores.parquet", "--trust-model")
    assert pq.read_metadata(tmp_path / "scores.parquet").num_rows == DataSet.open(run.data.path).samples("test")
    hotrow("report", folder, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert words in page and run.model.name in page


@pytest.mark.parametrize("name", MODELS)
def test_its_dense_part_is_exported(place, trained, tmp_path, name):
    trained(name)
    columns = samples(load_run(place / f"{name}.toml").data.path)
    with Predictor(place / "runs" / name, trust_model=True) as predictor:
        program = torch.export.load(predictor.export(tmp_path / "dense.pt2")).module()
        for some in (columns, {column: values[3:20] for column, values in columns.items()}):
            torch.testing.assert_close(program(predictor.inputs(some)), predictor.outputs(some), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_killed_and_resumed_it_ends_with_the_same_bits(place, tmp_path, same_weights, name):  # noqa: F811
    run_file = place / f"{name}.toml"
    runs = {}
    for how in ("whole", "killed"):
        given = settings("train.steps=12", "train.checkpoint_every=4", f'output.folder="{tmp_path / how}"')
        if how == "killed":
            command = [sys.executable, "-c", KILLED, "10", "train", str(run_file), *given]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr
            given.append("--resume")
        hotrow("train", run_file, *given)
        runs[how] = RunFolder(tmp_path / how).run().trusted()
    same_weights(*runs.values())
    ends = [[line for line in RunFolder(tmp_path / how).lines() if line["kind"] == "evaluate"][-1] for how in runs]
    assert ends[0]["step"] == ends[1]["step"] == 12
    metric = MODELS[name][0]
    assert ends[0][metric] == ends[1][metric]


# An example's class that kills its process in the midst of training, once in the life of a run.
DYING = """
import os, signal, torch
from {module} import {base} as Base

class Dying(Base):
    calls = 0

    def {method}(self, rows, dense):
        if self.training and torch.is_grad_enabled():
            Dying.calls += 1
            if Dying.calls == 9:
                try:
                    open({marker!r}, "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
        return super().{method}(rows, dense)
"""


def spread(place, tmp_path, name, trainers):
    """Trains on two shards under the policy hybrid, one trainer killed on the way."""
    module, _, base = load_run(place / f"{name}.toml").model.name.partition(":")
    method = "forward" if name == "multi_task" else "item_vectors"
    dying, marker = f"dying_{name}_{trainers}", str(tmp_path / "died")
    (place / f"{dying}.py").write_text(DYING.format(module=module, base=base, method=method, marker=marker))
    given = settings(
        f'model.name="{dying}:Dying"',
        'policy.name="hybrid"',
        "policy.staleness=2",
        "policy.ramp=0",
        "train.steps=12",
        "train.checkpoint_every=4",
        f'output.folder="{tmp_path / "up"}"',
    )
    result = hotrow("up", place / f"{name}.toml", "--shards", 2, "--trainers", trainers, *given)
    assert (result["stopped"], result["steps"]) == ("end", 12)
    assert [death["how"] for death in result["deaths"]] == ["was ended by SIGKILL"]
    found = hotrow("evaluate", tmp_path / "up", "--trust-model")["metrics"]
    metric = MODELS[name][0]
    assert found[metric] == pytest.approx(result["metrics"][metric], abs=1e-6)


def test_it_is_trained_on_shards_under_hybrid_and_goes_on_after_a_trainer_was_killed(place, tmp_path):
    spread(place, tmp_path, "multi_task", 1)


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_each_is_trained_on_shards_under_hybrid_and_goes_on_after_a_trainer_was_killed(place, tmp_path, name, trainers):
    spread(place, tmp_path, name, trainers)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_is_trained_by_ranks_that_own_the_rows(place, tmp_path, name):
    given = settings("train.steps=6", f'output.folder="{tmp_path / "ranks"}"')
    said = Processes(place / f"{name}.toml", 2, *given).ended()
    result = json.loads(said[0][0])
    assert result["steps"] == 6 and MODELS[name][0] in result["metrics"]
