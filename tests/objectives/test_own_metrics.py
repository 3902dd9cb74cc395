"""Metrics of a user's own: by name in a run file or passed, beside the objective's, in slices, on ranks."""

from pathlib import Path

import pytest
import torch

from hotrow import Predictor, Trainer
from hotrow.errors import SettingsError
from hotrow.objectives import Metric
from hotrow.run import load_run
from hotrow.toml import to_toml
from hotrow.train.evaluate import evaluate_path
from hotrow.train.trainer import train
from objectives.conftest import samples
from objectives.heads import Accuracy, Copied, Late, OfALine
from ranks import Ranks

HERE = Path(__file__).parent
NAME = "objectives.heads:Accuracy"


@pytest.fixture
def run_file(make_run, tmp_path):
    """A run as the user starts it, with these metrics."""

    def write(*metrics, **changes):
        evaluate = {"metrics": list(metrics), **changes.pop("evaluate", {})}
        run = make_run(["click"], evaluate=evaluate, train__steps=6, **changes)
        path = tmp_path / "run.toml"
        path.write_text(to_toml(run.model_dump(mode="json", exclude_none=True)))
        return load_run(path)

    return write


def accuracy_of(run, threshold=0.5):
    test = samples(200, 2)
    with Predictor(run.output.folder) as predictor:
        chances = predictor.score(test)
    return float(((chances > threshold) == (torch.tensor(test["click"].to_numpy()) > 0.5)).double().mean())


def test_a_metric_of_ones_own_stands_beside_the_others(run_file):
    run = run_file({"name": NAME}, evaluate={"slices": ["country"]})
    found = train(run).metrics
    assert found["accuracy"] == pytest.approx(accuracy_of(run))
    assert {"auc", "accuracy", "country=7.auc", "country=7.accuracy"} <= set(found)
    with pytest.raises(SettingsError, match="objectives.heads:Accuracy.*--trust-model"):
        evaluate_path(run.output.folder)
    assert evaluate_path(run.output.folder, trust_model=True)[2]["accuracy"] == found["accuracy"]


def test_its_settings_are_those_of_the_run(run_file):
    run = run_file({"name": NAME, "threshold": 0.3})
    assert train(run).metrics["accuracy"] == pytest.approx(accuracy_of(run, 0.3))
    with pytest.raises(SettingsError, match=r'metric\.threshhold: .* Did you mean "threshold"'):
        train(run_file({"name": NAME, "threshhold": 0.3}))


def test_a_metric_is_found_where_the_run_file_says(run_file, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "metric_elsewhere.py").write_text((HERE / "heads.py").read_text())
    assert "accuracy" in train(run_file({"name": "metric_elsewhere:Accuracy", "folder": "code"})).metrics


def test_a_class_that_is_passed_may_stop_the_run(make_run):
    stopping = {"metric": "accuracy", "patience": 1}
    run = make_run(["click"], train__evaluate_every=2, train__early_stopping=stopping, train__steps=8)
    with Trainer(run, metrics=[Accuracy]) as trainer:
        result = trainer.fit()
    assert result.best_step is not None and "accuracy" in result.metrics


def test_ranks_join_what_each_of_them_saw(make_run):
    run = make_run(["click"], train__steps=2).with_classes(metrics=[Accuracy])
    with Ranks(2) as ranks:
        both = ranks.run(2, "train_work:train_trusted", run.to_toml(), timeout=120)
    first, second = (of["metrics"]["accuracy"] for of in both)
    assert first == second == pytest.approx(accuracy_of(run))


def test_what_is_no_metric_is_refused_before_anything_starts(run_file, make_run):
    for name, said in (
        ("objectives.heads:Heads", "is no class made from hotrow.objectives.metric.Metric"),
        ("objectives.heads:Acuracy", 'has no "Acuracy"'),
        ("", "the run names no metric"),
    ):
        run = run_file({"name": name})
        with pytest.raises(SettingsError, match=said):
            train(run)
        assert not run.output.folder.exists()
    with pytest.raises(SettingsError, match="must be a class made from"):
        Trainer(make_run(["click"]), metrics=[dict])
    with pytest.raises(SettingsError, match='Copied gives "auc", which is there already'):
        Trainer(make_run(["click"]), metrics=[Copied])
    with pytest.raises(SettingsError, match='Accuracy gives "accuracy", which is there already'):
        Trainer(make_run(["click"]), metrics=[Accuracy, Accuracy])
    with pytest.raises(SettingsError, match='OfALine gives "step", which is there already'):
        Trainer(make_run(["click"]), metrics=[OfALine])
    late = pytest.raises(SettingsError, match='Late gives "auc", which is there already')
    with Trainer(make_run(["click"], train__steps=1), metrics=[Late]) as trainer, late:
        trainer.fit()


def test_the_base_says_what_to_override():
    metric = Metric(None)
    for method in (metric.state, metric.compute, lambda: metric.update(None, None), lambda: metric.merge({})):
        with pytest.raises(NotImplementedError):
            method()
