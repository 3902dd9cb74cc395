"""The training loop, top to bottom: settings, data, model, steps, evaluations, checkpoints.

A step is fetch, forward, backward, dense step, table step. Between two steps nothing moves, and everything
that must be exact happens there, always in this order: evaluate, change of plan, checkpoint, stop. A run that was
killed and resumed therefore repeats the very steps it would have made: on CPU its weights are the same bit for bit,
and its metrics apart from timings. The price is that `Sync` fetches nothing ahead; reading and grouping do run.

A step never asks a GPU how far it is: losses are summed there, and the sum is read when it is logged, kept in a
checkpoint, or shown, once a second at most. So a loss that is no number is found at the next line of metrics, or
before the next checkpoint (`finite`). What a run is judged by, and what it comes to, is in `best`.

Only torch's generators are random during training (initial weights, dropout); the order of samples and the
values of new rows depend on seeds and positions alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hotrow.errors import CheckpointError, HotrowError
from hotrow.policy import Hybrid
from hotrow.run import Run
from hotrow.train.best import check_splits, finite, in_words, judged, kept, measured, watched
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.compatibility import refuse_problems
from hotrow.train.dense import DenseStep
from hotrow.train.evaluate import Ranker, evaluate, host
from hotrow.train.feed import Feed
from hotrow.train.finite import check_dense, mean_loss
from hotrow.train.follow import Following
from hotrow.train.hot_cold import HotCold
from hotrow.train.logs import Log, Quiet, RunFolder
from hotrow.train.machine import Machine
from hotrow.train.pipeline import Fetched, Inputs
from hotrow.train.planned import Planned
from hotrow.train.planned_ranks import PlannedRanks
from hotrow.train.progress import Progress
from hotrow.train.ranks import FLAGS, RANKS_S, DenseSync, Ranks, together
from hotrow.train.signals import Signals
from hotrow.train.state import Result, State, generators, seed_of, set_generators
from hotrow.world import World

_SHOWN_EVERY = 1.0
"""Seconds between two looks at the loss of a GPU, for whoever is watching."""


def train(run: Run, *, resume: bool = False, overwrite: bool = False, progress: Progress | None = None) -> Result:
    """Trains as `run` says, into its run folder; `resume` goes on from the last checkpoint there."""
    world, cluster = World.here(), run.cluster
    try:
        refuse_problems(run, ranks=world.size, nodes=world.nodes)
        progress = progress or Progress()
        with (
            host(run),
            together(run.train.device, nccl=cluster.exchange == "nccl", timeout=cluster.timeout or RANKS_S) as ranks,
            _locked(run, ranks, progress),
        ):
            trainer = Trainer(run, ranks, resume=resume, overwrite=overwrite, progress=progress)
            with contextlib.closing(trainer):
                return trainer.train()
    except OSError as error:
        what = error.filename or run.output.folder
        raise HotrowError(f"The run stopped at {what}: {error.strerror or error}.") from error


@contextlib.contextmanager
def _locked(run: Run, ranks: Ranks, progress: Progress) -> Iterator[None]:
    """Keeps other runs out of the run folder: the first rank does so for all."""
    lock = ranks.do_first(RunFolder(run.output.folder).lock)
    with lock or contextlib.nullcontext():
        if lock and lock.note:
            progress.say(lock.note)
        yield


class Trainer:
    """One run: what it consists of, where it stands, and the loop."""

    def __init__(self, run: Run, ranks: Ranks, *, resume: bool, overwrite: bool, progress: Progress) -> None:
        self.run, self.ranks = run, ranks
        self.progress = progress if ranks.first else Progress()
        self.ranker = Ranker(run, ranks, self.progress)
        self.dense = DenseStep(self.ranker.model, run.optimizer)
        self.sync = DenseSync(self.ranker.model, ranks)
        self.state = State()
        self._trained_on = ""
        self.feed = _feed(self.ranker)
        notes = check_splits(run, self.ranker.data)
        self.watched = watched(run, self.ranker.data)
        self.folder = RunFolder(run.output.folder)
        self.checkpoints = Checkpoints(
            self.folder.checkpoints, keep=run.train.keep, incremental=run.train.incremental, peers=ranks.peers
        )
        latest = self.checkpoints.latest() if resume else None
        name = ranks.decide("" if latest is None else latest.name)
        found = self.folder.checkpoints / name if name else None
        said = self.feed.start() if found is None else []
        ranks.do_first(lambda: self._begin_folder(resume, overwrite))
        if found is not None:
            self._restore(found)
        else:
            self._start_afresh()
        if resume and found is None:
            self.progress.say(f"{self.folder.path} has no checkpoint yet; the run starts from its beginning.")
        self.batches = self.feed.batches
        self.machine = Machine(self.ranker.embeddings, self.feed.phases, self.ranker.device)
        self.steps = self.state.step + self.feed.left
        if run.train.steps is not None:
            self.steps = min(self.steps, run.train.steps)
        self._loss = torch.tensor(self.state.loss, dtype=torch.float64, device=self.ranker.device)
        self._shown: float | None = None
        self._shown_at = -math.inf
        self.log = Quiet()
        if ranks.first:
            self.log = Log(self.folder, tensorboard=run.output.tensorboard, step=self.state.step)
        self._flags = dict.fromkeys(FLAGS, False)
        for sentence in (*notes, *said, self.log.note):
            if sentence:
                self.progress.say(sentence)

    def _begin_folder(self, resume: bool, overwrite: bool) -> None:
        self.folder.begin(self.run, resume=resume, overwrite=overwrite)
        self.folder.keep_schema(self.ranker.data.schema)
        self.checkpoints.clean()

    def _start_afresh(self) -> None:
        """Leaves nothing of an earlier run: neither its metrics, nor its rows on shards that are still running."""
        if self.ranks.first:
            self.feed.write(self.folder)
            self.folder.cut_back(0)
            for tier in self.ranker.embeddings.router.tiers.values():
                for rows in tier.stores().values() if tier.remote else ():
                    rows.clear()
        self.ranks.decide("")  # nobody trains before that is done
        if self.ranks.world.rank:
            torch.manual_seed(seed_of(self.run, self.ranks, 0))

    def train(self) -> Result:
        """Steps until the end, the patience of early stopping, or a signal."""
        stopped = ""
        self._began = time.monotonic() - self.state.seconds
        self._wanted = False
        self._signals = Signals()
        self.ranker.train()
        self.machine.begin(self.state.step)
        total = 0 if math.isinf(self.steps) else int(self.steps)
        self.progress.start(total, self.state.step, "Training step")
        try:
            with self._signals, self.feed:
                while not (stopped := self._over()):
                    if not self.feed.ready():
                        self._nothing_to_do()
                        continue
                    self._step(next(self.feed))
                    self._between_steps()
        finally:
            self.progress.stop()
        return self._result(stopped)

    def _nothing_to_do(self) -> None:
        """While nothing arrives what was learned is written; at the end of it all the rest that is due is done."""
        self.checkpoints.check()
        self._tell()
        if self.feed.ended:
            if self.state.count:
                self._log_training()
            if self.state.step:
                self._evaluations(last=True)
        elif self.feed.checkpoint_due and not self.checkpoints.busy:
            self._checkpoint()

    def close(self) -> None:
        """Ends what runs in the background; an unfinished checkpoint is finished."""
        with contextlib.ExitStack() as closing:
            closing.callback(self.ranker.close)
            closing.callback(self.checkpoints.wait)
            closing.callback(self.log.close)
            self.feed.close()

    def _step(self, fetched: Fetched) -> None:
        state, size = self.state, len(fetched.batch)
        whole = size if self.ranks.world.size == 1 else self.feed.step_samples
        with self.feed.phases("model"):
            logits, inputs = self.ranker.score(fetched)
            loss = _loss(logits, inputs)
            self._share(loss, inputs, size, whole).backward()  # type: ignore[no-untyped-call]
        self._wanted |= _due(state.step + 1, self.run.train.checkpoint_every) or self.feed.checkpoint_due
        self.checkpoints.check()
        if self.checkpoints.missed:
            self.progress.say(f"{self.checkpoints.missed} It is taken again.")
            self.checkpoints.missed, self._wanted = "", True
        said = (
            self._signals.caught == "SIGINT",
            self._signals.caught == "SIGTERM",
            self.ranks.first and self._wanted and self._may_cut(),
        )
        self.sync.begin(said)
        self.feed.update(fetched.batch)
        with self.feed.phases("reduce"):
            self._flags = self.sync.end(said)
        with self.feed.phases("model"):
            self.dense.step()

        state.step += 1
        state.samples += whole
        weight = float(size if fetched.batch.weights is None else fetched.batch.weights.sum())
        state.count += weight
        self._loss.add_(loss.detach(), alpha=weight)
        self.progress.step(state.step, whole, self._loss_to_show())
        if self.ranker.dense.note:
            self.progress.say(self.ranker.dense.note)
            self.ranker.dense.note = ""

    def _share(self, loss: Tensor, inputs: Inputs, size: int, whole: int) -> Tensor:
        """This rank's loss, such that the mean over ranks is the mean over the step's samples."""
        ranks = self.ranks.world.size
        if ranks == 1:
            return loss
        mine, all_of_them = float(size), float(whole)
        if inputs.weights is not None:
            mine = float(inputs.weights.sum())
            (all_of_them,) = self.ranks.sums(mine)
        factor = mine * ranks / max(all_of_them, 1e-12)
        return loss if factor == 1.0 else loss * factor

    def _loss_to_show(self) -> float | None:
        """The mean loss since the last line of metrics; from a GPU one that may be a second old."""
        if self.ranker.device.type == "cpu" or time.monotonic() - self._shown_at >= _SHOWN_EVERY:
            self._shown = float(self._loss) / max(self.state.count, 1e-12)
            self._shown_at = time.monotonic()
        return self._shown

    def _between_steps(self) -> None:
        """What is due after a step. The order matters: a checkpoint holds what the evaluation decided.

        A periodic checkpoint waits, as training need not, until the one before it is written.
        """
        run, state = self.run.train, self.state
        state.seconds = time.monotonic() - self._began
        last = state.step >= self.steps
        if last or state.step % run.log_every == 0:
            self._log_training()
        best = self._evaluations(last)
        self._tell()
        if best or self._over() or self._flags["checkpoint"]:
            self._checkpoint()
            self._wanted = False

    def _tell(self) -> None:
        """What the feed has to say goes to the metrics, sentences to whoever watches."""
        for kind, values in self.feed.between_steps():
            self.log.write(kind, self.state.step, values)
            if "said" in values:
                self.progress.say(values["said"])

    def _over(self) -> str:
        """Why the run must not go on, or nothing. Several ranks go by what all knew at the last step."""
        stopping = self.run.train.early_stopping
        if stopping is not None and self.state.waited >= stopping.patience:
            return "early"
        if self.state.step >= self.steps:
            return "end"
        if self.feed.ended:
            return "idle"
        if self.ranks.world.size == 1:
            return self._signals.caught
        return next((name for name in ("SIGINT", "SIGTERM") if self._flags[name]), "")

    def _log_training(self) -> None:
        state = self.state
        loss, count = self.ranks.sums(float(self._loss), state.count)
        values = {
            "epoch": self.feed.epoch_of_last,
            "loss": mean_loss(loss, count, state.step, self.checkpoints.latest()),
            "lr": self.dense.lr,
            "samples": state.samples,
            "seconds": state.seconds,
            "samples_per_second": state.samples / max(state.seconds, 1e-9),
            **self.feed.metrics(),
        }
        stale = self.feed.staleness()
        for kind, said in (
            ("train", values),
            *self.machine.lines(state.step),
            *([("staleness", stale)] if stale else []),
        ):
            self.log.write(kind, state.step, said)
        self._loss.zero_()
        state.count = 0.0

    def _evaluations(self, last: bool) -> bool:
        """Makes those that are due; whether early stopping calls the result the best so far."""
        run, best = self.run.train, False
        closing = last and (run.early_stopping is not None or self.watched == self.run.data.test)
        if self.watched and (closing or _due(self.state.step, run.evaluate_every)):
            best = self._evaluate(self.watched)
        if last and run.early_stopping is None and self.run.data.test not in ("", self.watched):
            self._evaluate(self.run.data.test)
        return best

    def _evaluate(self, split: str) -> bool:
        """Evaluates; whether early stopping calls the result the best so far."""
        state = self.state
        began = time.monotonic()
        with self.feed.paused():
            metrics = evaluate(self.ranker, split)
        self._began += time.monotonic() - began
        self.log.write("evaluate", state.step, {"split": split, **metrics})
        state.metrics = finite(metrics)
        self.progress.say(f"Step {state.step:,}, {split}: {in_words(state.metrics)}")
        stopping = self.run.train.early_stopping
        return stopping is not None and judged(state, stopping, split)

    def _checkpoint(self) -> None:
        """Cuts a checkpoint here and lets it be written in the background."""
        began = time.monotonic()
        with self.feed.paused():
            self._cut()
        self.log.write("checkpoint", self.state.step, {"stopped_training_for": time.monotonic() - began})

    def _may_cut(self) -> bool:
        """Whether a checkpoint may begin: beside another one only where a pause at a later step would change bits."""
        policy = self.run.policy
        return not self.checkpoints.busy or (isinstance(policy, Hybrid) and policy.worst)

    def _cut(self) -> None:
        state = dataclasses.replace(self.state, feed=self.feed.state())
        state.loss, state.count = self.ranks.sums(float(self._loss), self.state.count)
        latest = self.checkpoints.latest()
        mean_loss(state.loss, state.count, state.step, latest)
        dense = {**self.ranker.arrays(), **{f"optimizer/{k}": v for k, v in self.dense.state().items()}}
        check_dense(dense, state.step, latest)
        self.checkpoints.save(
            self.state.step,
            {**dense, **self.feed.arrays(), **generators(self.ranker.device, self.ranks)},
            {**dataclasses.asdict(state), "data": self._data()},
            self.ranker.embeddings,
            protect=self.state.best_step,
        )

    def _restore(self, found: Path) -> None:
        checkpoint = Checkpoint(found)
        state = dict(checkpoint.state)
        self._trained_on = state.pop("data")
        if self._trained_on not in ("", self._data()):
            raise HotrowError(
                f'The split "{self.run.data.train}" of {self.run.data.path} is not the one that {found} was trained on.'
            )
        arrays = checkpoint.arrays()
        self.state = State(**state)
        self.feed.restore(self.state.step, self.state.feed, arrays)
        self.ranker.restore(checkpoint, arrays)
        self.dense.load(_under("optimizer/", arrays))
        set_generators(arrays, self.ranker.device, seed_of(self.run, self.ranks, self.state.step), self.ranks)
        if self.ranks.first:
            self.folder.cut_back(self.state.step)
        else:
            self.state.loss = self.state.count = 0.0  # the sums are of all ranks together
        self.progress.say(f"Going on after step {self.state.step:,}, from {found}.")

    def _data(self) -> str:
        """What the training split holds, in one number; a run that follows a log keeps that of the one before."""
        if self.run.data.follow is not None:
            return self._trained_on
        parts = self.ranker.data.parts(self.run.data.train)
        return hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()

    def _result(self, stopped: str) -> Result:
        state = self.state
        self.checkpoints.wait()
        if self.ranks.decide(self.checkpoints.latest() != self.checkpoints.at(state.step)):
            self._checkpoint()  # a signal came when those due after the step were already made, or it was missed
            self.checkpoints.wait()
            if self.checkpoints.missed:
                raise CheckpointError(self.checkpoints.missed)
        plan = self.feed.verdict()
        if plan:
            self.progress.say(plan["said"])
        best = self._best() if stopped in ("end", "early", "idle") else None
        return Result(
            folder=self.folder.path,
            checkpoint=best or self.checkpoints.at(state.step),
            stopped=stopped,
            steps=state.step,
            samples=state.samples,
            seconds=state.seconds,
            metrics=state.metrics,
            best_step=state.best_step,
            plan=plan,
        )

    def _best(self) -> Path | None:
        """The best checkpoint where the run was to stop early, which the metrics are of from then on."""
        state, split = self.state, self.run.data.test or self.watched
        if state.best_step is None or (best := kept(self.checkpoints, state, self.ranks, self.progress)) is None:
            return None
        known = state.best_metrics if split == self.watched else {}
        state.metrics = known or measured(self.ranker, best, state, split)
        self.log.write("evaluate", state.step, {"split": split, "best_step": state.best_step, **state.metrics})
        self.progress.say(f"Best at step {state.best_step:,}, {split}: {in_words(state.metrics)}")
        return best


def _feed(ranker: Ranker) -> Feed:
    plan = ranker.run.plan
    if ranker.run.data.follow is not None:
        return Following(ranker)
    if plan is None:
        return Feed(ranker)
    if ranker.ranks.world.size > 1:
        return PlannedRanks(ranker, plan)
    return HotCold(ranker, plan) if plan.mode == "hot_cold" else Planned(ranker, plan)


def _loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Mean binary cross entropy, weighted where the batch has weights."""
    if inputs.labels is None:
        raise HotrowError("The batches have no labels, so there is nothing to train towards.")
    if inputs.weights is None:
        return F.binary_cross_entropy_with_logits(logits, inputs.labels)
    losses = F.binary_cross_entropy_with_logits(logits, inputs.labels, reduction="none")
    return (losses * inputs.weights).sum() / inputs.weights.sum().clamp(min=1e-12)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _under(prefix: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
