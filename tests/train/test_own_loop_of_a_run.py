"""A loop of one's own over a run's batches is the Trainer's: same bits, logs, evaluations and checkpoints."""

import pytest
import torch
from test_trainer import lines
from torch.nn import functional as F

from hotrow import Flags, Hook, Trainer
from hotrow.errors import HotrowError
from hotrow.train.trainer import train

POLICIES = ({"name": "sync"}, {"name": "exact"}, {"name": "hybrid", "staleness": 2, "worst": True})


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_steps_of_ones_own_loop_are_those_of_fit(make_run, tmp_path, same_weights, policy):
    settings = {"policy": policy, "train__steps": 20, "train__evaluate_every": 8, "train__checkpoint_every": 6}
    fitted = make_run(**settings, output__folder=str(tmp_path / "fitted"))
    train(fitted)
    run = make_run(**settings)
    with Trainer(run) as trainer:
        for ready in trainer.pipeline():
            trainer.step(ready)
        result = trainer.result()
    assert result.stopped == "end"
    same_weights(fitted, run)
    for kind in ("train", "evaluate"):
        assert lines(run, kind) == lines(fitted, kind)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_a_plain_loop_with_every_line_written_out_has_the_same_bits(make_run, tmp_path, same_weights, policy):
    fitted = make_run(policy=policy, train__steps=20, output__folder=str(tmp_path / "fitted"))
    train(fitted)
    run = make_run(policy=policy, train__steps=20)
    with Trainer(run) as trainer:
        for ready in trainer.pipeline():
            logits = trainer.model(ready.rows(), ready.batch.dense)
            loss = F.binary_cross_entropy_with_logits(logits, ready.batch.labels)
            loss.backward()
            trainer.embeddings.step()
            trainer.optimizer.step()
        trainer.result()
    same_weights(fitted, run)


def test_a_loop_that_is_left_goes_on_from_its_checkpoint(make_run, tmp_path, same_weights):
    whole = make_run(train__steps=20, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(train__steps=20)
    with Trainer(run) as trainer, trainer.pipeline() as pipeline:
        for ready in pipeline:
            trainer.step(ready)
            if trainer.state.step == 7:
                break
        trainer.checkpoint()
    with Trainer(run, resume=True) as trainer:
        assert trainer.state.step == 7
        trainer.fit()
    same_weights(whole, run)


def test_a_batch_that_is_not_trained_on_is_a_sentence(make_run):
    with Trainer(make_run(train__steps=4)) as trainer, pytest.raises(HotrowError, match="has not been trained on"):
        for _ in trainer.pipeline():
            pass


class Watching(Hook):
    """Notes what it hears, and asks for things."""

    def __init__(self):
        self.heard, self.count = [], 0

    def begin(self, trainer):
        self.heard.append("begin")

    def step(self, trainer, event):
        self.count += 1
        assert event.step == trainer.state.step and torch.isfinite(event.loss) and event.samples == 64
        return Flags(evaluate=event.step == 3, checkpoint=event.step == 5, stop=event.step == 9)

    def evaluated(self, trainer, split, metrics):
        self.heard.append((trainer.state.step, split, "auc" in metrics))

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]

    def end(self, trainer, result):
        self.heard.append(result.stopped)


def test_hooks_hear_of_a_run_and_may_steer_it(make_run):
    run, hook = make_run(), Watching()
    with Trainer(run, hooks=[hook]) as trainer:
        result = trainer.fit()
    assert (result.stopped, result.steps, hook.count) == ("hook", 10, 10)
    assert hook.heard == ["begin", (4, "test", True), "hook"]
    assert [line["step"] for line in lines(run, "checkpoint")] == [6, 10]
    again = Watching()
    with Trainer(run, hooks=[again], resume=True):
        assert again.count == 10
