"""No setting of the run file is accepted and ignored: each has a line here that shows what changing it changes.

`WALK` names every field of every settings model that a run file reaches: what a run starts from, and one value that is
not the same. A small run is made with both. What came of them must differ, or the second is refused. A new setting
without a line fails the test, and so does a line whose setting is gone.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from hotrow import Predictor, _native
from hotrow.data import DataSet, DataSetWriter
from hotrow.data.graph import Graph
from hotrow.errors import HotrowError, SettingsError
from hotrow.plan import Plan, Share
from hotrow.run import Run, Tables, TableSection
from hotrow.scores import write_scores
from hotrow.service.shard import Shard
from hotrow.settings import Settings, parse
from hotrow.train import evaluate, policies
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.logs import RunFolder
from hotrow.train.progress import Progress
from hotrow.train.trainer import train
from settings_walk import WALK, Shown, Walk
from train.conftest import SCHEMA, samples

TESTS = Path(__file__).parents[1]


def settings_of(model: type[Settings] = Run, seen: set[Any] | None = None) -> Iterator[str]:
    """Every field that a run file reaches, as "Class.field", but sections that are only there to hold others."""
    seen = {model} if seen is None else seen
    below = [f for name, f in model.model_fields.items() if not _is_tag(name, f)]
    annotations = [f.annotation for f in below] + list(_extra(model))
    for name, field in model.model_fields.items():
        if not _is_tag(name, field) and not _is_section(field.annotation):
            yield f"{model.__name__}.{name}"
    for annotation in annotations:
        for inner in _models_in(annotation):
            if inner not in seen:
                seen.add(inner)
                yield from settings_of(inner, seen)


def _is_tag(name: str, field: Any) -> bool:
    return name == "name" and field.default is not None and len(get_args(field.annotation)) == 1


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _extra(model: type[Settings]) -> Iterator[Any]:
    """What a model's sections of any name are."""
    if model is Tables:
        yield TableSection


def _models_in(annotation: Any) -> list[type[Settings]]:
    if _is_section(annotation):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models_in(a)]


def test_every_setting_has_a_line_here():
    known = set(settings_of())
    assert known == set(WALK), (known - set(WALK), set(WALK) - known)


@pytest.fixture(scope="module")
def place(write_log, tmp_path_factory):
    """A folder with all that the walk's settings name."""
    folder = tmp_path_factory.mktemp("walk")
    for name, seed in (("data", 1), ("other", 5)):
        with DataSetWriter(folder / name, SCHEMA, row_group=256) as writer:
            writer.write("train", samples(1000, seed))
            writer.write("test", samples(100, seed + 1))
    data = DataSet.open(folder / "data")
    Graph.of_data_set(data).save(folder / "clicks.graph")
    Graph.of_data_set(data, "test").save(folder / "fewer.graph")
    keys = np.unique(samples(1000, 1)["item"].to_numpy())
    for name, hot in (("some", keys[:10]), ("other", keys[:20])):
        Plan({"user": (Share("host"),), "item": (Share("device", hot), Share("host"))}).save(folder / f"{name}.plan")
    for name, seed in (("incoming", 9), ("elsewhere", 10), ("bad", 11), ("two", 12)):
        (folder / name).mkdir()
        log = samples(150, seed)
        if name == "bad":
            log = log.set_column(0, "click", [[3.0] + [0.0] * 149])
        pq.write_table(log, folder / name / "a.parquet")
    pq.write_table(samples(100, 13), folder / "two" / "b.parquet")
    (folder / "columns.toml").write_text('label = "clicked"\n[[features]]\nname = "user"\n')
    with Shard("tcp://127.0.0.1:*") as shard:
        yield folder, shard.address


def as_run(place, settings: dict[str, Any], folder: Path) -> Run:
    """A run of the walk's small data set with settings given by their dotted names."""
    here, address = place
    data: dict[str, Any] = {
        "data": {"path": "data", "batch_size": 200},
        "tables": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.05}},
        "model": {"name": "wide_deep", "deep": [8]},
        "train": {"threads": 1, "steps": 4, "log_every": 1},
        "output": {"folder": "run", "tensorboard": False},
    }
    for name, value in copy.deepcopy(settings).items():
        *sections, last = name.split(".")
        at = data
        for section in sections:
            at = at.setdefault(section, {})
        if isinstance(value, dict) and isinstance(at.get(last), dict) and "name" not in value:
            value = {**at[last], **value}
        at[last] = value
    text = json.dumps(data).replace('"a shard"', json.dumps(address))
    data = json.loads(text)
    data["output"]["folder"] = str(folder / data["output"]["folder"])
    data["data"]["path"] = str(here / data["data"]["path"])
    for section, name in (
        (data["data"].get("follow"), "path"),
        (data["data"].get("follow"), "columns"),
        (data.get("plan"), "path"),
        *((s, "graph") for s in data["data"].get("steps", ())),
    ):
        if section and name in section:
            section[name] = str(here / section[name])
    return parse(Run, data)


class Heard(Progress):
    """Keeps what a run says without numbers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(re.sub(r"[\d.]+", "", sentence))


class Clock:
    """A clock on which only what is slept passes."""

    def __init__(self, calls: list[Any]) -> None:
        self._now, self._calls = 0.0, calls

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._calls.append(("sleep", seconds))


def outcome(run: Run, see: str, folder: Path) -> Any:
    """What came of a run, as far as it is the same whenever it is made."""
    heard = Heard()
    try:
        with ExitStack() as stack:
            calls = _calls(stack) if see == "calls" else []
            result = train(run, overwrite=True, progress=heard)
    except HotrowError as error:
        return type(error).__name__, str(error)
    if see == "said":
        return sorted(heard.said), sorted(path.name for path in run.output.folder.iterdir())
    if see == "calls":
        return result.steps, calls
    lines = list(RunFolder(run.output.folder).lines())
    kept = [{k: v for k, v in line.items() if "second" not in k and k != "stopped_training_for"} for line in lines
            if line["kind"] not in ("machine", "tier", "checkpoint", "staleness")]  # fmt: skip
    here = run.policy.name == "sync"  # else rows of coming batches may be there already, or not yet
    held = [(line["table_rows"], line["table_bytes"]) for line in lines if line["kind"] == "machine" and here]
    tiers = sorted({line["tier"] for line in lines if line["kind"] == "tier"})
    ended = (result.stopped, result.steps, result.samples, result.metrics, result.best_step)
    if see == "files":
        found = [Checkpoint(path) for path in Checkpoints(run.output.folder / "checkpoints").all()]
        best = Checkpoint(result.checkpoint).state["best"]
        incremental = bool(Checkpoint(result.checkpoint).manifest.get("base"))
        return ended, min(len(found), 2), best, incremental, str(run.output.folder.relative_to(folder))
    checkpoints = sum(line["kind"] == "checkpoint" for line in lines) > 1 if run.data.follow is not None else False
    return json.dumps([ended, kept, held, tiers, checkpoints], default=str)


def _calls(stack: ExitStack) -> list[Any]:
    """Records how what is only quicker or slower is called."""
    calls: list[Any] = []

    def watch(owner: Any, name: str, names: tuple[str, ...] = ()) -> None:
        before = getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> Any:
            plain = (v for v in arguments if isinstance(v, (int, float)))
            calls.append((name, *plain, *(f"{n}={named.get(n)}" for n in names)))
            return before(*arguments, **named)

        stack.enter_context(mock.patch.object(owner, name, called))

    ahead = ("ahead", "told", "lead", "staleness", "ramp", "worst")
    for pipeline in ("Pipeline", "HybridPipeline", "ExactPipeline"):
        watch(policies, pipeline, ahead)
    watch(evaluate, "Pipeline", ahead)
    watch(torch, "set_num_threads")
    watch(_native, "Cache", ("capacity", "keep", "popular", "bound"))
    stack.enter_context(mock.patch.object(torch, "compile", lambda model: calls.append("compile") or model))
    stack.enter_context(mock.patch("hotrow.train.follow.time", Clock(calls)))
    return calls


def differing(one: Any, two: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The settings in which two runs differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        for name in one.keys() | two.keys():
            yield from differing(one.get(name), two.get(name), (*path, name))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for a, b in zip(one, two, strict=True):
            yield from differing(a, b, path)
    elif one != two:
        yield path


@pytest.mark.parametrize("setting", [name for name, walk in WALK.items() if isinstance(walk, Walk)])
def test_changing_a_setting_changes_what_happens_or_is_refused(place, tmp_path, setting):
    walk, name = WALK[setting], setting.partition(".")[2]
    before = as_run(place, walk.base, tmp_path)
    first = outcome(before, walk.see, tmp_path)
    try:
        after = as_run(place, {**walk.base, **walk.change}, tmp_path)
    except SettingsError as error:
        assert name in str(error)
        return
    changed = list(differing(before.model_dump(mode="json"), after.model_dump(mode="json")))
    assert changed and all(name in path for path in changed), "the walk changes this setting alone"
    second = outcome(after, walk.see, tmp_path)
    assert second != first, f"{setting} changes nothing that is seen"
    assert outcome(before, walk.see, tmp_path) == first, "and what is seen is not chance"


@pytest.mark.parametrize("setting", [name for name, walk in WALK.items() if isinstance(walk, Shown)])
def test_a_setting_of_several_ranks_is_shown_where_there_are_some(setting):
    shown = WALK[setting]
    assert f"def {shown.test}(" in (TESTS / shown.file).read_text()


def test_a_data_set_is_scored_with_the_neighbours_that_evaluation_draws(place, tmp_path):
    run = as_run(place, {**WALK["GraphSettings.width"].base, "data.seed": 3}, tmp_path)
    result = train(run)
    with Predictor(run.output.folder) as predictor:
        write_scores(predictor, run.data.path, tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet")
    score, label = (found[name].to_numpy().astype(np.float64) for name in ("score", "label"))
    loss = -np.mean(label * np.log(score) + (1 - label) * np.log(1 - score))
    assert loss == pytest.approx(result.metrics["log_loss"], rel=1e-5)
