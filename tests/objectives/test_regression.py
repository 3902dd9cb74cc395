"""Labels that are any number: metrics against NumPy, losses against their formulas, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import Predictor
from hotrow.errors import DataError, SettingsError
from hotrow.objectives import ObjectiveInputs, RegressionSettings
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.regression_metrics import RegressionMetrics
from hotrow.settings import parse
from hotrow.train.trainer import train
from objectives.conftest import MINUTES, samples

number = st.floats(-1e6, 1e6, width=32)
rows = st.lists(st.tuples(number, number, st.sampled_from([0.0, 0.5, 3.0])), min_size=1, max_size=30)


def columns(given_rows):
    return (torch.tensor(column, dtype=torch.float32) for column in zip(*given_rows, strict=True))


@given(rows, st.integers(0, 30))
def test_metrics_are_those_of_numpy_however_samples_are_divided_over_ranks(given_rows, cut):
    z, y, w = columns(given_rows)
    one, other = RegressionMetrics(), RegressionMetrics()
    one.update(z[:cut], y[:cut], w[:cut])
    other.update(z[cut:], y[cut:], w[cut:])
    one.merge(other.state())
    found = one.compute()
    z, y, w = (column.numpy().astype(np.float64) for column in (z, y, w))
    assert found["samples"] == len(z) == len(one)
    if not w.sum():
        assert math.isnan(found["rmse"]) and math.isnan(found["mae"])
        return
    assert found["rmse"] == pytest.approx(math.sqrt(np.average((z - y) ** 2, weights=w)), rel=1e-9)
    assert found["mae"] == pytest.approx(np.average(np.abs(z - y), weights=w), rel=1e-9)
    if abs(w @ y) > 1e-3:
        assert found["calibration"] == pytest.approx((w @ z) / (w @ y), rel=1e-6)


@given(rows, st.sampled_from(["squared", "absolute", "huber"]), st.sampled_from([0.5, 2.0]))
def test_losses_are_their_formulas_each_sample_by_its_weight(given_rows, loss, delta):
    z, y, w = columns(given_rows)
    settings = {"loss": loss, **({"delta": delta} if loss == "huber" else {})}
    objective = RegressionSettings(**settings).build(ObjectiveInputs([], ("y",), 0, ("y",)))
    found = [float(objective.loss(z, Inputs(labels=y, weights=weights))) for weights in (None, w)]
    off = np.abs(z.numpy().astype(np.float64) - y.numpy())
    each = {"squared": off**2, "absolute": off}.get(loss, np.where(off <= delta, off**2 / 2, delta * (off - delta / 2)))
    wanted = each.mean(), (each @ w.numpy()) / max(w.numpy().sum(), 1e-12)
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_a_run_learns_a_label_that_is_any_number(make_run, lines_of):
    run = make_run(
        ["click", MINUTES],
        objective={"name": "regression", "label": "minutes"},
        train__epochs=10,
        optimizer={"name": "adam", "lr": 0.01},
        train__evaluate_every=20,
        train__early_stopping={"patience": 9},
    )
    result = train(run)
    spread = float(np.std(samples(200, 2)["minutes"].to_numpy()))
    assert result.metrics["rmse"] < 0.8 * spread
    assert lines_of(run, "evaluate")[0]["rmse"] > lines_of(run, "evaluate")[-1]["rmse"]
    with Predictor(run.output.folder) as predictor:
        found = predictor.predict(samples(200, 2).drop_columns(["minutes", "weight"]))["prediction"].numpy()
    error = np.sqrt(((found - samples(200, 2)["minutes"].to_numpy()) ** 2).mean())
    assert error == pytest.approx(result.metrics["rmse"], rel=1e-5)


def test_each_loss_trains_another_model(make_run, weights_of):
    ends = []
    for settings in ({}, {"loss": "absolute"}, {"loss": "huber"}, {"loss": "huber", "delta": 0.1}):
        run = make_run([MINUTES], f"run{len(ends)}", objective={"name": "regression", **settings}, train__steps=3)
        train(run)
        ends.append(weights_of(run))
    assert all(one != other for i, one in enumerate(ends) for other in ends[:i])


def test_what_nobody_would_read_or_cannot_be_is_refused(make_run):
    with pytest.raises(SettingsError, match='delta is read with loss = "huber" only'):
        make_run([MINUTES], objective={"name": "regression", "delta": 2.0})
    with pytest.raises(SettingsError, match='"minutes" may be any number. Choose regression'):
        train(make_run([MINUTES]))
    with pytest.raises(SettingsError, match='no setting "delt"'):
        parse(RegressionSettings, {"delt": 1.0})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(2), torch.zeros(3)), "labels of shape"),
        ((torch.zeros(2, 1), torch.zeros(2, 1)), "predictions must be"),
        ((torch.zeros(1), torch.tensor([math.nan])), "labels must be finite"),
        ((torch.zeros(1), torch.zeros(1), torch.tensor([-1.0])), "weights must not be negative"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said):
    with pytest.raises(DataError, match=said):
        RegressionMetrics().update(*arguments)
