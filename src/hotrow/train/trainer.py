"""`Trainer`: a run as an object: settings, data, tables, model, objective, steps, evaluations, checkpoints.

    trainer = Trainer(Run.load("run.toml"))                    # or with a class of your own: model=MyModel
    trainer.fit(); trainer.evaluate(); trainer.checkpoint()

`hotrow train`, a rank of `torchrun` or `hotrow up`, a script and a benchmark all run this one. A loop of one's own is
`fit` written out: same reading, grouping and fetching ahead, same logs, evaluations and checkpoints.

    with trainer.pipeline() as pipeline:
        for ready in pipeline:
            loss = trainer.step(ready)

Between two steps nothing moves, and everything that must be exact happens there, always in this order: log, evaluate,
change of plan, checkpoint, stop (`batches.py`). A run that was killed and resumed therefore repeats the very steps it
would have made: on CPU its weights are the same bit for bit, and its metrics apart from timings.

Only torch's generators are random during training (initial weights, dropout); the order of samples and the values of
new rows depend on seeds and positions alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError, NotFiniteError
from hotrow.objectives import Metric, Objective
from hotrow.run import Run
from hotrow.train.batches import RunBatches
from hotrow.train.best import check_splits, finite, in_words, watched
from hotrow.train.checkpoint import Checkpoints
from hotrow.train.compatibility import refuse_problems
from hotrow.train.due import Due
from hotrow.train.evaluate import Ranker, at_work, evaluate
from hotrow.train.feed import Feed
from hotrow.train.feeds import feed_of
from hotrow.train.hooks import Hook
from hotrow.train.logs import Log, Quiet, RunFolder, locked
from hotrow.train.losses import Losses
from hotrow.train.machine import Machine
from hotrow.train.probe import check_outputs
from hotrow.train.progress import Progress
from hotrow.train.ranks import RANKS_S, together
from hotrow.train.ready import Ready
from hotrow.train.resume import begin, cut, result_of, to_go_on_from
from hotrow.train.signals import Signals
from hotrow.train.state import Result, State
from hotrow.world import World


class Trainer:
    """One run: what it consists of and where it stands. Use it as a context, or call `close`."""

    def __init__(
        self,
        run: Run,
        *,
        model: type[nn.Module] | None = None,
        objective: type[Objective] | None = None,
        optimizer: type[torch.optim.Optimizer] | None = None,
        metrics: Sequence[type[Metric]] = (),
        hooks: Sequence[Hook] = (),
        resume: bool = False,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`resume` goes on from the run folder's last checkpoint; `overwrite` removes what is there."""
        self.run = run.with_classes(model, objective, optimizer, metrics)
        world, cluster = World.here(), run.cluster
        refuse_problems(self.run, ranks=world.size, nodes=world.nodes)
        self.hooks, self.state, self.signals, self.log = tuple(hooks), State(), Signals(), Quiet()
        self.folder = RunFolder(run.output.folder)
        self.began, self.stopped, self.trained_on = time.monotonic(), "", ""
        self.steps: float = 0
        self.given: Ready | None = None  # what the loop is at work on
        self.flags: dict[str, bool] | None = None  # what ranks said with the last step
        self.due = Due(self)
        with contextlib.ExitStack() as opened:
            opened.enter_context(self.at_work())
            closing = opened.enter_context(contextlib.ExitStack())
            self.ranks = closing.enter_context(
                together(run.train.device, nccl=cluster.exchange == "nccl", timeout=cluster.timeout or RANKS_S)
            )
            self.progress = (progress or Progress()) if self.ranks.first else Progress()
            closing.enter_context(locked(self.folder, self.ranks, self.progress))
            self._assemble(closing)
            begin(self, resume=resume, overwrite=overwrite)
            if self.ranks.first:
                self.log = Log(self.folder, tensorboard=run.output.tensorboard, step=self.state.step)
                if self.log.note:
                    self.progress.say(self.log.note)
            self._closing = closing.pop_all()

    def _assemble(self, closing: contextlib.ExitStack) -> None:
        """The parts, from the last to be closed to the first."""
        self.parts = Ranker(self.run, self.ranks, self.progress)
        closing.callback(self.parts.close)
        self.data, self.embeddings, self.model = self.parts.data, self.parts.embeddings, self.parts.model
        self.objective, self.device = self.parts.objective, self.parts.device
        self.feed: Feed = feed_of(self.parts)
        check_outputs(self.parts)
        self.notes = check_splits(self.run, self.data, self.objective)
        self.watched = watched(self.run, self.data)
        keep, incremental = self.run.train.keep, self.run.train.incremental
        self.checkpoints = Checkpoints(
            self.folder.checkpoints, keep=keep, incremental=incremental, peers=self.ranks.peers
        )
        closing.callback(self.checkpoints.wait)
        closing.callback(lambda: self.log.close())
        closing.callback(self.feed.close)
        self.one_step = self.parts.step(self.feed.phases)
        self.one_step.keeps_outputs = self.feed.scores
        self.optimizer = self.one_step.optimizer
        self.losses = Losses(self.state, self.ranks)
        self.machine = Machine(self.embeddings, self.feed.phases, self.device)
        self.embeddings.expected_pending = max(self.embeddings.expected_pending, self.run.train.accumulate)

    def fit(self) -> Result:
        """Trains to the end of the run, the patience of early stopping, or a signal; what the run came to."""
        with self.pipeline() as pipeline:
            for ready in pipeline:
                self.step(ready)
        return self.result()

    def pipeline(self) -> RunBatches:
        """The batches still to be trained on, each with its rows. What is due between two steps is done by itself."""
        return RunBatches(self)

    def step(self, ready: Ready) -> Tensor:
        """Trains on a batch; its mean loss, on the device. The last that `train.accumulate` joins makes a step."""
        closes = self.feed.closes
        try:
            loss = self.one_step(ready, self.due.to_say(self.state.step + 1)) if closes else self.one_step.add(ready)
        except NotFiniteError as error:
            raise NotFiniteError(f"{error} {to_go_on_from(self)}") from None
        if self.feed.scores:
            self.feed.scored(ready.batch, self.one_step.outputs)
        if closes:
            self.flags = self.one_step.flags
        else:
            self.feed.hold(ready.batch, ready.samples or len(ready.batch))
        self.losses.add(loss, self.objective.weight(ready.batch), closes=closes)
        return loss

    def evaluate(self, split: str = "") -> dict[str, float]:
        """The metrics of a split: the one that the run is judged by, unless another is named."""
        began = time.monotonic()
        split = split or self.watched or self.run.data.train
        with self.at_work(), self.feed.paused():
            metrics = evaluate(self.parts, split)
        self.began += time.monotonic() - began
        self.log.write("evaluate", self.state.step, {"split": split, **metrics})
        self.state.metrics = finite(metrics)
        self.progress.say(f"Step {self.state.step:,}, {split}: {in_words(self.state.metrics)}")
        return metrics

    def checkpoint(self) -> Path:
        """Cuts a checkpoint here and lets it be written in the background; where it will be."""
        if self.feed.held:
            raise HotrowError(
                "A checkpoint is of whole steps, and with train.accumulate some batches of this one are still to come. "
                "Ask for it from a hook, which is called after the step."
            )
        began = time.monotonic()
        with self.at_work(), self.feed.paused():
            cut(self)
        self.log.write("checkpoint", self.state.step, {"stopped_training_for": time.monotonic() - began})
        self.due.checkpoint = False
        return self.checkpoints.at(self.state.step)

    def result(self) -> Result:
        """What the run has come to; there is a checkpoint of it."""
        with self.at_work():
            result = result_of(self)
            for hook in self.hooks:
                hook.end(self, result)
            return result

    def close(self) -> None:
        """Ends what runs in the background; an unfinished checkpoint is finished. The run folder is free again."""
        with self.at_work():
            self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """The process as the run wants it; a disk that fails is a sentence."""
        return at_work(self.run)


def train(run: Run, *, resume: bool = False, overwrite: bool = False, progress: Progress | None = None) -> Result:
    """Trains as `run` says, into its run folder; `resume` goes on from the last checkpoint there."""
    with Trainer(run, resume=resume, overwrite=overwrite, progress=progress) as trainer:
        return trainer.fit()
