"""Metrics by the values of a column: those of its samples alone, however many ranks score them."""

import numpy as np
import pytest
import torch

from hotrow import Predictor, Trainer
from hotrow.data import DataSet, Reader
from hotrow.errors import SettingsError
from hotrow.objectives.binary_metrics import BinaryMetrics
from hotrow.objectives.slices import most_frequent
from hotrow.report.report import report
from hotrow.train.evaluate import evaluate_path
from hotrow.train.trainer import train
from objectives.conftest import MINUTES, samples
from objectives.heads import Towers
from ranks import Ranks


def test_a_slice_has_the_metrics_of_its_samples_alone(make_run, lines_of):
    run = make_run(["click"], evaluate={"slices": ["country", "user"], "values": 3})
    plain = train(make_run(["click"], "plain")).metrics
    found = train(run).metrics
    assert {name: value for name, value in found.items() if "=" not in name} == plain
    test = samples(200, 2)
    with Predictor(run.output.folder) as predictor:
        logits = predictor.logits(test)
    for column in ("country", "user"):
        keys = test[column].to_numpy()
        values, counts = np.unique(keys, return_counts=True)
        first = values[np.lexsort((values, -counts))][:3]
        parts = {str(value): keys == value for value in first} | {"other": ~np.isin(keys, first)}
        assert {n.split(".")[0] for n in found if n.startswith(f"{column}=")} == {f"{column}={name}" for name in parts}
        for name, these in parts.items():
            metrics = BinaryMetrics()
            of = torch.from_numpy(these)
            metrics.update(logits[of], torch.tensor(test["click"].to_numpy())[of])
            for metric, value in metrics.compute().items():
                if not np.isnan(value):
                    assert found[f"{column}={name}.{metric}"] == pytest.approx(value, rel=1e-6), (column, name, metric)
    assert lines_of(run, "evaluate")[-1]["country=7.auc"] == found["country=7.auc"]


def test_rarer_values_are_together(log_of):
    data = DataSet.open(log_of(["click"]))
    (few,) = most_frequent(["country"], Reader(data, "test", 64, shuffle=False), 2)
    assert few.keys.tolist() == [7, 49] and few.names == ["country=7", "country=49", "country=other"]
    assert few.places(np.array([49, 1, 7, -1])).tolist() == [1, 2, 0, 2]
    (none,) = most_frequent(["country"], [], 2)
    assert none.names == ["country=other"]


@pytest.mark.parametrize("objective", [{"name": "multi_task"}, {"name": "regression", "label": "minutes"}])
def test_two_ranks_have_the_slices_of_one_process(make_run, objective):
    slices = {"slices": ["country", "item"], "values": 4}
    run = make_run(["click", MINUTES], objective=objective, train__steps=2, evaluate=slices)
    with Ranks(2) as ranks:
        first, second = ranks.run(2, "train_work:train_run", run.to_toml(), False, timeout=120)
    _, _, alone = evaluate_path(run.output.folder)
    assert first == second and sum("=" in name for name in first["metrics"]) > 20
    assert first["metrics"] == pytest.approx({n: v for n, v in alone.items() if not np.isnan(v)}, rel=1e-6)


def test_hotrow_evaluate_slices_a_run_that_was_not_and_the_report_shows_it(make_run, call):
    run = make_run(["click"], train__steps=3)
    train(run)
    code, said, _ = call("evaluate", run.output.folder, "--slice", "country")
    assert code == 0 and "country=7" in said and "country=1" in said and "AUC" in said
    sliced = make_run(["click"], "sliced", train__steps=3, evaluate={"slices": ["country"]})
    train(sliced)
    (quality,) = (section for section in report([sliced.output.folder]).sections if section.id == "quality")
    assert quality.table is not None and "country=7" in {row[1] for row in quality.table.rows}


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        ({"slices": ["contry"]}, 'evaluate.slices: the data set has no feature "contry". Did you mean "country"'),
        ({"slices": ["history"]}, "history has lists of keys"),
        ({"slices": ["price"]}, "price has numbers"),
        ({"values": 3}, "evaluate.values: there are no slices"),
    ],
)
def test_what_cannot_be_a_slice_is_refused_before_anything_starts(make_run, evaluate, said):
    run = make_run(["click"], evaluate=evaluate)
    with pytest.raises(SettingsError, match=said):
        train(run)
    assert not run.output.folder.exists()


def test_metrics_of_retrieval_are_sliced_on_a_log_without_labels(make_run):
    objective = {"name": "in_batch_softmax", "k": [5]}
    run = make_run([], model={}, objective=objective, train__steps=3, evaluate={"slices": ["country"]})
    with Trainer(run, model=Towers) as trainer:
        found = trainer.fit().metrics
    parts = [name for name in found if name.startswith("country=") and name.endswith(".samples")]
    assert len(parts) == 4 and sum(found[name] for name in parts) == found["samples"] == 200
    weighed = sum(found[name] * found[name.replace(".samples", ".recall@5")] for name in parts) / 200
    assert weighed == pytest.approx(found["recall@5"])
