"""A small log with labels of every kind, and a run over it."""

import json

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data import Column, DataSetWriter, Schema
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.checkpoint import Checkpoint, Checkpoints

MINUTES = {"name": "minutes", "kind": "number"}


def schema_of(labels, **more):
    features = (
        Column(name="user"),
        Column(name="item"),
        Column(name="country"),
        Column(name="history", kind="keys", table="item", pooling="mean"),
    )
    return Schema.model_validate({"labels": labels, "dense": ("price",), "features": features, "user": "user", **more})


def samples(n, seed):
    """Clicks that depend on item and price, buys on clicks and user, minutes on both, below zero too."""
    random = np.random.default_rng(seed)
    item, user = random.zipf(1.3, n) % 100, random.integers(0, 40, n)
    price = random.normal(size=n).astype(np.float32)
    liked = np.sin(item * 1.7) * 2 + price * 0.5
    click = (random.random(n) < 1 / (1 + np.exp(-liked))).astype(np.float32)
    history = [random.integers(0, 100, random.integers(0, 4)) * 7**20 for _ in range(n)]
    return pa.table(
        {
            "click": click,
            "buy": click * (user % 3 == 0),
            "minutes": (3 * liked + user / 10 + random.normal(size=n)).astype(np.float32),
            "weight": random.random(n).astype(np.float32),
            "price": price,
            "user": user,
            "item": item * 7**20,
            "country": random.choice([7, 49, 33, 1], n, p=[0.5, 0.3, 0.15, 0.05]),
            "history": pa.array(history, pa.list_(pa.int64())),
        }
    )


@pytest.fixture(scope="session")
def log_of(tmp_path_factory):
    """A data set with these labels; the same samples whatever the labels are."""
    made = {}

    def make(labels, **more):
        name = json.dumps([labels, more])
        if name not in made:
            made[name] = tmp_path_factory.mktemp("labels") / "data"
            schema = schema_of(labels, **more)
            with DataSetWriter(made[name], schema, row_group=128) as writer:
                for split, count, seed in (("train", 600, 1), ("test", 200, 2)):
                    writer.write(split, samples(count, seed).select(list(schema.columns)))
        return made[name]

    return make


@pytest.fixture
def make_run(log_of, tmp_path):
    """A run over the log with these labels; each setting by its path, as in `train__steps=3`."""

    def make(labels, folder="run", **changes):
        settings = {
            "data": {"path": str(log_of(labels)), "batch_size": 64},
            "tables": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.05}},
            "model": {"name": "wide_deep", "deep": [8]},
            "train": {"threads": 1, "log_every": 4, "epochs": 2},
            "output": {"folder": str(tmp_path / folder), "tensorboard": False},
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                settings.setdefault(section, {})[key] = value
            else:
                settings[section] = value
        return parse(Run, settings)

    return make


@pytest.fixture
def weights_of():
    """The dense weights that a run ended with."""

    def read(run):
        arrays = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest()).arrays()
        return {name: array.tolist() for name, array in arrays.items() if name.startswith("model/")}

    return read


@pytest.fixture
def lines_of():
    """The lines of metrics of a kind."""

    def read(run, kind):
        lines = [json.loads(line) for line in (run.output.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    return read
