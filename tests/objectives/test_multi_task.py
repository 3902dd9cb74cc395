"""Several labels at once: each task as it would be alone, sums by weight, and models that give too little."""

import pytest
import torch
from torch import nn

from hotrow import Predictor, Trainer
from hotrow.errors import SettingsError
from hotrow.objectives import Binary, BinarySettings, MultiTaskSettings, ObjectiveInputs, RegressionSettings
from hotrow.objectives.inputs import Inputs
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.dense import DenseForward
from hotrow.train.evaluate import Ranker, evaluate_path
from hotrow.train.trainer import train
from objectives.conftest import MINUTES, samples
from objectives.heads import Heads, OneHead, Stubborn
from ranks import Ranks

INPUTS = ObjectiveInputs([], ("click", "buy", "minutes"), 0, ("minutes",))
LABELS = ["click", "buy", MINUTES]


def objective(**tasks):
    return MultiTaskSettings(tasks=tasks).build(INPUTS)


def rows_of(run):
    """Every row that a run ended with, by table."""
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    ranker = Ranker(run)
    ranker.restore(checkpoint, checkpoint.arrays())
    stores = ranker.embeddings.router.tiers["host"].stores()
    found = {}
    for name, store in stores.items():
        chunks = [(c["keys"], c["values"].reshape(len(c["keys"]), -1)) for c in store.export()]
        found[name] = {int(k): v.tobytes() for keys, values in chunks for k, v in zip(keys, values, strict=True)}
    return found


def test_the_loss_is_the_weighted_sum_of_each_tasks_own():
    labels, out = torch.rand(5, 3), torch.randn(5, 3)
    inputs = Inputs(labels=labels, weights=torch.rand(5))
    alone = [
        BinarySettings(label="click").build(INPUTS).loss(out[:, 0], inputs),
        BinarySettings(label="buy").build(INPUTS).loss(out[:, 1], inputs),
        RegressionSettings(label="minutes", loss="huber", delta=0.1).build(INPUTS).loss(out[:, 2], inputs),
    ]
    tasks = {"click": {}, "buy": {"weight": 0.5}, "minutes": {"weight": 2.0, "loss": "huber", "delta": 0.1}}
    together = objective(**tasks)
    torch.testing.assert_close(together.loss(out, inputs), alone[0] + 0.5 * alone[1] + 2 * alone[2])
    by_name = {"minutes": out[:, 2], "buy": out[:, 1], "click": out[:, 0], "more": out}
    assert torch.equal(together.loss(by_name, inputs), together.loss(out, inputs))
    assert torch.equal(together.predict(out)["click"], torch.sigmoid(out[:, 0]))
    assert torch.equal(together.predict(out)["minutes"], out[:, 2])


def test_without_tasks_every_label_is_one_of_its_own_kind():
    assert list(MultiTaskSettings().build(INPUTS).tasks) == ["click", "buy", "minutes"]
    assert [type(task).__name__ for task in MultiTaskSettings().build(INPUTS).tasks.values()] == [
        "Binary", "Binary", "Regression"
    ]  # fmt: skip
    assert type(objective(click={"kind": "regression"}).tasks["click"]).__name__ == "Regression"


def test_a_task_of_weight_nought_changes_no_row_and_no_weight_of_the_other(make_run):
    two = {"name": "multi_task", "tasks": {"click": {}, "buy": {"weight": 0.0}}}
    one = make_run(["click", "buy"], "one", model={}, objective={"label": "click"})
    both = make_run(["click", "buy"], "both", model={}, objective=two)
    ends = []
    for run, model in ((one, OneHead), (both, Heads)):
        with Trainer(run, model=model) as trainer:
            metrics = trainer.fit().metrics
            ends.append((rows_of(run.with_classes(model)), trainer.model.click.weight.tolist(), metrics))
    assert ends[0][:2] == ends[1][:2]
    alone = {name: value for name, value in ends[0][2].items() if name != "samples"}
    assert alone == {name: ends[1][2][f"click.{name}"] for name in alone}


@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "deepfm", "wide_deep", "din", "transformer"])
def test_every_built_in_model_gives_a_number_for_each_task(make_run, model):
    pooling = "sequence" if model in ("din", "transformer") else "mean"
    run = make_run(
        LABELS,
        model={"name": model},
        features={"history": {"pooling": pooling}},
        objective={"name": "multi_task", "tasks": {"click": {}, "minutes": {"weight": 0.1}, "buy": {}}},
    )
    result = train(run)
    assert 0.6 < result.metrics["click.auc"] < 1 and result.metrics["minutes.rmse"] > 0
    mean = (result.metrics["click.auc"] + result.metrics["buy.auc"]) / 2
    assert result.metrics["mean_auc"] == pytest.approx(mean)
    with Predictor(run.output.folder) as predictor:
        found = predictor.predict(samples(20, 2))
        assert list(found) == ["click", "minutes", "buy"] and all(t.shape == (20,) for t in found.values())
        with pytest.raises(SettingsError, match="click, minutes, buy"):
            predictor.score(samples(20, 2))
    assert evaluate_path(run.output.folder)[2] == pytest.approx(result.metrics)


def test_weights_change_what_is_learned(make_run, weights_of):
    ends = []
    for tasks in ({}, {"buy": {}, "click": {}}, {"click": {}, "buy": {"weight": 3.0}}):
        run = make_run(["click", "buy"], f"run{len(ends)}", objective={"name": "multi_task", "tasks": tasks})
        train(run)
        ends.append(weights_of(run))
    assert ends[0] != ends[1] != ends[2] != ends[0]


def test_a_run_stops_by_the_mean_or_by_a_task(make_run):
    settings = {"train__evaluate_every": 4, "objective": {"name": "multi_task"}}
    for metric in ("", "buy.log_loss"):
        run = make_run(["click", "buy"], f"by{metric}", train__early_stopping={"metric": metric}, **settings)
        assert train(run).best_step is not None
    with pytest.raises(SettingsError, match='"bye.auc" is no metric.* Did you mean "buy.auc"'):
        train(make_run(["click", "buy"], train__early_stopping={"metric": "bye.auc"}, **settings))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"clik": {}}, 'objective.tasks: the data set has no label "clik". Did you mean "click"'),
        ({"click": {"weight": 0.0}}, "every task has weight 0"),
        ({"click": {"loss": "huber"}}, r"objective.tasks.click.loss: it is read by a regression"),
        ({"minutes": {"kind": "binary"}}, '"minutes" may be any number'),
    ],
)
def test_tasks_that_cannot_be_are_refused_before_anything_starts(make_run, tasks, said):
    run = make_run(LABELS, objective={"name": "multi_task", "tasks": tasks})
    with pytest.raises(SettingsError, match=said):
        train(run)
    assert not run.output.folder.exists()


def test_a_model_that_says_too_little_is_refused():
    both = objective(click={}, buy={})
    for outputs, said in (
        ({"click": torch.zeros(3)}, "the model gives click, and no buy"),
        (torch.zeros(3), r"needs a tensor \[B\] for each of click, buy"),
        (torch.zeros(3, 5), r"the model gives a tensor \(3, 5\)"),
        (None, "the model gives NoneType"),
    ):
        with pytest.raises(SettingsError, match=said):
            both.predict(outputs)


def test_outputs_that_are_no_number_a_sample_are_refused_and_not_spread_over_the_batch():
    inputs = Inputs(labels=torch.rand(4))
    for settings in (BinarySettings(), RegressionSettings()):
        alone = settings.build(ObjectiveInputs([], ("label",)))
        assert alone.loss(torch.zeros(4), inputs) > 0
        with pytest.raises(SettingsError, match=r"one number a sample, \[4\] for this batch, .* gives \(1,\)"):
            alone.loss(torch.zeros(1), inputs)


def test_a_model_that_gives_no_tensors_is_refused_whatever_the_objective_reads():
    for given, said in (((torch.zeros(2),), "gives tuple"), ({"a": 1.0}, "gives values that are none")):
        forward = DenseForward(nn.Identity(), torch.device("cpu"), outputs=lambda *_, given=given: given)
        with pytest.raises(SettingsError, match=f"Identity {said}"):
            forward(None, None)


def test_an_objective_that_weighs_samples_its_own_way_is_no_mean_over_samples():
    class Weighs(Binary):
        def weight(self, batch):
            return 1.0

    class Says(Weighs):
        of_samples = True

    class Below(Weighs):
        pass

    assert (Binary.of_samples, Weighs.of_samples, Says.of_samples, Below.of_samples) == (True, False, True, False)


@pytest.mark.parametrize(
    ("model", "objective", "said"),
    [
        (OneHead, {"name": "multi_task"}, r"model: multi_task needs a tensor \[B\] for each of click, buy"),
        (Heads, {"label": "click"}, r"model: binary needs one tensor \[B\] from the model, which gives click, buy"),
        (Heads, {"name": "multi_task", "tasks": {"click": {}, "minutes": {}}}, "gives click, buy, and no minutes"),
        (Stubborn, {"label": "click"}, None),
    ],
)
def test_what_an_own_model_gives_is_looked_at_before_anything_starts(make_run, model, objective, said):
    labels = LABELS if "tasks" in objective else ["click", "buy"]
    run = make_run(labels, model={}, objective=objective, train__steps=1)
    if said is None:  # it takes no samples that are made up, and those of the data set it takes
        with Trainer(run, model=model) as trainer:
            assert trainer.fit().steps == 1
        return
    with pytest.raises(SettingsError, match=said):
        Trainer(run, model=model)
    assert not run.output.folder.exists()


def test_two_ranks_measure_what_one_process_does(make_run):
    run = make_run(LABELS, objective={"name": "multi_task"}, train__epochs=1, train__steps=3)
    with Ranks(2) as ranks:
        of_ranks = ranks.run(2, "train_work:train_run", run.to_toml(), False, timeout=120)
    assert of_ranks[0] == of_ranks[1]
    _, _, alone = evaluate_path(run.output.folder)
    assert of_ranks[0]["metrics"] == pytest.approx(alone, rel=1e-6)
