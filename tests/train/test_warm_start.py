"""A run that begins with the rows and weights of another: what is taken, what starts fresh, and what is said of it."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from test_ranks import assert_close, end_of, pool, shards, trained  # noqa: F401
from test_trainer import Interrupt, lines

from conftest import SCHEMA
from hotrow import Trainer
from hotrow.data import Column
from hotrow.errors import SettingsError
from hotrow.run import load_run
from hotrow.train.progress import Progress
from hotrow.train.trainer import train

ADAGRAD = {"dim": 4, "optimizer": {"name": "adagrad", "lr": 0.05, "initial": 0.1}}


class Heard(Progress):
    def __init__(self):
        self.said = []

    def say(self, sentence):
        self.said.append(sentence)


def rows_of(trainer, table):
    """The rows of a table as they are on the host, in the order of their keys."""
    chunks = list(trainer.embeddings.router.tiers["host"].stores()[table].export())
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = columns["keys"].argsort()
    return {name: column.reshape(len(order), -1)[order] for name, column in columns.items()}


@pytest.fixture
def other(make_run, tmp_path):
    """A run that is over, with its rows and weights."""

    def make(**changes):
        run = make_run(**{"tables": ADAGRAD, "train__steps": 12, **changes}, output__folder=str(tmp_path / "other"))
        with Trainer(run) as trainer:
            trainer.fit()
            weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            return run, weights, {name: rows_of(trainer, name) for name in ("user", "item")}

    return make


def begun(make_run, **changes):
    """A run that has begun and made no step, and what it said."""
    heard = Heard()
    return Trainer(make_run(**{"tables": ADAGRAD, **changes}), progress=heard), heard.said


def test_a_run_begins_with_what_another_came_to(make_run, other):
    there, weights, rows = other()
    trainer, said = begun(make_run, train__warm_start=str(there.output.folder), train__seed=7)
    with trainer:
        assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
        for table in ("user", "item"):
            here = rows_of(trainer, table)
            for column in ("keys", "values", "state", "clocks", "uses"):
                assert np.array_equal(here[column], rows[table][column]), column
            assert not here["last"].any()
        assert trainer.state.step == trainer.embeddings.steps == trainer.optimizer.steps == 0
        assert not [name for name in trainer.optimizer.state() if name != "steps"]
    assert "Table item is taken, with the optimizer's state." in said
    written = json.loads((trainer.folder.path / "warm_start.json").read_text())
    assert written["tables"] == dict.fromkeys(("user", "item"), "taken, with the optimizer's state")
    assert set(written["weights"].values()) == {"taken", "fresh: it is a constant of the model"}


def test_a_feature_more_and_a_layer_changed(make_run, other, write_log, tmp_path):
    there, weights, rows = other()
    more = SCHEMA.model_copy(update={"features": (*SCHEMA.features, Column(name="shop"))})
    data = write_log(
        tmp_path / "more", schema=more, change=lambda t: t.append_column("shop", pa.array(np.arange(len(t)) % 9))
    )
    changes = {"data__path": str(data), "model": {"name": "wide_deep", "deep": [8, 6]}, "train__steps": 8}
    trainer, said = begun(make_run, **changes, train__warm_start=str(there.output.folder / "checkpoints/step-00000012"))
    with trainer:
        here = trainer.model.state_dict()
        written = json.loads((trainer.folder.path / "warm_start.json").read_text())
        assert written["tables"]["shop"] == "fresh: there is no such table there"
        taken = {name for name, sentence in written["weights"].items() if sentence == "taken"}
        assert taken and all(torch.equal(here[name], weights[name]) for name in taken)
        assert {name for name in here if name in weights and here[name].shape == weights[name].shape} >= taken
        changed = [sentence for sentence in written["weights"].values() if "its shape is" in sentence]
        assert changed and any("there is none" in sentence for sentence in written["weights"].values())
        assert np.array_equal(rows_of(trainer, "item")["values"], rows["item"]["values"])
        assert trainer.fit().steps == 8
    assert any(sentence.startswith("Of the dense weights") for sentence in said)


def test_a_table_of_another_dim_starts_fresh_and_one_that_is_gone_is_left(make_run, other):
    there, _, rows = other(features={"history": {"pooling": "sum"}})
    tables = {**ADAGRAD, "item": {"dim": 6}}
    trainer, said = begun(make_run, tables=tables, train__warm_start=str(there.output.folder))
    with trainer:
        assert len(trainer.embeddings.router.tiers["host"].stores()["item"]) == 0
        assert np.array_equal(rows_of(trainer, "user")["values"], rows["user"]["values"])
        trainer.fit()
    assert "Table item is fresh: its rows have dim 7 here and 5 there." in said


@pytest.mark.parametrize("name", ["adagrad", "momentum", "adam"])
def test_optimizer_state_begins_anew_where_the_optimizer_is_another_or_counts_steps(make_run, other, name):
    was = {"dim": 4, "optimizer": {"name": "adam" if name == "adam" else "rowwise_adagrad", "lr": 0.05}}
    there, _, rows = other(tables=was)
    tables = {"dim": 4, "optimizer": {"name": name, **({"initial": 0.25} if name == "adagrad" else {})}}
    trainer, said = begun(make_run, tables=tables, train__warm_start=str(there.output.folder))
    with trainer:
        here = rows_of(trainer, "item")
        assert np.array_equal(here["values"], rows["item"]["values"])
        assert (here["state"] == (0.25 if name == "adagrad" else 0.0)).all() and not here["clocks"].any()
        trainer.fit()
    why = "the moments of adam" if name == "adam" else f"it is {name} here and was rowwise_adagrad there"
    assert any(why in sentence for sentence in said)


@pytest.mark.parametrize(("was", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_rows_are_taken_in_the_dtype_that_they_have_here(make_run, other, was, now):
    there, _, rows = other(tables={**ADAGRAD, "dtype": was})
    tables = {**ADAGRAD, "dtype": now}
    trainer, _ = begun(make_run, tables=tables, train__warm_start=str(there.output.folder))
    with trainer:
        keys = torch.from_numpy(rows["item"]["keys"].reshape(-1))
        values = rows["item"]["values"]
        if was == "bfloat16":
            expected = torch.from_numpy((values.astype(np.uint32) << 16).view(np.float32))
        else:
            expected = torch.from_numpy(values).bfloat16().float()
        assert torch.equal(trainer.embeddings.read("item", keys), expected)


@pytest.mark.parametrize("place", ["sharded", "replicated", "served", "planned"])
def test_rows_are_taken_to_wherever_they_live(make_run, other, trained, shards, tmp_path, place):  # noqa: F811
    there, _, _ = other()
    settings = {"tables": ADAGRAD, "train__steps": 6, "model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}}
    settings["train__warm_start"] = str(there.output.folder)
    one = make_run(**settings, data__batch_size=96, output__folder=str(tmp_path / "one"))
    train(one)
    if place == "planned":
        two = make_run(**settings, data__batch_size=96, plan={"memory": "6KiB"})
        train(two)
        two = two.model_copy(update={"plan": None})
    else:
        cluster = {"shards": shards} if place == "served" else {"rows": place}
        two = make_run(**settings, data__batch_size=48, cluster=cluster)
        assert trained(two)["steps"] == 6
    assert_close(end_of(two), end_of(one))


def test_incremental_checkpoints_and_rows_that_were_evicted(make_run, other):
    tables = {**ADAGRAD, "item": {"eviction": {"capacity": 120}}}
    there, _, rows = other(tables=tables, train__checkpoint_every=3, train__incremental=9)
    trainer, _ = begun(make_run, train__warm_start=str(there.output.folder))
    with trainer:
        assert np.array_equal(rows_of(trainer, "item")["keys"], rows["item"]["keys"])
        assert np.array_equal(rows_of(trainer, "item")["values"], rows["item"]["values"])


def test_a_resumed_run_goes_on_from_its_own_checkpoint(make_run, other, tmp_path, same_weights):
    there, _, _ = other()
    settings = {"tables": ADAGRAD, "train__warm_start": str(there.output.folder)}
    whole = make_run(**settings, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(**settings)
    assert train(run, progress=Interrupt(9)).stopped == "SIGTERM"
    train(run, resume=True)
    same_weights(whole, run)
    assert lines(run, "train") == lines(whole, "train")


def test_a_path_is_taken_from_the_folder_of_the_run_file(tmp_path):
    (tmp_path / "run.toml").write_text('[data]\npath = "data"\n[train]\nwarm_start = "runs/other"\n')
    assert load_run(tmp_path / "run.toml").train.warm_start == (tmp_path / "runs/other").resolve()


def test_what_cannot_be_begun_with_is_refused_before_there_is_a_folder(make_run, other, tmp_path):
    there, _, _ = other()
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "nowhere", r"train\.warm_start: There is no run folder or checkpoint"),
        (tmp_path / "empty", r"train\.warm_start: .*not a complete checkpoint"),
    ):
        run = make_run(train__warm_start=str(path))
        with pytest.raises(SettingsError, match=said):
            train(run)
        assert not run.output.folder.exists()
    own = there.model_copy(update={"train": there.train.model_copy(update={"warm_start": there.output.folder})})
    with pytest.raises(SettingsError, match="this run's own folder"):
        train(own, overwrite=True)


def test_a_run_that_has_nothing_of_the_other_is_refused(make_run, other):
    there, _, _ = other(model={"name": "wide_deep", "deep": [8]})
    run = make_run(tables={"dim": 9}, model={"name": "dlrm"}, train__warm_start=str(there.output.folder))
    with pytest.raises(SettingsError, match="no table and no weights"):
        train(run)
