"""A small log with something to learn in it, and a run over it."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from hotrow.data import Column, DataSetWriter, Schema, prepare
from hotrow.data.synth import SynthSettings, preset_settings
from hotrow.data.synth import write_log as write_log_of
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker
from hotrow.train.trainer import train

SCHEMA = Schema(
    label="click",
    dense=("price",),
    features=(
        Column(name="user"),
        Column(name="item"),
        Column(name="history", kind="keys", table="item", pooling="mean"),
    ),
    user="user",
)


def samples(n, seed):
    """Clicks that depend on item and price, with keys of any size."""
    random = np.random.default_rng(seed)
    item = random.zipf(1.3, n) % 200
    user = random.integers(0, 40, n)
    price = random.normal(size=n).astype(np.float32)
    history = [random.integers(0, 200, random.integers(0, 4)) * 7**20 for _ in range(n)]
    logit = np.sin(item * 1.7) * 2 + price * 0.5
    click = (random.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return pa.table(
        {
            "click": click,
            "price": price,
            "user": user,
            "item": item * 7**20,
            "history": pa.array(history, pa.list_(pa.int64())),
        }
    )


@pytest.fixture(scope="session")
def write_log():
    def write(path, seed=1, schema=SCHEMA, change=lambda table: table, validation=0):
        with DataSetWriter(path, schema, row_group=256) as writer:
            writer.write("train", change(samples(2000, seed)))
            if validation:
                writer.write("validation", change(samples(validation, seed + 2)))
            writer.write("test", change(samples(500, seed + 1)))
            writer.facts["best_auc"] = 0.8
        return path

    return write


@pytest.fixture(scope="session")
def data(write_log, tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("data") / "clicks")


@pytest.fixture(scope="session")
def judged(write_log, tmp_path_factory):
    """The same log with a validation split."""
    return write_log(tmp_path_factory.mktemp("judged") / "clicks", validation=400)


@pytest.fixture(scope="session")
def moving(tmp_path_factory):
    """A log whose second half uses other items than its first, in the order of time."""
    path = tmp_path_factory.mktemp("moving") / "data"
    second = samples(1000, 2)
    history = second["history"].combine_chunks()
    moved = {
        "item": pa.array(second["item"].to_numpy() + 1),
        "history": pa.ListArray.from_arrays(history.offsets, pa.array(history.values.to_numpy() + 1)),
    }
    for name, column in moved.items():
        second = second.set_column(second.column_names.index(name), name, column)
    with DataSetWriter(path, SCHEMA, row_group=250) as writer:
        writer.write("train", pa.concat_tables([samples(1000, 1), second]))
        writer.write("test", samples(100, 3))
    return path


@pytest.fixture
def with_nan_price(write_log, tmp_path):
    """The small log, whose 200th sample, of step 4, has no finite price."""

    def change(table):
        price = table["price"].to_numpy().copy()
        if len(price) == 2000:
            price[200] = float("nan")
        return table.set_column(table.column_names.index("price"), "price", [price])

    return write_log(tmp_path / "data", change=change)


@pytest.fixture
def make_run(data, tmp_path):
    """A run over the small log, 32 steps an epoch, with the given settings changed."""

    def make(**changes):
        settings = {
            "data": {"path": str(data), "batch_size": 64},
            "tables": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.05}},
            "model": {"name": "wide_deep", "deep": [8], "dropout": 0.2},
            "train": {"threads": 1, "log_every": 4},
            "output": {"folder": str(tmp_path / "run"), "tensorboard": False},
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
def same_weights():
    """Asserts that two runs ended with the same dense arrays, rows, state and clocks, bit for bit.

    `hybrid` counts as used what it fetched ahead, trained on or not, so what it says of uses may differ.
    """

    def check(one, two):
        left_out = {"uses", "last"} if one.policy.name == "hybrid" else set()
        (step_a, steps_a, dense_a, tables_a), (step_b, steps_b, dense_b, tables_b) = _end(one), _end(two)
        assert (step_a, steps_a) == (step_b, steps_b)
        assert dense_a.keys() == dense_b.keys()
        for name in dense_a:
            assert torch.equal(dense_a[name], dense_b[name]), name
        for table in tables_a:
            for column in tables_a[table].keys() - left_out:
                assert np.array_equal(tables_a[table][column], tables_b[table][column]), (table, column)

    return check


@pytest.fixture
def close_weights():
    """Asserts that two runs ended with the same clocks and uses, and within rounding with the same weights and rows.

    A row on the device is summed and updated in another order of operations than one on the host: after some dozens of
    steps they differ by a few units in the last place of the largest values: below 5e-6 here.
    """

    def check(one, two):
        (step_a, steps_a, dense_a, tables_a), (step_b, steps_b, dense_b, tables_b) = _end(one), _end(two)
        assert (step_a, steps_a) == (step_b, steps_b)
        for name in (name for name in dense_a if not name.startswith(("feed/", "random/"))):
            torch.testing.assert_close(dense_a[name], dense_b[name], rtol=1e-5, atol=5e-6, msg=name)
        assert tables_a.keys() == tables_b.keys()
        for table, columns in tables_a.items():
            for column, array in columns.items():
                compare = np.testing.assert_allclose if column in ("values", "state") else np.testing.assert_array_equal
                close = {"rtol": 1e-5, "atol": 5e-6} if column in ("values", "state") else {}
                compare(array, tables_b[table][column], err_msg=f"{table} {column}", **close)

    return check


@pytest.fixture
def resumes_alike(make_run, tmp_path, same_weights):
    """Asserts that a run stopped at a step and resumed ends as one that was not, its lines of these kinds included."""
    from test_trainer import Interrupt, lines

    def check(settings, stop, kinds):
        whole = make_run(**settings, output__folder=str(tmp_path / "whole"))
        ended = train(whole)
        run = make_run(**settings)
        assert train(run, progress=Interrupt(stop)).steps == stop
        resumed = train(run, resume=True)
        same_weights(whole, run)
        assert resumed.plan == ended.plan
        for kind in kinds:
            assert lines(run, kind) == lines(whole, kind)

    return check


@pytest.fixture(scope="session")
def sessions(tmp_path_factory):
    """A session log that repeats: groups with an inverse, histories that slide, lists, empty bags."""
    folder = tmp_path_factory.mktemp("sessions")
    small = {"samples": 1200, "users": 60, "items": 80, "history_length": 8, "past": 8, "vocabulary": 30}
    write_log_of(SynthSettings.model_validate({**preset_settings("recd"), **small}), folder / "log")
    prepare(folder / "log", folder / "data", split="users:0.2")
    return folder / "data"


def _end(run):
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    arrays = checkpoint.arrays()
    ranker = Ranker(run)
    ranker.restore(checkpoint, arrays)
    tables = {}
    for tier in ranker.embeddings.router.tiers.values():
        for name, store in tier.stores().items():
            chunks = list(store.export())
            columns = {c: np.concatenate([chunk[c] for chunk in chunks]) for c in chunks[0]}
            order = columns["keys"].argsort()
            tables[name] = {c: a.reshape(len(order), -1)[order] for c, a in columns.items()}
    return checkpoint.step, ranker.embeddings.steps, arrays, tables
