"""`RunBatches`: the batches of a run, each with its rows, and what is due between two steps.

Between two steps nothing moves, and everything happens there in one order: lines of metrics, evaluations, what the
feed decides (a change of plan), a checkpoint, the end. A checkpoint therefore holds what the evaluation decided.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from hotrow.errors import HotrowError
from hotrow.train.best import judged
from hotrow.train.hooks import Flags, StepEvent
from hotrow.train.ranks import FLAGS
from hotrow.train.ready import Ready
from hotrow.train.signals import Signals

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


class RunBatches:
    """Iterates over what is still to be trained on. As a context it ends its threads when the loop is left early."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._opened: contextlib.ExitStack | None = None
        self._step, self._samples = trainer.state.step, trainer.state.samples
        self._held = 0

    def __enter__(self) -> RunBatches:
        t = self._trainer
        t.began = time.monotonic() - t.state.seconds
        t.signals, t.stopped = Signals(), ""
        with contextlib.ExitStack() as opening:
            opening.enter_context(t.at_work())
            opening.enter_context(t.signals)
            opening.callback(t.progress.stop)
            opening.enter_context(t.feed)
            t.parts.train()
            t.machine.begin(t.state.step)
            t.progress.start(0 if math.isinf(t.steps) else int(t.steps), t.state.step, "Training step")
            for hook in t.hooks:
                hook.begin(t)
            t.embeddings.on_step = self._stepped
            self._opened = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        self._trainer.given = None
        self._trainer.embeddings.on_step = None
        if self._trainer.feed.held:  # gradients that wait for a step that is not made
            self._trainer.one_step.forget()
            self._trainer.losses.forget()
        if opened is not None:
            opened.__exit__(kind, error, trace)

    def __iter__(self) -> RunBatches:
        return self

    def __next__(self) -> Ready:
        t = self._trainer
        if self._opened is None and not t.stopped:
            self.__enter__()
        if t.given is not None:
            self._after_step(t.given)
        while not t.stopped:
            t.stopped = "" if t.feed.held else self._over()
            if t.stopped:
                break
            if t.feed.ready():
                whole = None if t.ranks.world.size == 1 else t.feed.step_samples
                ready = next(t.feed)
                t.given = replace(ready, samples=len(ready.batch) if whole is None else whole)
                t.flags = None
                return t.given
            self._idle()
        self.__exit__(None, None, None)
        raise StopIteration

    def _stepped(self) -> None:
        """What `embeddings.step()` does: rows learn as the policy has it, and the run is a step further."""
        t, given = self._trainer, self._trainer.given
        if given is None:
            raise HotrowError("embeddings.step() was called twice for a batch, or before the first one was given.")
        t.state.samples += t.feed.held_samples + (given.samples or len(given.batch))
        t.feed.update(given.batch)
        t.state.step += 1

    def _after_step(self, ready: Ready) -> None:
        t, self._trainer.given = self._trainer, None
        before, self._held = self._held, t.feed.held
        if self._held > before:
            return
        if t.state.step == self._step:
            raise HotrowError(
                "The batch that was given last has not been trained on: call trainer.step(ready), or after a backward "
                "of your own trainer.optimizer.step() and trainer.embeddings.step()."
            )
        samples = t.state.samples - self._samples
        self._step, self._samples = t.state.step, t.state.samples
        if t.flags is None:
            t.flags = self._flags_without_step()
        t.progress.step(t.state.step, samples, t.losses.shown())
        self._note()
        asked = self._told(StepEvent(t.state.step, samples, t.losses.last))
        t.state.seconds = time.monotonic() - t.began
        last = t.state.step >= t.steps
        if last or t.state.step % t.run.train.log_every == 0:
            self._log()
        best = self._evaluations(last, t.flags["evaluate"])
        self._tell()
        if best or self._over() or t.flags["checkpoint"]:
            t.checkpoint()
        t.due.ask(asked)

    def _flags_without_step(self) -> dict[str, bool]:
        """Of a step that a loop made by itself."""
        t = self._trainer
        if t.run.train.accumulate > 1:
            raise HotrowError(
                "With train.accumulate several batches make a step, and their gradients are averaged: make steps with "
                "trainer.step(ready)."
            )
        if t.ranks.world.size > 1:
            raise HotrowError(
                "With several ranks gradients are to be averaged, and ranks agree on what comes next: make steps with "
                "trainer.step(ready)."
            )
        return dict(zip(FLAGS, t.due.to_say(t.state.step), strict=True))

    def _told(self, event: StepEvent) -> Flags:
        asked = Flags()
        for hook in self._trainer.hooks:
            asked = asked | (hook.step(self._trainer, event) or Flags())
        return asked

    def _note(self) -> None:
        forward = self._trainer.parts.dense
        if forward.note:
            self._trainer.progress.say(forward.note)
            forward.note = ""

    def _idle(self) -> None:
        """While nothing arrives what was learned is written; at the end of it all the rest that is due is done."""
        t = self._trainer
        t.checkpoints.check()
        self._tell()
        for hook in t.hooks:
            hook.idle(t)
        if t.feed.ended:
            if t.state.count:
                self._log()
            if t.state.step:
                self._evaluations(last=True)
        elif t.feed.checkpoint_due and not t.checkpoints.busy:
            t.checkpoint()

    def _tell(self) -> None:
        """What the feed has to say goes to the metrics, sentences to whoever watches."""
        t = self._trainer
        for kind, values in t.feed.between_steps():
            t.log.write(kind, t.state.step, values)
            if "said" in values:
                t.progress.say(values["said"])

    def _over(self) -> str:
        """Why the run must not go on, or nothing. Several ranks go by what all knew at the last step."""
        t, stopping = self._trainer, self._trainer.run.train.early_stopping
        if stopping is not None and t.state.waited >= stopping.patience:
            return "early"
        if t.state.step >= t.steps:
            return "end"
        if t.feed.ended:
            return "idle"
        flags = t.flags or {}
        if flags.get("stop"):
            return "hook"
        if t.ranks.world.size == 1:
            return t.signals.caught
        return next((name for name in ("SIGINT", "SIGTERM") if flags.get(name)), "")

    def _log(self) -> None:
        t, state = self._trainer, self._trainer.state
        values = {
            "epoch": t.feed.epoch_of_last,
            "loss": t.losses.mean(t.checkpoints.latest()),
            "lr": t.optimizer.lr,
            "samples": state.samples,
            "seconds": state.seconds,
            "samples_per_second": state.samples / max(state.seconds, 1e-9),
            **t.feed.metrics(),
        }
        stale = t.feed.staleness()
        for kind, said in (
            ("train", values),
            *t.machine.lines(state.step),
            *([("staleness", stale)] if stale else []),
        ):
            t.log.write(kind, state.step, said)

    def _evaluations(self, last: bool, asked: bool = False) -> bool:
        """Makes those that are due; whether early stopping calls the result the best so far."""
        t, train, test, best = self._trainer, self._trainer.run.train, self._trainer.run.data.test, False
        closing = last and (train.early_stopping is not None or t.watched == test)
        every = train.evaluate_every
        if t.watched and (closing or asked or (every is not None and t.state.step % every == 0)):
            best = self._evaluate(t.watched)
        if last and train.early_stopping is None and test not in ("", t.watched):
            self._evaluate(test)
        return best

    def _evaluate(self, split: str) -> bool:
        t, stopping = self._trainer, self._trainer.run.train.early_stopping
        t.evaluate(split)
        for hook in t.hooks:
            t.due.ask(hook.evaluated(t, split, dict(t.state.metrics)))
        return stopping is not None and judged(t.state, t.run, split, t.objective)
