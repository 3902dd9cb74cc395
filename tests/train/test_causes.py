"""The first value that is not finite is named: step, column, keys, weights or layer; and nothing learns from it."""

import re

import numpy as np
import pytest
import torch
from own_parts import Narrow, Rooted
from test_finite import NAN, row_of
from test_trainer import lines

from hotrow import Hook, Trainer
from hotrow.errors import NotFiniteError
from hotrow.train.checkpoint import Checkpoints

IN_ORDER = {"data__shuffle": False, "train__checkpoint_every": 2, "train__log_every": 50}
LATE = {"train__checkpoint_every": 30}


class Spoil(Hook):
    """Does something to a run after a step."""

    def __init__(self, step, what):
        self.after, self.what = step, what

    def step(self, trainer, event):
        trainer.checkpoints.wait()
        if event.step == self.after:
            self.what(trainer)


def poison_row(key, table="user"):
    def poison(trainer):
        store = trainer.embeddings.router.tiers["host"].stores()[table]
        store.import_({**row_of(store.table, np.inf), "keys": np.array([key])})

    return poison


def poison_weight(trainer):
    trainer.model.deep[0].weight.data.view(-1)[3] = NAN


def spoiled(run, model=None, hooks=()):
    """What a run says that cannot go on, and its trainer."""
    with Trainer(run, model=model, hooks=hooks) as trainer, pytest.raises(NotFiniteError) as caught:
        trainer.fit()
    return str(caught.value), trainer


def test_a_dense_column_is_named_with_the_sample(make_run, with_nan_price):
    said, _ = spoiled(make_run(**IN_ORDER, data__path=str(with_nan_price)), hooks=[Spoil(0, None)])
    assert said.startswith(
        "Step 4: The loss is nan. Dense column price is not finite in sample 8 of the batch. The log"
    )
    assert "step-00000002" in said and "--step 4" in said and "layer" not in said


def test_a_row_is_named_by_key_table_and_feature(make_run):
    said, _ = spoiled(make_run(**IN_ORDER | LATE), hooks=[Spoil(4, poison_row(5))])
    assert re.match(r"Step [5-9]: The loss is (nan|inf)\. The rows of key 5 of table user, feature user, are not", said)
    assert "not converge" in said


@pytest.mark.parametrize("policy", [{"name": "hybrid", "staleness": 2, "worst": True}, {"name": "exact"}], ids=str)
def test_a_row_is_named_under_every_policy(make_run, policy):
    said, _ = spoiled(make_run(**IN_ORDER | LATE, policy=policy), hooks=[Spoil(4, poison_row(5))])
    assert re.match(r"Step [5-8]: .*The rows of key 5 of table user, feature user, are not", said)


def test_a_weight_is_named_and_nothing_learns_from_it(make_run):
    said, trainer = spoiled(make_run(**IN_ORDER), hooks=[Spoil(3, poison_weight)])
    assert said.startswith("Step 4: The loss is nan. The values of weight deep.0.weight are not finite.")
    assert trainer.state.step == 3
    assert all(torch.isfinite(p).all() for n, p in trainer.model.named_parameters() if n != "deep.0.weight")
    assert [path.name for path in Checkpoints(trainer.folder.checkpoints).all()] == ["step-00000002"]


def test_the_first_layer_is_named_that_gives_what_is_not_finite(make_run):
    said, _ = spoiled(make_run(**IN_ORDER, model={}), model=Narrow)
    assert said.startswith("Step 1: The loss is nan. What comes out of layer log (Log) is the first value that is not")


def test_gradients_alone_are_named_by_weight_and_feature(make_run):
    said, trainer = spoiled(make_run(**IN_ORDER, model={}), model=Rooted)
    assert said.startswith("Step 1: The gradients of weight below.weight are not finite. The gradients of feature ")
    assert re.search(r"feature user, keys [\d, ]+ and \d+ others, are not finite", said)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_where_no_step_is_looked_at_the_line_of_metrics_says_which_was_the_first(make_run):
    run = make_run(**IN_ORDER | {"train__checkpoint_every": 16, "train__log_every": 5})
    with Trainer(run, hooks=[Spoil(12, poison_weight)]) as trainer, pytest.raises(NotFiniteError, match="at step 13"):
        trainer.one_step.looks = False  # as on a GPU
        trainer.fit()
    assert len(lines(run, "train")) == 2
