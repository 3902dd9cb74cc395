"""Each model trains with each setting of `[train]`, and the setting does what it says.

Compiled models are traced and differentiated here, but PyTorch's own kernels run them: generating code takes a minute a
model, which HOTROW_SLOW=1 does for DLRM. Tracing takes seconds a model: two models always, all with HOTROW_SLOW=1.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from hotrow.data import DataSet, prepare
from hotrow.data.graph import Graph
from hotrow.data.synth import SynthSettings, write_log
from hotrow.run import EarlyStopping, Run, Train
from hotrow.settings import parse
from hotrow.train.evaluate import evaluate_path
from hotrow.train.logs import RunFolder
from hotrow.train.progress import Progress
from hotrow.train.trainer import train

MODELS = {
    "dlrm": {"bottom": [6], "top": [8]},
    "dcnv2": {"deep": [8], "layers": 2},
    "deepfm": {"deep": [8], "dropout": 0.1},
    "wide_deep": {"deep": [8], "dropout": 0.1},
    "din": {"attention": 6, "deep": [8]},
    "transformer": {"layers": 2, "deep": [8], "dropout": 0.1},
    "graph": {"width": 4, "deep": [8]},
}
EPOCH = 6
"""Steps of an epoch, the last with fewer samples."""
CHANGES = {
    "plain": {},
    "precision": {"precision": "bf16"},
    "compile": {"compile": True},
    "compile in bf16": {"compile": True, "precision": "bf16"},
    "epochs on two threads": {"epochs": 2, "threads": 2, "seed": 5},
    "stopping": {"early_stopping": {"patience": 1, "min_delta": 1.0}, "evaluate_every": 2},
    "accumulated": {"accumulate": 2},
    "checkpoints": {"checkpoint_every": 1, "incremental": 2, "keep": 3, "steps": 5, "log_every": 1},
}


class Sayings(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with every form of feature, deduplicated, and the graph of its users and items."""
    folder = tmp_path_factory.mktemp("log")
    settings = SynthSettings(
        samples=500, users=30, items=25, history_length=6, past=6, vocabulary=10, contexts=1, slow=1, dense=2
    )
    write_log(settings, folder / "log")
    prepare(folder / "log", folder / "data", split="samples:350", validation=0)
    Graph.of_data_set(DataSet.open(folder / "data")).save(folder / "pairs.graph")
    return folder


def run_of(log: Path, folder: Path, model: str, **settings: object) -> Run:
    graph = {"name": "neighbours", "graph": str(log / "pairs.graph"), "fan_outs": [3, 2]}
    run = {
        "data": {"path": str(log / "data"), "batch_size": 64, "steps": [graph] if model == "graph" else []},
        "tables": {"dim": 4, "optimizer": {"lr": 0.05}},
        "model": {"name": model, **MODELS[model]},
        "train": {"threads": 1, **settings},
        "output": {"folder": str(folder), "tensorboard": False},
    }
    return parse(Run, run)


def trained(run: Run) -> tuple[Any, list[str]]:
    progress = Sayings()
    return train(run, progress=progress), progress.said


TRACED = """
import functools, json, sys, tomllib
import torch
from hotrow.run import Run
from hotrow.settings import parse
from train.test_models_and_settings import trained

torch.compile = functools.partial(torch.compile, backend="aot_eager")
result, said = trained(parse(Run, tomllib.loads(sys.stdin.read())))
print(json.dumps([result.stopped, result.steps, result.metrics, said]))
"""


def traced(run: Run) -> tuple[Any, list[str]]:
    """The same in a process of its own, for what other tests compiled stays in a process, and PyTorch trips over it."""
    made = subprocess.run(
        [sys.executable, "-c", TRACED],
        input=run.to_toml(),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert made.returncode == 0, made.stderr
    stopped, steps, metrics, said = json.loads(made.stdout.splitlines()[-1])
    return SimpleNamespace(stopped=stopped, steps=steps, metrics=metrics), said


def test_every_setting_of_train_is_tried() -> None:
    tried = {name for change in CHANGES.values() for name in change}
    # tests/kernels try a device that is not the CPU, and test_warm_start.py a run that begins with another's
    assert tried | {"device", "warm_start"} == set(Train.model_fields)
    assert {"patience", "min_delta", "metric"} == set(EarlyStopping.model_fields)


def cases() -> Iterator[ParameterSet]:
    for model in MODELS:
        for change, settings in CHANGES.items():
            quick = "compile" not in settings or (change == "compile" and model in ("dlrm", "din"))
            yield pytest.param(model, change, marks=() if quick else pytest.mark.slow, id=f"{model}-{change}")


@pytest.mark.parametrize(("model", "change"), list(cases()))
def test_a_model_trains_with_a_setting(log: Path, tmp_path: Path, model: str, change: str) -> None:
    changes = CHANGES[change]
    run = run_of(log, tmp_path / "run", model, **changes)
    result, said = traced(run) if "compile" in changes else trained(run)
    assert not any("compile" in sentence for sentence in said), said
    stopped, steps = {"stopping": ("early", 4), "checkpoints": ("end", 5), "accumulated": ("end", 3)}.get(
        change, ("end", EPOCH * run.train.epochs)
    )
    assert (result.stopped, result.steps) == (stopped, steps)
    _, _, metrics = evaluate_path(tmp_path / "run")
    assert metrics["log_loss"] == pytest.approx(result.metrics["log_loss"], abs=2e-3)
    if change == "checkpoints":  # one is due while another is written, and then waits
        assert len(list(RunFolder(tmp_path / "run").checkpoints.iterdir())) >= 2
    if "precision" in changes or "compile" in changes:
        plain, _ = trained(run_of(log, tmp_path / "plain", model))
        assert result.metrics["log_loss"] == pytest.approx(plain.metrics["log_loss"], abs=2e-2)
        if "precision" not in changes and not MODELS[model].get("dropout"):
            assert result.metrics["log_loss"] == pytest.approx(plain.metrics["log_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_compiled_dlrm_trains_as_one_that_is_not(log: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    compiled, said = trained(run_of(log, tmp_path / "compiled", "dlrm", compile=True))
    plain, _ = trained(run_of(log, tmp_path / "plain", "dlrm"))
    assert not any("compile" in sentence for sentence in said), said
    assert compiled.metrics["log_loss"] == pytest.approx(plain.metrics["log_loss"], abs=1e-5)


def test_trying_to_compile_moves_no_running_mean(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIN's statistics move with each forward in training mode; a compiler that fails must not add one."""

    def no_compiler(model: torch.nn.Module) -> object:
        def fail(*inputs: object) -> None:
            model(*inputs)
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    tried, said = trained(run_of(log, tmp_path / "tried", "din", compile=True))
    plain, _ = trained(run_of(log, tmp_path / "plain", "din"))
    assert any("no compiler here" in sentence for sentence in said)
    assert tried.metrics == plain.metrics
