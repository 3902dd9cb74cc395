"""No setting of the run file is accepted and ignored: each has a line here that shows what changing it changes.

`WALK` names every field of every settings model that a run file reaches, by the model's class and its own name: what a
run starts from, and one value that is not the same. A small run is made with both. What came of them must differ: lines
of metrics without their times, files, calls of what is only quicker or slower, or the sentence by which the second is
refused. A new setting without a line fails the test, and so does a line whose setting is gone.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from hotrow import _native
from hotrow.data import DataSet, DataSetWriter
from hotrow.data.graph import Graph
from hotrow.errors import HotrowError, SettingsError
from hotrow.plan import Plan, Share
from hotrow.run import Run
from hotrow.service.shard import Shard
from hotrow.settings import Settings, parse
from hotrow.train import evaluate
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.logs import RunFolder
from hotrow.train.loop import train
from hotrow.train.progress import Progress
from train.conftest import SCHEMA, samples

TESTS = Path(__file__).parents[1]


class Walk(NamedTuple):
    """Settings to begin from, the change of one of them, and where what it changes is seen."""

    base: dict[str, Any]
    change: dict[str, Any]
    see: str = "run"


class Shown(NamedTuple):
    """A test elsewhere shows what the setting changes, as it takes several ranks."""

    file: str
    test: str


def tables(optimizer: str, **changed: Any) -> Walk:
    """A setting of a table's optimizer."""
    base = {"tables.optimizer": {"name": optimizer, "lr": 0.05}}
    return Walk(base, {f"tables.optimizer.{name}": value for name, value in changed.items()})


def dense(optimizer: str, **changed: Any) -> Walk:
    """A setting of the dense part's optimizer."""
    base = {"optimizer": {"name": optimizer, "lr": 0.05}}
    return Walk(base, {f"optimizer.{name}": value for name, value in changed.items()})


def schedule(settings: dict[str, Any], **changed: Any) -> Walk:
    base = {"tables.optimizer": {"name": "sgd", "lr": 0.5, "schedule": settings}}
    return Walk(base, {f"tables.optimizer.schedule.{name}": value for name, value in changed.items()})


def model(settings: dict[str, Any], history: str = "mean", **changed: Any) -> Walk:
    base = {"model": settings, "features": {"history": {"pooling": history}}}
    return Walk(base, {f"model.{name}": value for name, value in changed.items()})


def steps(step: dict[str, Any], **changed: Any) -> Walk:
    return Walk({"data.steps": [step]}, {"data.steps": [{**step, **changed}]})


def cached(**changed: Any) -> Walk:
    base = {"cluster.cache": {"capacity": 60, "policy": "pinned"}}
    return Walk(base, {f"cluster.cache.{name}": value for name, value in changed.items()}, "calls")


def policy(settings: dict[str, Any], see: str = "calls", cluster: Any = None, **changed: Any) -> Walk:
    base = {"policy": settings, **({"cluster": cluster} if cluster else {})}
    return Walk(base, {f"policy.{name}": value for name, value in changed.items()}, see)


def follow(see: str = "run", base: Any = None, whole: Any = None, **changed: Any) -> Walk:
    whole = {"data.follow": {"path": "incoming", "idle": 0, **(base or {})}, "train.steps": 2, **(whole or {})}
    return Walk(whole, {f"data.follow.{name}": value for name, value in changed.items()}, see)


def planned(settings: dict[str, Any], see: str = "run", **changed: Any) -> Walk:
    return Walk({"plan": settings}, {f"plan.{name}": value for name, value in changed.items()}, see)


ITEM = {"tables.item.dim": 4}
STOPPING = {"train.evaluate_every": 1, "train.early_stopping": {"patience": 1, "min_delta": 9.0}}
ROWS = {"name": "linear", "steps": 4}
TRANSFORMER = {"name": "transformer", "deep": [8], "layers": 1}
GRAPH = {"name": "graph", "width": 4, "deep": [4]}
NEAR = {"name": "neighbours", "graph": "clicks.graph", "fan_outs": [2]}
GRAPHS = {"data.steps": [NEAR], "model": GRAPH}
BUCKETS = {"name": "bucketise", "column": "price", "boundaries": [0.0]}

WALK: dict[str, Walk | Shown] = {
    "Run.features": Walk({}, {"features": {"history": {"pooling": "sum"}}}),
    "Run.model": Walk({}, {"model": {"name": "dcnv2", "deep": [8]}}),
    "Run.optimizer": Walk({}, {"optimizer": {"name": "sgd"}}),
    "Run.policy": Walk({}, {"policy": {"name": "exact"}}, "calls"),
    "Run.plan": Walk({}, {"plan": {"memory": "6KiB"}}),
    "Data.path": Walk({}, {"data.path": "other"}),
    "Data.batch_size": Walk({}, {"data.batch_size": 100}),
    "Data.shuffle": Walk({}, {"data.shuffle": False}),
    "Data.seed": Walk({}, {"data.seed": 1}),
    "Data.train": Walk({}, {"data.train": "test"}),
    "Data.validation": Walk({"train.evaluate_every": 2}, {"data.validation": "train"}),
    "Data.test": Walk({}, {"data.test": "train"}),
    "Data.steps": Walk({}, {"data.steps": [{"name": "log", "columns": ["price"]}]}),
    "Data.follow": Walk({"train.steps": 2}, {"data.follow": {"path": "incoming", "idle": 0}}),
    "Hash.columns": steps({"name": "hash", "columns": ["item"], "buckets": 9}, columns=["user"]),
    "Hash.buckets": steps({"name": "hash", "columns": ["item"], "buckets": 9}, buckets=5),
    "Hash.salt": steps({"name": "hash", "columns": ["item"], "buckets": 9}, salt=1),
    "Truncate.columns": steps({"name": "truncate", "columns": ["history"], "length": 1}, columns=["user"]),
    "Truncate.length": steps({"name": "truncate", "columns": ["history"], "length": 1}, length=2),
    "Clip.columns": steps({"name": "clip", "columns": ["price"], "low": 0.0}, columns=["prize"]),
    "Clip.low": steps({"name": "clip", "columns": ["price"], "low": 0.0}, low=0.5),
    "Clip.high": steps({"name": "clip", "columns": ["price"], "low": 0.0}, high=0.5),
    "Log.columns": steps({"name": "log", "columns": ["price"]}, columns=["prize"]),
    "Normalise.columns": steps({"name": "normalise", "columns": ["price"], "mean": 0, "std": 2}, columns=["prize"]),
    "Normalise.mean": steps({"name": "normalise", "columns": ["price"], "mean": 0, "std": 2}, mean=1),
    "Normalise.std": steps({"name": "normalise", "columns": ["price"], "mean": 0, "std": 2}, std=3),
    "Function.columns": steps({"name": "function", "columns": ["price"], "function": "numpy:abs"}, columns=["item"]),
    "Function.function": steps(
        {"name": "function", "columns": ["price"], "function": "numpy:abs"}, function="numpy:sin"
    ),
    "Bucketise.column": steps(BUCKETS, column="prize"),
    "Bucketise.boundaries": steps(BUCKETS, boundaries=[1.0]),
    "Bucketise.feature": steps(BUCKETS, feature="cheap"),
    "Bucketise.table": steps(BUCKETS, table="item"),
    "Bucketise.keep": steps(BUCKETS, keep=True),
    "Neighbours.graph": Walk(GRAPHS, {"data.steps": [{**NEAR, "graph": "fewer.graph"}]}),
    "Neighbours.fan_outs": Walk(GRAPHS, {"data.steps": [{**NEAR, "fan_outs": [3]}]}),
    "Follow.path": follow(path="elsewhere"),
    "Follow.format": follow(format="criteo"),
    "Follow.columns": follow(columns="columns.toml"),
    "Follow.bad": follow(base={"path": "bad"}, bad="skip"),
    "Follow.look_every": follow("calls", {"idle": 0.01, "look_every": 0.002}, look_every=0.003),
    "Follow.idle": follow("calls", {"look_every": 0.002}, idle=0.01),
    "Follow.checkpoint_every": follow(
        base={"path": "two"}, whole={"data.batch_size": 50, "train.steps": 4}, checkpoint_every=0
    ),
    "Tables.dim": Walk({}, {"tables.dim": 8}),
    "Tables.dtype": Walk({}, {"tables.dtype": "bfloat16"}),
    "Tables.optimizer": Walk({}, {"tables.optimizer": {"name": "sgd"}}),
    "Tables.init": Walk({}, {"tables.init": {"name": "normal"}}),
    "Tables.admission": Walk({}, {"tables.admission": {"name": "count", "count": 2}}),
    "Tables.eviction": Walk({}, {"tables.eviction": {"ttl": 1}}),
    "TableSection.dim": Walk(ITEM, {"tables.item.dim": 8}),
    "TableSection.dtype": Walk(ITEM, {"tables.item.dtype": "bfloat16"}),
    "TableSection.optimizer": Walk(ITEM, {"tables.item.optimizer": {"name": "sgd"}}),
    "TableSection.init": Walk(ITEM, {"tables.item.init": {"name": "normal"}}),
    "TableSection.admission": Walk(ITEM, {"tables.item.admission": {"name": "count", "count": 2}}),
    "TableSection.eviction": Walk(ITEM, {"tables.item.eviction": {"ttl": 1}}),
    "TableSection.without": Walk({**ITEM, "tables.eviction": {"ttl": 1}}, {"tables.item.without": ["eviction"]}),
    "Uniform.scale": Walk({"tables.init": {"name": "uniform"}}, {"tables.init.scale": 0.5}),
    "Normal.std": Walk({"tables.init": {"name": "normal"}}, {"tables.init.std": 0.5}),
    "Fill.value": Walk({"tables.init": {"name": "fill"}}, {"tables.init.value": 0.5}),
    "ByCount.count": Walk({"tables.admission": {"name": "count", "count": 2}}, {"tables.admission.count": 3}),
    "ByCount.bytes": Walk({"tables.admission": {"name": "count", "count": 2}}, {"tables.admission.bytes": 4096}),
    "ByProbability.probability": Walk(
        {"tables.admission": {"name": "probability", "probability": 0.2}}, {"tables.admission.probability": 0.5}
    ),
    "Eviction.capacity": Walk({"tables.eviction": {"capacity": 20}}, {"tables.eviction.capacity": 30}),
    "Eviction.policy": Walk(
        {"tables.eviction": {"capacity": 150}, "data.batch_size": 50, "train.steps": 9},
        {"tables.eviction.policy": "lfu"},
    ),
    "Eviction.ttl": Walk({"tables.eviction": {"ttl": 1}}, {"tables.eviction.ttl": 2}),
    **{
        f"{name}.{setting}": tables(known, **{setting: value})
        for name, known in {
            "SGD": "sgd",
            "Momentum": "momentum",
            "Adagrad": "adagrad",
            "RowWiseAdagrad": "rowwise_adagrad",
            "Adam": "adam",
        }.items()
        for setting, value in {
            "lr": 0.1,
            "schedule": ROWS,
            "weight_decay": 0.5,
            "clip_value": 1e-5,
            "clip_norm": 1e-5,
            "bound": 0.01,
        }.items()
    },
    "Momentum.momentum": tables("momentum", momentum=0.5),
    "Momentum.dampening": tables("momentum", dampening=0.5),
    "Momentum.nesterov": tables("momentum", nesterov=True),
    "Adagrad.eps": tables("adagrad", eps=0.5),
    "Adagrad.initial": tables("adagrad", initial=0.5),
    "RowWiseAdagrad.eps": tables("rowwise_adagrad", eps=0.5),
    "RowWiseAdagrad.initial": tables("rowwise_adagrad", initial=0.5),
    "Adam.beta1": tables("adam", beta1=0.5),
    "Adam.beta2": tables("adam", beta2=0.5),
    "Adam.eps": tables("adam", eps=0.5),
    **{
        f"{name}.warmup": schedule(settings, warmup=3)
        for name, settings in {
            "Constant": {"name": "constant"},
            "Linear": ROWS,
            "Cosine": {"name": "cosine", "steps": 4},
            "StepDecay": {"name": "step", "every": 2},
            "InverseSqrt": {"name": "inverse_sqrt"},
        }.items()
    },
    "Linear.steps": schedule(ROWS, steps=2),
    "Linear.final": schedule(ROWS, final=0.5),
    "Cosine.steps": schedule({"name": "cosine", "steps": 4}, steps=2),
    "Cosine.final": schedule({"name": "cosine", "steps": 4}, final=0.5),
    "StepDecay.every": schedule({"name": "step", "every": 2}, every=1),
    "StepDecay.gamma": schedule({"name": "step", "every": 2}, gamma=0.5),
    "InverseSqrt.steps": schedule({"name": "inverse_sqrt"}, steps=3),
    "FeatureSection.pooling": Walk({"features.history.pooling": "mean"}, {"features.history.pooling": "sum"}),
    "DLRMSettings.bottom": model({"name": "dlrm", "bottom": [8], "top": [8]}, bottom=[4]),
    "DLRMSettings.top": model({"name": "dlrm", "bottom": [8], "top": [8]}, top=[4]),
    "DCNv2Settings.layers": model({"name": "dcnv2", "deep": [8]}, layers=1),
    "DCNv2Settings.rank": model({"name": "dcnv2", "deep": [8]}, rank=2),
    "DCNv2Settings.deep": model({"name": "dcnv2", "deep": [8]}, deep=[4]),
    "DCNv2Settings.structure": model({"name": "dcnv2", "deep": [8]}, structure="stacked"),
    "DCNv2Settings.dropout": model({"name": "dcnv2", "deep": [8]}, dropout=0.5),
    "DeepFMSettings.deep": model({"name": "deepfm", "deep": [8]}, deep=[4]),
    "DeepFMSettings.dropout": model({"name": "deepfm", "deep": [8]}, dropout=0.5),
    "WideDeepSettings.deep": model({"name": "wide_deep", "deep": [8]}, deep=[4]),
    "WideDeepSettings.dropout": model({"name": "wide_deep", "deep": [8]}, dropout=0.5),
    "DINSettings.targets": model({"name": "din", "deep": [8]}, "sequence", targets={"history": "user"}),
    "DINSettings.attention": model({"name": "din", "deep": [8]}, "sequence", attention=4),
    "DINSettings.deep": model({"name": "din", "deep": [8]}, "sequence", deep=[4]),
    "DINSettings.activation": model({"name": "din", "deep": [8]}, "sequence", activation="prelu"),
    "TransformerSettings.targets": model(TRANSFORMER, "sequence", targets={"history": "user"}),
    "TransformerSettings.layers": model(TRANSFORMER, "sequence", layers=2),
    "TransformerSettings.heads": model(TRANSFORMER, "sequence", heads=1),
    "TransformerSettings.width": model(TRANSFORMER, "sequence", width=8),
    "TransformerSettings.feedforward": model(TRANSFORMER, "sequence", feedforward=2),
    "TransformerSettings.length": model(TRANSFORMER, "sequence", length=1),
    "TransformerSettings.dropout": model(TRANSFORMER, "sequence", dropout=0.5),
    "TransformerSettings.deep": model(TRANSFORMER, "sequence", deep=[4]),
    "GraphSettings.between": Walk(GRAPHS, {"model.between": ["item", "user"]}),
    "GraphSettings.width": Walk(GRAPHS, {"model.width": 8}),
    "GraphSettings.deep": Walk(GRAPHS, {"model.deep": [8]}),
    "GraphSettings.dropout": Walk(GRAPHS, {"model.dropout": 0.5}),
    **{
        f"{name}.{setting}": dense(known, **{setting: value})
        for name, known in {
            "DenseSGD": "sgd",
            "DenseMomentum": "momentum",
            "DenseAdagrad": "adagrad",
            "DenseAdam": "adam",
            "DenseAdamW": "adamw",
        }.items()
        for setting, value in {"lr": 0.1, "schedule": ROWS, "weight_decay": 0.5, "clip_norm": 1e-5}.items()
    },
    "DenseMomentum.momentum": dense("momentum", momentum=0.5),
    "DenseMomentum.nesterov": dense("momentum", nesterov=True),
    "DenseAdagrad.eps": dense("adagrad", eps=0.5),
    "DenseAdagrad.initial": dense("adagrad", initial=0.5),
    **{
        f"{name}.{setting}": dense(known, **{setting: 0.5})
        for name, known in {"DenseAdam": "adam", "DenseAdamW": "adamw"}.items()
        for setting in ("beta1", "beta2", "eps")
    },
    "Sync.ahead": policy({"name": "sync"}, ahead=2),
    "Exact.ahead": policy({"name": "exact"}, ahead=3),
    "Hybrid.staleness": policy({"name": "hybrid", "worst": True, "ramp": 0}, "run", staleness=2),
    "Hybrid.ramp": policy({"name": "hybrid", "worst": True, "ramp": 0}, "run", ramp=100),
    "Hybrid.ahead": policy({"name": "hybrid"}, ahead=2),
    "Hybrid.worst": policy({"name": "hybrid"}, worst=True),
    "Bounded.clock": policy({"name": "bounded"}, cluster={"cache": {}}, clock=5),
    "Bounded.ahead": policy({"name": "bounded"}, cluster={"cache": {}}, ahead=5),
    "Train.epochs": Walk({"train.steps": 99, "data.batch_size": 500}, {"train.epochs": 2}),
    "Train.steps": Walk({}, {"train.steps": 2}),
    "Train.evaluate_every": Walk({}, {"train.evaluate_every": 2}),
    "Train.checkpoint_every": Walk({"train.keep": 9}, {"train.checkpoint_every": 1}, "files"),
    "Train.keep": Walk({"train.checkpoint_every": 1}, {"train.keep": 1}, "files"),
    "Train.incremental": Walk({"train.checkpoint_every": 1}, {"train.incremental": 9}, "files"),
    "Train.log_every": Walk({}, {"train.log_every": 2}),
    "Train.early_stopping": Walk({"train.evaluate_every": 1}, STOPPING),
    "Train.device": Walk({}, {"train.device": "cuda"}),
    "Train.precision": Walk({}, {"train.precision": "bf16"}),
    "Train.compile": Walk({}, {"train.compile": True}, "calls"),
    "Train.threads": Walk({}, {"train.threads": 2}, "calls"),
    "Train.seed": Walk({}, {"train.seed": 1}),
    "EarlyStopping.metric": Walk(STOPPING, {"train.early_stopping.metric": "log_loss"}, "files"),
    "EarlyStopping.patience": Walk(STOPPING, {"train.early_stopping.patience": 2}),
    "EarlyStopping.min_delta": Walk(
        {**STOPPING, "train.early_stopping.metric": "log_loss"}, {"train.early_stopping.min_delta": 0.0}
    ),
    "PlanSection.path": planned({"path": "some.plan"}, path="other.plan"),
    "PlanSection.memory": planned({"memory": "6KiB"}, memory="8KiB"),
    "PlanSection.mode": planned({"memory": "6KiB"}, mode="hot_cold"),
    "PlanSection.replan_every": planned({"memory": "6KiB"}, replan_every=2),
    "PlanSection.judge": Walk(
        {"plan": {"memory": "6KiB", "mode": "hot_cold"}, "data.batch_size": 50}, {"plan.judge": 10}
    ),
    "PlanSection.device_rows": planned({"path": "some.plan"}, device_rows=True),
    "Cluster.shards": Walk({}, {"cluster.shards": ["a shard"]}),
    "Cluster.rows": Walk({}, {"cluster.rows": "replicated"}),
    "Cluster.wire": Shown("train/test_ranks.py", "test_rows_of_ranks_travel_as_the_run_says"),
    "Cluster.exchange": Walk({}, {"cluster.exchange": "nccl"}),
    "Cluster.key": Walk({"cluster.shards": ["a shard"]}, {"cluster.key": "nowhere.key"}),
    "Cluster.timeout": Shown("train/test_ranks.py", "test_ranks_wait_for_each_other_as_long_as_the_run_says"),
    "Cluster.cache": Walk({}, {"cluster.cache": {}}),
    "Cache.capacity": cached(capacity=80),
    "Cache.policy": cached(policy="lru"),
    "Cache.popular": cached(popular=2),
    "Cache.clock": cached(clock=3),
    "Cache.drift": Shown("train/test_ranks.py", "test_drift_and_sample_of_a_cache_are_those_of_the_run"),
    "Cache.ahead": cached(ahead=4),
    "Cache.sample": Shown("train/test_ranks.py", "test_drift_and_sample_of_a_cache_are_those_of_the_run"),
    "Output.folder": Walk({}, {"output.folder": "another"}, "files"),
    "Output.tensorboard": Walk({}, {"output.tensorboard": True}, "said"),
}


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
    found = model.__annotations__.get("__pydantic_extra__")
    if found is not None:
        from hotrow.run import TableSection

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
    held = [(line["table_rows"], line["table_bytes"]) for line in lines if line["kind"] == "machine"]
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
        watch(evaluate, pipeline, ahead)
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
