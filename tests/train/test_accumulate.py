"""Several batches that make one step: what they come to is what one batch of all their samples comes to."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from test_ranks import ADAGRAD, assert_close, end_of, losses, pool, shards, trained  # noqa: F401
from test_trainer import Interrupt, lines

from conftest import SCHEMA
from hotrow import Trainer
from hotrow.errors import HotrowError, SettingsError
from hotrow.train.replay import replay
from hotrow.train.trainer import train

SMALL = {"model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}, "tables": ADAGRAD}
# 2000 samples: the last step of an epoch has 80, which are fewer batches and one that is not full
WHOLE = {**SMALL, "data__batch_size": 96}
PARTS = {**SMALL, "data__batch_size": 32, "train__accumulate": 3}


def test_steps_of_three_batches_are_those_of_one_three_times_as_large(make_run, tmp_path):
    whole = make_run(**WHOLE, train__epochs=2, output__folder=str(tmp_path / "whole"))
    parts = make_run(**PARTS, train__epochs=2)
    expected, result = train(whole), train(parts)
    assert (result.steps, result.samples) == (expected.steps, expected.samples) == (42, 4000)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert [line["epoch"] for line in lines(parts, "train")] == [line["epoch"] for line in lines(whole, "train")]
    assert result.metrics["auc"] == pytest.approx(expected.metrics["auc"], abs=1e-5)
    assert_close(end_of(parts), end_of(whole))


def test_samples_count_by_their_weight_over_all_batches_of_a_step(make_run, write_log, tmp_path):
    def weighted(table):
        weights = np.random.default_rng(len(table)).random(len(table)).astype(np.float32) ** 4
        weights[40:200] = 0.0  # batches without any weight at all
        return table.append_column("weight", pa.array(weights))

    data = write_log(tmp_path / "weighted", schema=SCHEMA.model_copy(update={"weight": "weight"}), change=weighted)
    settings = {"data__path": str(data), "data__shuffle": False}
    whole = make_run(**WHOLE, **settings, output__folder=str(tmp_path / "whole"))
    parts = make_run(**PARTS, **settings)
    train(whole)
    train(parts)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert_close(end_of(parts), end_of(whole))


@pytest.mark.parametrize("rows", ["sharded", "replicated", "served"])
def test_ranks_accumulate_together(make_run, tmp_path, trained, shards, rows):  # noqa: F811
    whole = make_run(**WHOLE, output__folder=str(tmp_path / "whole"))
    expected = train(whole)
    cluster = {"shards": shards} if rows == "served" else {"rows": rows}
    parts = make_run(**{**PARTS, "data__batch_size": 16}, cluster=cluster)
    result = trained(parts)
    assert (result["steps"], result["samples"]) == (expected.steps, expected.samples)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    assert_close(end_of(parts), end_of(whole))


@pytest.mark.parametrize("more", [{}, {"plan": {"memory": "6KiB"}}], ids=["host", "planned"])
def test_a_run_that_accumulates_resumes_to_the_same_bits(resumes_alike, more):
    resumes_alike({"data__batch_size": 32, "train__accumulate": 3, **more}, 9, ("train",))


def test_rows_on_the_device_accumulate_too(make_run, tmp_path, close_weights):
    run = make_run(**PARTS, plan={"memory": "6KiB", "replan_every": "epoch"}, train__epochs=2)
    train(run)
    plain = make_run(**PARTS, train__epochs=2, output__folder=str(tmp_path / "plain"))
    train(plain)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert len(lines(run, "plan")) == 2


def test_a_loop_that_is_left_between_two_batches_of_a_step_makes_none_of_them(make_run):
    with Trainer(make_run(**PARTS)) as trainer:
        for i, ready in enumerate(trainer.pipeline()):
            trainer.step(ready)
            if i == 4:
                break
        with trainer.pipeline() as pipeline:
            assert trainer.state.step == 1 and trainer.feed.batch == 3 and trainer.state.samples == 96
            for ready in pipeline:
                trainer.step(ready)
        assert (trainer.state.step, trainer.state.samples) == (21, 2000)


def test_a_checkpoint_is_of_whole_steps_and_so_is_a_logged_loss(make_run, tmp_path):
    whole = make_run(**PARTS, train__steps=4, train__log_every=4, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(**PARTS, train__steps=4, train__log_every=4)
    with Trainer(run) as trainer:
        for given, ready in enumerate(trainer.pipeline(), start=1):
            trainer.step(ready)
            if given == 8:
                break
        with pytest.raises(HotrowError, match="A checkpoint is of whole steps"):
            trainer.checkpoint()
    with Trainer(run, overwrite=True) as trainer:
        with trainer.pipeline() as pipeline:
            for given, ready in enumerate(pipeline, start=1):
                trainer.step(ready)
                if given == 8:
                    break
        assert trainer.checkpoint().name.endswith("2")
    with Trainer(run, resume=True) as trainer:
        trainer.fit()
    assert losses(run) == losses(whole)


def test_steps_of_ones_own_are_refused_where_batches_wait(make_run):
    with Trainer(make_run(**PARTS)) as trainer, pytest.raises(HotrowError, match=r"trainer\.step\(ready\)"):
        for ready in trainer.pipeline():
            logits = trainer.model(ready.rows(), ready.inputs.dense)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, ready.inputs.labels).backward()
            trainer.optimizer.step()
            trainer.embeddings.step()


def test_a_signal_between_two_batches_waits_for_the_step(make_run):
    run = make_run(**PARTS)
    assert train(run, progress=Interrupt(3)).steps == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"name": "exact"}}, 'policy "exact" gives every batch'),
        ({"policy": {"name": "hybrid"}}, 'policy "hybrid" gives every batch'),
        ({"cluster": {"cache": {}}}, "a cache gives every batch"),
        ({"plan": {"memory": "6KiB", "mode": "hot_cold"}}, "hot_cold"),
        ({"data__follow": {"path": "incoming"}}, "may never come"),
    ],
)
def test_what_gives_every_batch_an_update_is_refused(make_run, changes, said):
    with pytest.raises(SettingsError, match=said):
        train(make_run(**PARTS, **changes))


def test_a_step_of_several_batches_is_replayed_with_its_last(make_run):
    run = make_run(**PARTS, train__log_every=1, train__steps=6, train__checkpoint_every=2, train__keep=9)
    train(run)
    found = replay(run.output.folder, 5)
    assert found["differs_at"] is None and found["logged"] and found["samples"] == 32
    assert {g["weight"] for g in found["gradients"]} >= {"deep.0.bias"} and found["features"]
    assert any("Several batches make a step" in note for note in found["notes"])
