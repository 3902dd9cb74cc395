"""What a run is judged by on its way, and that a run that stops early is its best checkpoint, whoever asks."""

import json

import numpy as np
import pytest
import torch
from test_trainer import Interrupt, lines

from hotrow import Predictor
from hotrow.data import DataSet
from hotrow.errors import CheckpointError, DataError, HotrowError, SettingsError
from hotrow.inspect import inspect
from hotrow.scores import write_scores
from hotrow.train import best as best_module
from hotrow.train import hot_cold, trainer
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import evaluate_path
from hotrow.train.progress import Progress
from hotrow.train.trainer import train

STOPPING = {"train__epochs": 9, "train__evaluate_every": 4, "train__early_stopping": {"metric": "auc", "patience": 3}}
OVERFITS = {"tables__optimizer": {"name": "adam", "lr": 0.3}}


class Heard(Progress):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


def splits(run):
    return [(line["step"], line["split"]) for line in lines(run, "evaluate")]


def test_what_is_on_the_way_is_evaluated_on_validation_and_the_end_on_test(make_run, judged):
    run = make_run(data__path=str(judged), train__evaluate_every=16)
    result = train(run)
    assert splits(run) == [(16, "validation"), (32, "validation"), (32, "test")]
    assert result.metrics["samples"] == 500  # test's
    assert result.metrics == evaluate_path(run.output.folder)[2]
    plain = make_run(data__path=str(judged), output__folder=f"{run.output.folder}-plain")
    train(plain)
    assert splits(plain) == [(32, "test")]


def test_a_data_set_without_validation_is_judged_by_test_as_before(make_run):
    run, heard = make_run(train__evaluate_every=16), Heard()
    train(run, progress=heard)
    assert splits(run) == [(16, "test"), (32, "test")]
    assert not any("chooses by" in said for said in heard.said)
    stopping = make_run(**STOPPING, train__steps=8)
    train(stopping, overwrite=True, progress=heard)
    assert sum('Early stopping chooses by the split "test"' in said for said in heard.said) == 1


def test_a_split_to_go_by_that_is_not_there_is_said_before_training(make_run, judged):
    with pytest.raises(DataError, match=r'no split "valid"\. Did you mean "validation"'):
        train(make_run(data__path=str(judged), data__validation="valid", train__evaluate_every=4))
    with pytest.raises(SettingsError, match=r"nothing to evaluate on\. Prepare the log with --validation"):
        train(make_run(data__test="", train__evaluate_every=4))
    with pytest.raises(SettingsError, match=r"hot_cold is steered by the loss"):
        train(make_run(data__test="", plan={"memory": "1MiB", "mode": "hot_cold"}))
    assert not make_run().output.folder.exists()


def test_without_a_test_split_a_run_that_stops_early_comes_to_what_it_is_on_validation(make_run, judged):
    result = train(make_run(**STOPPING, **OVERFITS, data__path=str(judged), data__test=""))
    assert result.stopped == "early" and result.metrics["samples"] == 400


@pytest.mark.parametrize("incremental", [0, 3])
def test_a_run_that_stops_early_is_its_best_checkpoint_whoever_asks(make_run, judged, tmp_path, incremental):
    run = make_run(**STOPPING, **OVERFITS, data__path=str(judged), train__incremental=incremental)
    heard = Heard()
    result = train(run, progress=heard)
    assert (result.stopped, result.best_step) == ("early", result.steps - 12)
    assert result.checkpoint == Checkpoints(run.output.folder / "checkpoints").at(result.best_step)
    by_step = {line["step"]: line["auc"] for line in lines(run, "evaluate") if line["split"] == "validation"}
    assert max(by_step, key=by_step.get) == result.best_step
    final = lines(run, "evaluate")[-1]
    assert (final["split"], final["step"], final["best_step"]) == ("test", result.steps, result.best_step)
    assert f"Best at step {result.best_step}" in heard.said[-1]

    checkpoint, split, metrics = evaluate_path(run.output.folder)
    assert (checkpoint, split, metrics) == (result.checkpoint, "test", result.metrics)
    newest = Checkpoints(run.output.folder / "checkpoints").latest()
    assert evaluate_path(newest)[2]["auc"] != metrics["auc"]
    with Predictor(run.output.folder) as predictor, Predictor(result.checkpoint) as best, Predictor(newest) as last:
        assert predictor.checkpoint == result.checkpoint
        batch = next(DataSet.open(judged).flat("test"))
        assert torch.equal(predictor.score(batch), best.score(batch))
        assert not torch.equal(predictor.score(batch), last.score(batch))
        found = write_scores(predictor, judged, tmp_path / "scores.parquet")
        assert found["checkpoint"] == str(result.checkpoint)
    assert inspect(run.output.folder)["checkpoint"] == str(result.checkpoint)

    before = lines(run)
    again = train(run, resume=True)
    assert (again.metrics, again.checkpoint, again.steps) == (result.metrics, result.checkpoint, result.steps)
    assert lines(run) == before
    patient = {**STOPPING, "train__early_stopping": {"metric": "auc", "patience": 5}}
    on = train(make_run(**patient, **OVERFITS, data__path=str(judged), train__incremental=incremental), resume=True)
    assert on.steps >= result.steps + 8  # from the newest, not from the best


def test_a_run_killed_after_its_best_and_resumed_comes_to_the_same(make_run, judged, tmp_path, same_weights):
    settings = {**STOPPING, **OVERFITS, "data__path": str(judged)}
    whole = make_run(**settings, output__folder=str(tmp_path / "whole"))
    ended = train(whole)
    run = make_run(**settings)
    first = train(run, progress=Interrupt(ended.best_step + 2))
    assert Checkpoint(first.checkpoint).step == ended.best_step + 2  # where it goes on
    assert evaluate_path(run.output.folder)[0] == Checkpoints(run.output.folder / "checkpoints").at(ended.best_step)
    second = train(run, resume=True)
    same_weights(whole, run)
    assert (second.metrics, second.best_step) == (ended.metrics, ended.best_step)
    assert lines(run, "evaluate") == lines(whole, "evaluate")


def test_a_predictor_that_follows_takes_over_a_better_checkpoint_and_no_worse_one(make_run, judged, monkeypatch):
    values = iter([0.6, 0.5, 0.7, 0.6])
    monkeypatch.setattr(trainer, "evaluate", lambda ranker, split: {"auc": next(values)})
    settings = {**STOPPING, "data__path": str(judged), "train__incremental": 9, "train__checkpoint_every": 2}
    run = make_run(**settings)
    train(run, progress=Interrupt(9))
    with Predictor(run.output.folder) as predictor:
        assert predictor.step == 4
        train(run, resume=True, progress=Interrupt(17))
        assert predictor.refresh() and predictor.step == 12
        assert not predictor.refresh()


def test_a_best_checkpoint_that_could_not_be_written_is_said(make_run, monkeypatch):
    values = iter([0.6, 0.7, 0.5, 0.5, 0.5])
    monkeypatch.setattr(trainer, "evaluate", lambda ranker, split: {"auc": next(values)})
    monkeypatch.setattr(best_module, "evaluate", lambda ranker, split: {"auc": 0.1})
    run, heard = make_run(**STOPPING), Heard()
    save = Checkpoints.save

    def missing(self, step, *args, **options):
        if step != 8:
            save(self, step, *args, **options)

    monkeypatch.setattr(Checkpoints, "save", missing)
    result = train(run, progress=heard)
    assert Checkpoint(result.checkpoint).step == 20 and "is not there" in heard.said[-1]
    assert Checkpoints(run.output.folder / "checkpoints").chosen() == result.checkpoint


def test_a_damaged_note_of_the_best_is_refused_and_not_taken_for_none(make_run):
    run = make_run(train__steps=4)
    file = train(run).checkpoint / "trainer.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "best_step": 1}, indent=1))
    with pytest.raises(CheckpointError, match=r"trainer\.json was"):
        Checkpoints(run.output.folder / "checkpoints").chosen()


def test_the_split_that_steers_a_run_stays_the_same_when_it_is_resumed(make_run, judged):
    changes = {"data__path": str(judged), "train__steps": 4, "train__evaluate_every": 2}
    train(make_run(**changes, train__early_stopping={"metric": "auc"}))
    with pytest.raises(SettingsError, match=r"data\.validation was 'validation' and is now ''"):
        train(make_run(**changes, train__early_stopping={"metric": "auc"}, data__validation=""), resume=True)
    train(make_run(**changes), overwrite=True)
    train(make_run(**changes, data__validation=""), resume=True)


def test_hot_and_cold_turns_go_by_validation(make_run, judged, monkeypatch):
    losses, asked = iter(np.linspace(0.9, 0.1, 200)), set()

    def evaluate(ranker, split, **given):
        asked.add(split)
        return {"log_loss": float(next(losses))}

    monkeypatch.setattr(hot_cold, "evaluate", evaluate)
    train(make_run(data__path=str(judged), plan={"memory": "1KiB", "mode": "hot_cold"}))
    assert asked == {"validation"}


def test_a_metric_that_validation_does_not_give_is_said_with_its_name(make_run, judged, monkeypatch):
    monkeypatch.setattr(trainer, "evaluate", lambda ranker, split: {"log_loss": 0.5})
    with pytest.raises(HotrowError, match='watches "auc", which split "validation" does not'):
        train(make_run(**STOPPING, data__path=str(judged)))
