"""Metrics against sums over all pairs, written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.errors import DataError
from hotrow.objectives.binary_metrics import BinaryMetrics

samples = st.lists(
    st.tuples(
        st.sampled_from([-30.0, -2.5, -1.0, -0.0, 0.0, 0.25, 1.0, 3.0, 40.0]),
        st.booleans(),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        st.integers(-2, 2),
    ),
    max_size=30,
)


def columns(rows: list) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, labels, weights, users = zip(*rows, strict=True) if rows else ((), (), (), ())
    return (
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(labels, dtype=torch.float32),
        torch.tensor(weights, dtype=torch.float32),
        torch.tensor(users, dtype=torch.int64),
    )


def auc_of_pairs(rows: list) -> float:
    won = total = 0.0
    for z, y, w, _ in rows:
        for z2, y2, w2, _ in rows:
            if y and not y2:
                total += w * w2
                won += w * w2 * (1.0 if z > z2 else 0.5 if z == z2 else 0.0)
    return won / total if total else math.nan


def same(got: float, expected: float) -> bool:
    return (math.isnan(got) and math.isnan(expected)) or math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12)


@settings(max_examples=150, deadline=None)
@given(samples)
def test_auc_equals_counting_every_pair(rows: list) -> None:
    metrics = BinaryMetrics()
    metrics.update(*columns(rows))
    expected = auc_of_pairs(rows)
    assert same(metrics.compute()["auc"], expected)

    unweighted = BinaryMetrics()
    unweighted.update(*columns(rows)[:2])
    assert same(unweighted.compute()["auc"], auc_of_pairs([(z, y, 1.0, u) for z, y, _, u in rows]))


@settings(max_examples=150, deadline=None)
@given(samples.filter(len))
def test_user_auc_is_the_mean_over_users_with_both_labels_by_their_weight(rows: list) -> None:
    metrics = BinaryMetrics()
    metrics.update(*columns(rows))
    won = total = 0.0
    for user in {u for *_, u in rows}:
        mine = [row for row in rows if row[3] == user]
        area, weight = auc_of_pairs(mine), sum(row[2] for row in mine)
        if not math.isnan(area):
            won, total = won + area * weight, total + weight
    assert same(metrics.compute()["user_auc"], won / total if total else math.nan)


@settings(max_examples=100, deadline=None)
@given(samples)
def test_losses_and_calibration_equal_sums_over_samples(rows: list) -> None:
    metrics = BinaryMetrics()
    metrics.update(*columns(rows)[:3])
    got = metrics.compute()
    total = sum(w for _, _, w, _ in rows)
    positive = sum(w for _, y, w, _ in rows if y)
    loss = sum(w * math.log1p(math.exp(-z if y else z)) for z, y, w, _ in rows) / total if total else math.nan
    predicted = sum(w / (1 + math.exp(-z)) for z, _, w, _ in rows)
    assert same(got["log_loss"], loss)
    assert same(got["calibration"], predicted / positive if positive else math.nan)
    if 0 < positive < total:
        p = positive / total
        assert same(got["normalized_entropy"], loss / -(p * math.log(p) + (1 - p) * math.log(1 - p)))
    else:
        assert math.isnan(got["normalized_entropy"])
    assert got["samples"] == len(rows)
    assert "user_auc" not in got


@settings(max_examples=50, deadline=None)
@given(samples, st.integers(0, 30), st.booleans())
def test_batches_and_ranks_give_what_all_samples_at_once_give(rows: list, cut: int, weighted: bool) -> None:
    whole, first, second = BinaryMetrics(), BinaryMetrics(), BinaryMetrics()
    for metrics, part in ((whole, rows), (first, rows[:cut]), (second, rows[cut:])):
        logits, labels, weights, users = columns(part)
        metrics.update(logits, labels, weights if weighted else None, users)
    first.merge(second.state())
    assert len(first) == len(whole) == len(rows)
    expected = whole.compute()
    assert all(same(value, expected[name]) for name, value in first.compute().items())


def test_a_batch_without_weights_counts_once_beside_one_with() -> None:
    mixed, spelled_out = BinaryMetrics(), BinaryMetrics()
    logits, labels = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 1.0])
    mixed.update(logits[:1], labels[:1])
    mixed.update(logits[1:], labels[1:], torch.tensor([2.0, 5.0]))
    spelled_out.update(logits, labels, torch.tensor([1.0, 2.0, 5.0]))
    assert mixed.compute() == spelled_out.compute()


def test_a_weight_counts_a_sample_that_many_times() -> None:
    logits, labels, users = (
        torch.tensor([0.3, 0.1, 0.3]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([1, 1, 1]),
    )
    weighted, repeated = BinaryMetrics(), BinaryMetrics()
    weighted.update(logits, labels, torch.tensor([1.0, 3.0, 2.0]), users)
    times = torch.tensor([1, 3, 2])
    repeated.update(*(t.repeat_interleave(times) for t in (logits, labels)), None, users.repeat_interleave(times))
    got, expected = weighted.compute(), repeated.compute()
    assert all(same(got[name], expected[name]) for name in got if name != "samples")


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_a_loss_but_no_auc(label: float) -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([0.5, -1.0]), torch.full((2,), label), torch.tensor([0.1, 0.7]), torch.tensor([1, 1]))
    got = metrics.compute()
    assert math.isnan(got["auc"]) and math.isnan(got["user_auc"]) and math.isnan(got["normalized_entropy"])
    assert math.isfinite(got["log_loss"])
    assert math.isnan(got["calibration"]) == (label == 0.0)


def test_nothing_gives_nan_and_not_an_error() -> None:
    got = BinaryMetrics().compute()
    assert got.pop("samples") == 0
    assert got and all(math.isnan(value) for value in got.values())


def test_extreme_logits_cost_what_they_should() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([1000.0, -1000.0, 1000.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert math.isclose(metrics.compute()["log_loss"], 1000 / 3)
    sure = BinaryMetrics()
    sure.update(torch.tensor([math.inf, -math.inf]), torch.tensor([1.0, 0.0]))
    assert sure.compute()["log_loss"] == 0.0 and sure.compute()["auc"] == 1.0


def test_a_nan_prediction_makes_every_metric_nan() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([0.5, math.nan, 1.0]), torch.tensor([1.0, 0.0, 0.0]), None, torch.tensor([1, 1, 1]))
    got = metrics.compute()
    assert got.pop("samples") == 3
    assert all(math.isnan(value) for value in got.values())


def test_reset_forgets_and_kept_samples_are_copies() -> None:
    metrics = BinaryMetrics()
    logits, labels = torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0])
    metrics.update(logits, labels)
    logits.fill_(9.0)
    assert metrics.compute()["auc"] == 1.0
    metrics.reset()
    assert len(metrics) == 0


def test_wrong_input_is_refused() -> None:
    logits = torch.zeros(2)
    metrics = BinaryMetrics()
    with pytest.raises(DataError, match="labels must be from 0 to 1"):
        metrics.update(logits, torch.tensor([0.0, math.nan]))
    with pytest.raises(DataError, match="labels must be from 0 to 1"):
        metrics.update(logits, torch.tensor([0.0, 1.5]))
    with pytest.raises(DataError, match="weights must not be negative"):
        metrics.update(logits, torch.zeros(2), torch.tensor([1.0, -1.0]))
    with pytest.raises(DataError, match=r"users of shape \(3,\) do not fit logits of shape \(2,\)"):
        metrics.update(logits, torch.zeros(2), None, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"logits must be \[B\]"):
        metrics.update(torch.zeros(2, 1), torch.zeros(2, 1))
    assert len(metrics) == 0
    metrics.update(logits, torch.zeros(2))
    with pytest.raises(DataError, match="some batches have users"):
        metrics.update(logits, torch.zeros(2), None, torch.zeros(2, dtype=torch.int64))


def test_auc_agrees_with_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, generator=generator).mul(4).round() / 4
    labels = (torch.rand(2000, generator=generator) < torch.sigmoid(logits)).to(torch.int64)
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    theirs = float(functional.binary_auroc(torch.sigmoid(logits), labels, thresholds=None))
    assert math.isclose(metrics.compute()["auc"], theirs, rel_tol=1e-5)


@settings(max_examples=80, deadline=None)
@given(samples, st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=30, max_size=30))
def test_a_label_in_between_is_a_positive_and_a_negative(rows: list, labels: list[float]) -> None:
    soft, spelled_out = BinaryMetrics(), BinaryMetrics()
    mixed = [(z, y, w, u) for (z, _, w, u), y in zip(rows, labels, strict=False)]
    soft.update(*columns(mixed))
    spelled_out.update(*columns([(z, 1.0, w * y, u) for z, y, w, u in mixed]))
    spelled_out.update(*columns([(z, 0.0, w * (1 - y), u) for z, y, w, u in mixed]))
    got, expected = soft.compute(), spelled_out.compute()
    for name in ("auc", "log_loss", "normalized_entropy", "calibration", "user_auc"):
        assert same(got.get(name, math.nan), expected.get(name, math.nan)), name
