"""Nothing that is not finite is kept, evaluated or served, and a run goes on from before it with lower rates."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_trainer import lines

from hotrow import Embeddings, Feature, Predictor, Table
from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.errors import NotFiniteError, SettingsError
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.store.optimizers import SGD
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker, evaluate, evaluate_path
from hotrow.train.trainer import Trainer, train
from train.conftest import samples

NAN = float("nan")


def spoil(monkeypatch, step, what):
    """Has the losses of a run, a dense weight or a row be no number from a step on, whose checkpoint is not put off."""
    made = Trainer.step

    def spoiled(trainer, ready):
        trainer.checkpoints.wait()
        loss = made(trainer, ready)
        if what == "loss" and trainer.state.step >= step:
            trainer.losses._sum += NAN
        if what == "dense" and trainer.state.step == step:
            next(iter(trainer.model.parameters())).data.view(-1)[0] = NAN
        if what == "rows" and trainer.state.step == step:
            store = trainer.embeddings.router.tiers["host"].stores()["user"]
            store.import_(row_of(store.table, np.inf))
        return loss

    monkeypatch.setattr(Trainer, "step", spoiled)


def row_of(table, value):
    """A row for key 5 whose first value is `value`."""
    values = np.array([value, *np.ones(table.dim - 1)], np.float32)
    if table.dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    zeros = {name: np.zeros(1, np.uint32) for name in ("clocks", "uses", "last")}
    state = np.zeros(table.optimizer.state_dim(table.dim), np.float32)
    return {"keys": np.array([5]), "values": values, "state": state, **zeros}


def finite_everywhere(checkpoint):
    arrays = Checkpoint(checkpoint).arrays()
    return all(torch.isfinite(a).all() for a in arrays.values() if a.is_floating_point())


@pytest.mark.parametrize("what", ["loss", "dense", "rows"])
def test_what_is_not_finite_never_takes_the_place_of_a_good_checkpoint(make_run, monkeypatch, what):
    run = make_run(train__checkpoint_every=2, train__keep=2, train__log_every=50, train__epochs=2)
    spoil(monkeypatch, 8, what)
    with pytest.raises(NotFiniteError, match=r"not converge.*The last checkpoint is .*step-0") as caught:
        train(run)
    assert "Lower the" in str(caught.value)
    found = Checkpoints(run.output.folder / "checkpoints").all()
    assert [path.name for path in found] == ["step-00000004", "step-00000006"]
    assert not list((run.output.folder / "checkpoints").glob(".*"))
    assert all(finite_everywhere(checkpoint) for checkpoint in found)
    monkeypatch.undo()
    with Predictor(run.output.folder) as predictor:
        table = next(DataSet.open(run.data.path).flat("test"))
        assert torch.isfinite(predictor.score(table)).all()

    lower = {"tables__optimizer": {"name": "adam", "lr": 0.001, "clip_norm": 1.0}, "optimizer": {"lr": 0.0001}}
    again = make_run(train__checkpoint_every=2, train__log_every=50, train__epochs=2, **lower)
    result = train(again, resume=True)
    assert (result.stopped, result.steps) == ("end", 64)


@pytest.mark.parametrize("what", ["loss", "dense", "rows"])
def test_a_followed_log_that_spoils_a_run_leaves_its_good_checkpoints(make_run, monkeypatch, tmp_path, what):
    (tmp_path / "incoming").mkdir()
    pq.write_table(samples(640, 5), tmp_path / "incoming" / "a.parquet")
    follow = {"path": str(tmp_path / "incoming"), "idle": 0, "checkpoint_every": 0}
    run = make_run(data__follow=follow, train__log_every=50)
    spoil(monkeypatch, 6, what)
    with pytest.raises(NotFiniteError, match="not converge"):
        train(run)
    found = Checkpoints(run.output.folder / "checkpoints").all()
    assert found[-1].name == "step-00000004"
    assert all(finite_everywhere(checkpoint) for checkpoint in found)


def test_a_run_that_diverges_by_itself_keeps_its_last_good_checkpoint(make_run):
    settings = {"train__checkpoint_every": 1, "train__keep": 2, "train__log_every": 50}
    tame = {"optimizer": {"name": "sgd", "lr": 0.1}}
    good = train(make_run(**settings, **tame, train__steps=3)).checkpoint
    with pytest.raises(NotFiniteError, match="not converge"):
        train(make_run(**settings, optimizer={"name": "sgd", "lr": 1e30}), resume=True)
    checkpoints = Checkpoints(good.parent)
    assert good in checkpoints.all() and all(finite_everywhere(checkpoint) for checkpoint in checkpoints.all())
    assert np.isfinite(list(evaluate_path(good)[2].values())).all()
    for grown in checkpoints.all():
        if grown != good:
            shutil.rmtree(grown)
    assert train(make_run(**settings, **tame), resume=True).stopped == "end"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_snapshot_of_rows_that_are_not_finite_is_refused_and_the_next_is_whole(tmp_path, dtype, bad):
    embeddings = Embeddings([Table(name="a", dim=2, dtype=dtype, optimizer=SGD(lr=1.0))], [Feature(name="a")])
    rows = embeddings.router.tiers["host"].stores()["a"]
    rows.import_(row_of(rows.table, bad))
    with pytest.raises(NotFiniteError, match="Rows of table a hold values that are not finite, key 5 among them"):
        embeddings.snapshot(tmp_path / "bad").write()
    assert not list(tmp_path.iterdir())
    rows.erase(np.array([5]))
    embeddings.snapshot(tmp_path / "good").write()


def test_an_answer_that_is_no_number_is_refused_by_who_predicts_and_who_evaluates(make_run):
    run = make_run(train__steps=4)
    checkpoint = train(run).checkpoint
    table = next(DataSet.open(run.data.path).flat("test")).slice(0, 3)
    with Predictor(run.output.folder) as predictor:
        next(iter(predictor._now.model.parameters())).data.fill_(NAN)
        with pytest.raises(NotFiniteError, match=rf"for 3 of 3 samples is no finite number: {checkpoint}"):
            predictor.score(table)
    ranker = Ranker(run)
    next(iter(ranker.model.parameters())).data.fill_(NAN)
    with pytest.raises(NotFiniteError, match='500 samples of the split "test" the model\'s answer is no finite number'):
        evaluate(ranker, "test")


@pytest.mark.parametrize(
    "changes",
    [
        {"tables__optimizer": {"name": "adam", "lr": 0.01, "schedule": {"name": "linear", "steps": 9}}},
        {"tables__item": {"optimizer": {"lr": 0.01, "clip_value": 0.5}}},
        {"optimizer": {"name": "adam", "lr": 0.5, "clip_norm": 2.0, "schedule": {"name": "linear", "steps": 9}}},
    ],
    ids=str,
)
def test_rates_may_change_when_a_run_is_resumed_and_take_effect(make_run, changes):
    train(make_run(train__steps=4))
    unchanged = make_run(train__steps=8, output__folder="")
    result = train(make_run(train__steps=8, **changes), resume=True)
    assert result.steps == 8 and unchanged.train.steps == 8
    whole = train(make_run(train__steps=8), overwrite=True)
    assert result.metrics != whole.metrics


def test_what_makes_rows_what_they_are_may_not_change(make_run):
    train(make_run(train__steps=4))
    for table in ({"dim": 8}, {"optimizer": {"name": "sgd"}}, {"init": {"name": "fill", "value": 1.0}}):
        with pytest.raises(SettingsError, match=r"tables\.item\.(dim|optimizer\.name|init)"):
            train(make_run(train__steps=8, tables__item=table), resume=True)


def test_a_predictor_goes_on_when_a_run_goes_on_with_other_rates(make_run):
    train(make_run(train__steps=4))
    run = make_run(train__steps=8, tables__optimizer={"name": "adam", "lr": 0.01})
    with Predictor(run.output.folder) as predictor:
        train(run, resume=True)
        assert predictor.refresh() and predictor.step == 8


WEIGHED = Schema(label="y", features=(Column(name="k"),), weight="w")


def weighed(path, weights, seed=0):
    random = np.random.default_rng(seed)
    with DataSetWriter(path, WEIGHED, row_group=64) as writer:
        for split in ("train", "test"):
            n = len(weights)
            columns = {"y": random.integers(0, 2, n).astype(np.float32), "k": random.integers(0, 20, n)}
            writer.write(split, pa.table({**columns, "w": np.asarray(weights, np.float32)}))
    return path


def weighed_run(path, folder, **train_):
    return parse(
        Run,
        {
            "data": {"path": str(path), "batch_size": 32, "shuffle": False},
            "tables": {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
            "model": {"name": "wide_deep", "deep": [4]},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "train": {"threads": 1, "log_every": 1, **train_},
            "output": {"folder": str(folder), "tensorboard": False},
        },
    )


def test_a_batch_of_weight_0_contributes_nothing(tmp_path):
    weights = np.ones(128)
    weights[32:64] = 0
    data = weighed(tmp_path / "data", weights)
    before = Checkpoint(train(weighed_run(data, tmp_path / "run", steps=1)).checkpoint).arrays()
    after = Checkpoint(train(weighed_run(data, tmp_path / "run", steps=2), resume=True).checkpoint).arrays()
    run = weighed_run(data, tmp_path / "run")
    assert train(run, resume=True).stopped == "end"
    assert [line["loss"] is None for line in lines(run, "train")] == [False, True, False, False]
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("model/"))


def test_a_log_of_weight_0_trains_to_its_end(tmp_path):
    run = weighed_run(weighed(tmp_path / "data", np.zeros(96)), tmp_path / "run", checkpoint_every=1)
    result = train(run)
    assert (result.stopped, result.steps) == ("end", 3)
    assert "auc" not in result.metrics
