"""The dense optimizer as any class of torch's or of the user's, and groups of parameters with settings of their own."""

import contextlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from own_parts import Drifting, Tower
from test_ranks import ADAGRAD, assert_close, end_of, pool, trained  # noqa: F401
from test_trainer import Interrupt, lines
from torch import nn

from hotrow import Predictor, Trainer
from hotrow.errors import SettingsError
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import evaluate_path
from hotrow.train.trainer import train

RADAM = {"name": "torch.optim:RAdam", "lr": 0.02, "betas": [0.8, 0.99]}
DRIFTING = {"name": "own_parts:Drifting", "lr": 0.05, "pull": 0.25}
FALLING = {"name": "cosine", "steps": 32, "warmup": 4}


@contextlib.contextmanager
def grads_of(trainer):
    """The gradients that the dense optimizer is given meanwhile."""
    grads, apply = {}, trainer.optimizer.apply

    def seen():
        grads.update({name: p.grad for name, p in trainer.model.named_parameters()})
        apply()

    with mock.patch.object(trainer.optimizer, "apply", seen):
        yield grads


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "optimizer",
    [
        {**RADAM, "schedule": FALLING, "clip_norm": 0.5},
        {"name": "torch.optim:Adadelta"},
        {"name": "torch.optim:ASGD", "lr": 0.05},
        {"name": "torch.optim:NAdam"},
        {**DRIFTING, "groups": [{"parameters": "*.bias", "lr": 0.2}]},
    ],
    ids=lambda o: o["name"],
)
def test_any_optimizer_is_resumed_to_the_same_bits(make_run, tmp_path, same_weights, optimizer):
    whole = make_run(optimizer=optimizer, output__folder=str(tmp_path / "whole")).trusted()
    train(whole)
    run = make_run(optimizer=optimizer).trusted()
    assert train(run, progress=Interrupt(11)).stopped == "SIGTERM"
    train(run, resume=True)
    same_weights(whole, run)
    assert lines(run, "train") == lines(whole, "train")


def test_state_of_any_kind_is_kept_as_plain_arrays(make_run):
    run = make_run(optimizer=DRIFTING, train__steps=3).trusted()
    train(run)
    arrays = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest()).arrays()
    found = {name.removeprefix("optimizer/"): array for name, array in arrays.items() if name.startswith("optimizer/")}
    assert int(found["#groups/0/seen#int"]) == 3 and found["steps"] == 3
    of_one = {name.rpartition("/")[2] for name in found if not name.startswith("#")}
    assert of_one == {"steps", "mean", "norm#float", "even#bool", "made#int"}
    assert all(np.asarray(array).dtype != object for array in found.values())


def test_a_class_of_torch_makes_the_steps_that_it_makes_alone(make_run):
    run = make_run(optimizer=RADAM, model={})
    with Trainer(run, model=Tower) as trainer, trainer.pipeline() as pipeline:
        copies = {name: nn.Parameter(value) for name, value in weights(trainer).items()}
        alone = torch.optim.RAdam(copies.values(), lr=0.02, betas=(0.8, 0.99))
        for ready, _ in zip(pipeline, range(8), strict=False):
            with grads_of(trainer) as grads:
                trainer.step(ready)
            for name, copy in copies.items():
                copy.grad = grads[name]
            alone.step()
        assert all(torch.equal(value, copies[name]) for name, value in weights(trainer).items())


def test_a_class_is_passed_in_a_script_with_the_settings_of_an_unnamed_section(make_run):
    run = make_run(optimizer={"lr": 0.03}, train__steps=2)
    with Trainer(run, optimizer=Drifting) as trainer:
        trainer.fit()
        assert trainer.optimizer.lr == 0.03 and isinstance(trainer.optimizer.optimizer, Drifting)
        assert trainer.run.optimizer.name == "own_parts:Drifting"
    other = make_run(train__steps=2, output__folder=str(run.output.folder) + "2")
    with Trainer(other, optimizer=torch.optim.Rprop) as trainer:
        assert trainer.run.optimizer.name == "torch.optim:Rprop" and trainer.run.optimizer.folder is None
        trainer.fit()
    with pytest.raises(SettingsError, match="a class is passed too"):
        Trainer(make_run(optimizer={"name": "sgd", "lr": 3.0}), optimizer=Drifting)


def test_a_run_with_a_class_of_torch_needs_no_trust_and_one_of_ones_own_only_to_train(make_run):
    run = make_run(optimizer=RADAM, train__steps=2)
    train(run)
    evaluate_path(run.output.folder)
    own = make_run(optimizer=DRIFTING, train__steps=2, output__folder=str(run.output.folder) + "2")
    with pytest.raises(SettingsError, match="--trust-model"):
        train(own)
    train(own.trusted())
    Predictor(own.output.folder).close()


def test_a_module_is_found_where_the_run_file_says(make_run, tmp_path):
    (tmp_path / "optimizers").mkdir()
    source = (Path(__file__).parent / "own_parts.py").read_text()
    (tmp_path / "optimizers" / "own_optimizers.py").write_text(source)
    optimizer = {"name": "own_optimizers:Drifting", "folder": "optimizers"}
    assert train(make_run(optimizer=optimizer, train__steps=2).trusted(tmp_path)).steps == 2


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"name": "torch.optim:RAdma"}, 'torch.optim has no "RAdma".* Did you mean "RAdam"'),
        ({"name": "torch.optim:RAdam", "beta": [0.9]}, r'optimizer\.beta: .* Did you mean "betas"'),
        ({"name": "torch.optim:RAdam", "betas": [2.0, 0.9]}, "cannot be made .*beta"),
        ({"name": "torch.optim:LBFGS"}, "cannot make a step.*closure|cannot be made"),
        ({"name": "torch.optim:SparseAdam"}, "cannot make a step.*dense gradients"),
        ({"name": "own_parts:Hoarding"}, "cannot be resumed.*past as a list"),
        ({"name": "own_parts:Tower"}, "is no class made from torch.optim"),
        ({"name": "torch.optim:lr_scheduler.StepLR"}, "is no class made from torch.optim"),
        ({"groups": [{"parameters": "deap.*", "lr": 0.1}]}, r'no parameter of the model matches "deap\.\*"\. Did you'),
        (
            {"groups": [{"parameters": "*", "lr": 0.1}, {"parameters": "deep*", "lr": 0.1}]},
            "belongs to a group before it",
        ),
        (
            {"name": "own_parts:Drifting", "groups": [{"parameters": "*", "weight_decay": 0.1}]},
            'has no "weight_decay" that groups',
        ),
    ],
)
def test_an_optimizer_that_cannot_be_is_a_sentence_before_anything_starts(make_run, optimizer, said):
    run = make_run(optimizer=optimizer).trusted()
    with pytest.raises(SettingsError, match=said):
        train(run)
    assert not run.output.folder.exists()


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"parameters": "deep.*"}, "needs lr, weight_decay or frozen"),
        ({"parameters": "deep.*", "lr": 1.0, "frozen": True}, "frozen parameters have no lr"),
        ({"parameter": "deep.*", "lr": 1.0}, 'Did you mean "parameters"'),
    ],
)
def test_a_group_that_says_nothing_or_two_things_is_refused(make_run, group, said):
    with pytest.raises(SettingsError, match=said):
        make_run(optimizer={"groups": [group]})
    with pytest.raises(SettingsError, match="folder: classes of torch.optim"):
        make_run(optimizer={**RADAM, "folder": "code"})


def test_frozen_parameters_keep_their_values_and_the_others_learn_at_their_own_rates(make_run):
    groups = [{"parameters": "top.0.weight", "frozen": True}, {"parameters": "top.2.*", "lr": 0.5, "weight_decay": 0.1}]
    run = make_run(model={}, optimizer={"name": "sgd", "lr": 0.1, "schedule": FALLING, "groups": groups})
    with Trainer(run, model=Tower) as trainer, trainer.pipeline() as pipeline:
        for ready in pipeline:
            before = weights(trainer)
            with grads_of(trainer) as grads:
                trainer.step(ready)
            after, factor = weights(trainer), 1 / 4  # the first step of a warm-up over four
            break
    assert grads["top.0.weight"] is None and torch.equal(after["top.0.weight"], before["top.0.weight"])
    name = "top.0.bias"
    torch.testing.assert_close(after[name], before[name] - 0.1 * factor * grads[name])
    name = "top.2.weight"
    torch.testing.assert_close(after[name], before[name] - 0.5 * factor * (grads[name] + 0.1 * before[name]))


def test_a_run_whose_dense_part_is_all_frozen_trains_its_rows(make_run, tmp_path, same_weights):
    optimizer = {"groups": [{"parameters": "*", "frozen": True}]}
    whole = make_run(model={}, optimizer=optimizer, output__folder=str(tmp_path / "whole"))
    with Trainer(whole, model=Tower) as trainer:
        before = weights(trainer)
        result = trainer.fit()
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert result.metrics["auc"] > 0.6


def test_ranks_make_the_same_steps_with_a_class_and_groups(make_run, tmp_path, trained):  # noqa: F811
    groups = [{"parameters": "*.bias", "frozen": True}, {"parameters": "deep.*", "lr": 0.002}]
    settings = {
        "tables": ADAGRAD,
        "model": {"name": "wide_deep", "deep": [8], "dropout": 0.0},
        "optimizer": {"name": "torch.optim:ASGD", "lr": 0.05, "groups": groups},
    }
    one = make_run(**settings, data__batch_size=96, output__folder=str(tmp_path / "one"))
    train(one)
    two = make_run(**settings, data__batch_size=48, cluster={"rows": "sharded"})
    trained(two)
    assert_close(end_of(two), end_of(one))
