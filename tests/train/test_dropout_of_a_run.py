"""Dropout of features in a run: resumed to the same bits, left out of evaluations, on any placement."""

import pytest

from hotrow import Trainer
from hotrow.data import DataSet
from hotrow.train.evaluate import evaluate_path
from hotrow.train.trainer import train

DROPOUT = {"features": {"item": {"dropout": 0.3}, "history": {"dropout": 0.2, "pooling": "sequence"}}}


@pytest.mark.parametrize("more", [{}, {"plan": {"memory": "6KiB"}}, {"train__accumulate": 2}])
def test_a_run_that_drops_features_resumes_to_the_same_bits(resumes_alike, more):
    resumes_alike({**DROPOUT, **more}, 9, ("train",))


def test_an_evaluation_drops_nothing_and_changes_nothing(make_run, tmp_path):
    run = make_run(**DROPOUT, train__steps=12)
    result = train(run)
    metrics = evaluate_path(run.output.folder)[2]
    assert metrics == evaluate_path(run.output.folder)[2]
    assert metrics["auc"] == pytest.approx(result.metrics["auc"], abs=1e-6)
    evaluated = make_run(**DROPOUT, train__steps=12, train__evaluate_every=3, output__folder=str(tmp_path / "two"))
    with Trainer(evaluated) as trainer:
        assert trainer.fit().metrics == pytest.approx(result.metrics, nan_ok=True)


def test_it_learns_all_the_same(make_run):
    assert train(make_run(**DROPOUT, train__epochs=3)).metrics["auc"] > 0.7


@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "deepfm", "din", "transformer"])
def test_models_take_features_that_drop_from_deduplicated_batches(make_run, sessions, model):
    schema = DataSet.open(sessions).schema
    features = {feature.name: {"dropout": 0.3} for feature in schema.features}
    history = next(f.name for f in schema.features if f.name.startswith("history") or f.kind == "keys")
    features[history]["pooling"] = "sequence"
    settings = {"name": model}
    if model in ("din", "transformer"):
        table = next(f for f in schema.features if f.name == history).table
        settings["targets"] = {history: next(f.name for f in schema.features if f.table == table and f.name != history)}
    run = make_run(data__path=str(sessions), features=features, model=settings, train__steps=4)
    assert train(run).steps == 4
