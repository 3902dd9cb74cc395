"""What a run is judged by on its way, and which of its checkpoints it stands for at its end.

Evaluations on the way, and so early stopping, go by the validation split where the data set has one: who chooses by the
test split measures by what was chosen for. The test split is evaluated on once, at the end. A run that stops early
stands for its best checkpoint: its metrics are those of that one, and whoever opens the run folder gets it
(`Checkpoints.chosen`); only resuming goes on from the newest. The price is that its rows are read back at the end.
"""

from __future__ import annotations

import math
from pathlib import Path

from hotrow.data.dataset import DataSet
from hotrow.errors import HotrowError, SettingsError, nearest
from hotrow.metric_names import metric_names
from hotrow.objectives import Better, Objective
from hotrow.run import Data, Run
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker, evaluate
from hotrow.train.progress import Progress
from hotrow.train.ranks import Ranks
from hotrow.train.state import State

_VALIDATION = Data.model_fields["validation"].default


def watched(run: Run, data: DataSet) -> str:
    """The split that a run goes by on its way: validation where there is one, else test; empty for none."""
    name = run.data.validation
    if name in data.splits or name not in ("", _VALIDATION):
        return name if data.samples(name) else run.data.test
    return run.data.test


def check_splits(run: Run, data: DataSet, objective: Objective) -> list[str]:
    """Refuses a run that has nothing to go by; sentences about what it goes by."""
    if run.train.early_stopping is not None:
        metric_of(run, objective)
    if run.data.test and not data.samples(run.data.test):
        raise HotrowError(
            f'The split "{run.data.test}" of {run.data.path} has no samples to evaluate on; '
            f'set data.test = "" to train without.'
        )
    split = watched(run, data)
    if not split and run.train.evaluate_every is not None:
        raise SettingsError(
            f"train.evaluate_every: {run.data.path} has no validation split and data.test is empty, so there is "
            f"nothing to evaluate on. Prepare the log with --validation 0.1, or set data.test."
        )
    hot_cold = run.plan is not None and run.plan.mode == "hot_cold"
    if not split and hot_cold:
        raise SettingsError(
            f"plan.mode: hot_cold is steered by the loss on a split that is not trained on, and {run.data.path} has "
            f"none: prepare the log with --validation 0.1, or set data.test."
        )
    if run.train.early_stopping is not None and split == run.data.test:
        return [
            f'Early stopping chooses by the split "{split}", for {run.data.path} has no other, so what the run reaches '
            f"on it is too good. hotrow prepare makes a validation split: --validation 0.1."
        ]
    return []


def metric_of(run: Run, objective: Objective) -> tuple[str, Better]:
    """What early stopping goes by, and which is better; refuses a metric that is not there."""
    known = dict(objective.watched)
    for own in run.evaluate.metrics:
        known |= own.watched
    asked = run.train.early_stopping
    name = (asked.metric if asked is not None else "") or next(iter(known), "")
    if name not in known:
        raise SettingsError(
            f'train.early_stopping.metric: "{name}" is no metric that this objective can stop by.{nearest(name, known)}'
        )
    return name, known[name]


def loss_metric(objective: Objective) -> str:
    """The metric that stands for a loss on samples that are not trained on: the first that is better when smaller."""
    found = [name for name, which in objective.watched.items() if which == "smaller"]
    if not found:
        raise SettingsError(
            "plan.mode: hot_cold is steered by a metric that is better when smaller, and the objective gives none. "
            'Choose mode = "split".'
        )
    return found[0]


def judged(state: State, run: Run, split: str, objective: Objective) -> bool:
    """Takes the last evaluation into account; whether it was the best so far."""
    assert run.train.early_stopping is not None
    name, better = metric_of(run, objective)
    if name not in state.metrics:
        raise HotrowError(
            f'Early stopping watches "{name}", which split "{split}" does not '
            f"give: it needs both labels, and users for user_auc."
        )
    value = state.metrics[name]
    if run.train.early_stopping.better(value, state.best, better):
        state.best, state.best_step, state.waited = value, state.step, 0
        state.best_metrics = state.metrics
        return True
    state.waited += 1
    return False


def kept(checkpoints: Checkpoints, state: State, ranks: Ranks, progress: Progress) -> Path | None:
    """The best checkpoint; None, and a sentence, where a shard that died kept it from being written."""
    assert state.best_step is not None
    best = checkpoints.at(state.best_step)
    if ranks.decide((best / "manifest.json").is_file()):
        return best
    progress.say(f"The best checkpoint, {best}, is not there; what the run has come to is its last one.")
    return None


def measured(ranker: Ranker, best: Path, state: State, split: str) -> dict[str, float]:
    """What the best checkpoint reaches on a split. The ranker has its weights and rows from then on."""
    if state.best_step != state.step:
        checkpoint = Checkpoint(best)
        ranker.restore(checkpoint, checkpoint.arrays())
    return finite(evaluate(ranker, split))


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that have an answer."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def in_words(metrics: dict[str, float]) -> str:
    """ "AUC 0.7123, log loss 0.4321, ..." """
    names = {"auc": "AUC", "user_auc": "user AUC"}
    return ", ".join(f"{names.get(k, k.replace('_', ' '))} {metrics[k]:.4f}" for k in metric_names([metrics]))
