"""A followed log that is scored before it is trained on: with what was known before, and as if never interrupted."""

import pyarrow.parquet as pq
import pytest
import torch

from hotrow import Predictor, Trainer
from hotrow.errors import HotrowError, SettingsError
from hotrow.objectives.binary_metrics import BinaryMetrics
from hotrow.report.report import report
from hotrow.train.trainer import train
from objectives.conftest import MINUTES, samples
from objectives.heads import Accuracy, Towers


@pytest.fixture
def following(make_run, tmp_path):
    """A run that follows 8 batches of a log."""
    (tmp_path / "incoming").mkdir()
    for i in range(4):
        pq.write_table(samples(128, 20 + i), tmp_path / "incoming" / f"{i}.parquet")

    def make(folder="run", every=64, labels=("click",), **changes):
        follow = {"path": str(tmp_path / "incoming"), "idle": 0, "look_every": 0.01, "evaluate_every": every}
        settings = {"data__follow": {k: v for k, v in follow.items() if v is not None}, "train__epochs": 1}
        return make_run(list(labels), folder, **settings, **changes)

    return make


def test_each_batch_is_scored_with_what_was_known_before_it(following, lines_of):
    run = following(train__checkpoint_every=1, train__keep=99)
    with Trainer(run) as trainer:
        for ready in trainer.pipeline():
            trainer.checkpoints.wait()  # so that there is one after each step
            trainer.step(ready)
    lines = lines_of(run, "progressive")
    assert [(line["step"], line["samples"]) for line in lines] == [(step, 64) for step in range(1, 9)]
    for line in lines[1:]:
        with Predictor(run.output.folder / "checkpoints" / f"step-{line['step'] - 1:08d}") as predictor:
            first = (line["step"] - 1) * 64
            batch = samples(128, 20 + first // 128).slice(first % 128, 64)
            metrics = BinaryMetrics()
            labels, users = (torch.tensor(batch[name].to_numpy()) for name in ("click", "user"))
            metrics.update(predictor.logits(batch), labels, users=users)
        wanted = {name: value for name, value in metrics.compute().items() if value == value}
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_every_label_of_a_followed_log_is_learned(following, lines_of):
    run = following(every=200, labels=("click", "buy", MINUTES), objective={"name": "multi_task"})
    assert train(run).samples == 512
    assert [line["samples"] for line in lines_of(run, "progressive")] == [256, 256]
    assert all({"click.auc", "buy.log_loss", "minutes.rmse"} <= set(line) for line in lines_of(run, "progressive"))


def test_scoring_changes_nothing_of_what_is_learned(following, weights_of, lines_of):
    plain, scored = following("plain", None), following("scored", 100)
    assert train(plain).metrics == train(scored).metrics
    assert weights_of(plain) == weights_of(scored)
    assert [line["samples"] for line in lines_of(scored, "progressive")] == [128, 128, 128, 128]
    assert lines_of(plain, "progressive") == []


def test_a_run_that_is_resumed_in_a_window_writes_the_same_lines(following, lines_of):
    whole, parts = following("whole", 150), following("parts", 150)
    with Trainer(whole, metrics=[Accuracy]) as trainer:
        trainer.fit()
    for steps in (2, 4, 8):
        run = parts.model_copy(update={"train": parts.train.model_copy(update={"steps": steps})})
        with Trainer(run, metrics=[Accuracy], resume=steps > 2) as trainer:
            assert trainer.fit().steps == steps
    assert lines_of(parts, "progressive") == lines_of(whole, "progressive")
    assert [line["samples"] for line in lines_of(whole, "progressive")] == [192, 192]
    assert all("accuracy" in line for line in lines_of(whole, "progressive"))


def test_the_report_draws_it(following):
    run = following()
    train(run)
    (quality,) = (section for section in report([run.output.folder]).sections if section.id == "quality")
    assert "progressive-auc" in [plot.id for plot in quality.plots]


def test_a_loop_that_does_not_say_what_the_model_gave_is_refused(following):
    with Trainer(following()) as trainer, pytest.raises(HotrowError, match="Make steps with it"):
        for ready in trainer.pipeline():
            trainer.objective.loss(trainer.model(ready.rows(), ready.inputs.dense), ready.inputs).backward()
            trainer.optimizer.step()
            trainer.embeddings.step()


def test_an_objective_that_measures_evaluations_only_is_refused(following):
    run = following(model={}, objective={"name": "in_batch_softmax"})
    with pytest.raises(SettingsError, match="data.follow.evaluate_every: this objective"):
        Trainer(run, model=Towers)
