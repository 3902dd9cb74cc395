"""`Feed`: the batches of a run, in order, each with its rows; and what happens to rows between two steps.

The base gives the training split as the reader orders it, with every row where it is. Those that move rows override
what differs: `planned.Planned` puts hot rows on the device and may change the plan on the way, `hot_cold.HotCold` has
an order of its own. What a feed decides depends on seeds, the data and its state alone, and the state is in every
checkpoint: a resumed run takes the same decisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.errors import HotrowError
from hotrow.train.evaluate import Ranker
from hotrow.train.logs import RunFolder
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Pipeline
from hotrow.train.ready import Ready

Line = tuple[str, dict[str, Any]]
"""A line of metrics: its kind and its values."""


class Feed:
    """Iterates over fetched batches; `update` applies a batch's gradients, `between_steps` comes after each step."""

    def __init__(self, ranker: Ranker) -> None:
        self.ranker, self.run = ranker, ranker.run
        self.step = self.epoch = self.batch = 0  # steps made, and the batch of this epoch that the next one begins with
        self.held = self.held_samples = 0  # batches whose gradients wait for the step that they are part of
        self._samples, self._batches = self._of_epoch()
        self.phases = Phases()
        self.ended = False  # whether no more will come, where nobody knew how much there would be
        self._pipeline: Pipeline | None = None

    @property
    def batches(self) -> int:
        """Batches an epoch has."""
        return self._batches

    @property
    def steps_an_epoch(self) -> int:
        """Steps an epoch has; the last one is of the batches that are left."""
        return -(-self.batches // self.run.train.accumulate)

    @property
    def closes(self) -> bool:
        """Whether the step is made with the batch that was given last."""
        here = self.held + 1
        return here >= self.run.train.accumulate or self.batch + here >= self.batches

    def _of_epoch(self) -> tuple[int, int]:
        """The samples and batches an epoch has, of all ranks together."""
        data = self.run.data
        if not self.ranker.data.samples(data.train):
            raise HotrowError(f'The split "{data.train}" of {data.path} has no samples to train on.')
        reader = self.ranker.reader(data.train, shuffle=False)
        if not len(reader):
            raise HotrowError(
                f'The split "{data.train}" of {data.path} has fewer samples than there are ranks, '
                f"{self.ranker.ranks.world.size}."
            )
        return reader.samples, len(reader)

    @property
    def epoch_of_last(self) -> int:
        """The epoch of the last step that was made."""
        return self.epoch - 1 if self.epoch and not self.batch else self.epoch

    @property
    def left(self) -> float:
        """Steps up to the end of the last epoch; infinite where nobody knows."""
        here = -(-(self.batches - self.batch) // self.run.train.accumulate)
        return max(0, (self.run.train.epochs - self.epoch - 1) * self.steps_an_epoch + here)

    @property
    def step_samples(self) -> int:
        """Samples of the batch that comes next, on all ranks together."""
        return min(self._most, self._samples - (self.batch + self.held) * self._most)

    @property
    def _most(self) -> int:
        return self.ranker.ranks.world.size * self.run.data.batch_size

    def start(self) -> list[str]:
        """Makes ready for a run's first step; says what there is to say."""
        return []

    def write(self, folder: RunFolder) -> None:
        """Writes what a started run keeps of its start."""

    def restore(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        """Makes ready to go on after `step`, from what `state` and `arrays` gave; rows are restored afterwards.

        The position is kept in samples, so that another number of ranks can go on: from the step of theirs that has the
        next sample, which repeats less than a step where theirs begin elsewhere.
        """
        self.step, self.epoch = step, state["epoch"]
        self.batch = state["sample"] // self._most

    def state(self) -> dict[str, Any]:
        """Where the feed stands, as JSON has it."""
        return {"epoch": self.epoch, "sample": self.batch * self._most}

    def arrays(self) -> dict[str, Tensor]:
        """The large part of the state, which does not change any more."""
        return {}

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipeline is not None and kind is not None:
            self._pipeline.close(drop=True)
            self._pipeline = None
        self.close()

    def close(self) -> None:
        """Applies the updates still to be made, and ends what runs in the background. No batch is held any more."""
        self.held = self.held_samples = 0
        if self._pipeline is not None:
            pipeline, self._pipeline = self._pipeline, None
            pipeline.close()

    def ready(self) -> bool:
        """Whether there is a batch now; where there may be one later, a moment has passed if there is none."""
        return True

    @property
    def checkpoint_due(self) -> bool:
        """Whether the feed wants a checkpoint, besides those that come after so many steps."""
        return False

    def __next__(self) -> Ready:
        if self._pipeline is None:
            joined = self.run.train.accumulate > 1  # then batches have numbers of their own, which a resumed run knows
            first = self.epoch * self.batches + self.batch if joined else None
            self._pipeline = self.ranker.pipeline(self._order(), self.run.policy, self.phases, first)
        return next(self._pipeline)

    def hold(self, batch: Batch, samples: int) -> None:
        """Notes that the gradients of the batch that was given last wait for the step."""
        self.held += 1
        self.held_samples += samples

    def update(self, batch: Batch) -> None:
        """Hands the gradients of the batch that was given last, and of those that waited, back to the tables."""
        assert self._pipeline is not None
        self._pipeline.update()
        self.step += 1
        self.batch += self.held + 1
        self.held = self.held_samples = 0
        self._next_epoch()

    @property
    def scores(self) -> bool:
        """Whether it wants to see what the model gave for a batch before it learned from it."""
        return False

    def scored(self, batch: Batch, outputs: Any) -> None:
        """Takes what the model gave for a batch that was then trained on."""

    def between_steps(self) -> list[Line]:
        """What is due after a step; lines of metrics about it."""
        return []

    def metrics(self) -> dict[str, float]:
        """What a line of training metrics says of it."""
        return {}

    def verdict(self) -> dict[str, Any]:
        """What came of the plan, at the end of a run; `said` is a sentence."""
        return {}

    def _next_epoch(self) -> None:
        if self.batch >= self.batches:
            self.epoch, self.batch = self.epoch + 1, 0

    def _order(self) -> Iterator[Batch]:
        """The batches from where the run stands to the end of its last epoch."""
        reader = self.ranker.reader(self.run.data.train, shuffle=self.run.data.shuffle)
        self._next_epoch()
        epoch, batch = self.epoch, self.batch
        while epoch < self.run.train.epochs:
            reader.seek(epoch, batch)
            yield from reader
            epoch, batch = epoch + 1, 0

    def staleness(self) -> dict[str, Any]:
        """How stale rows were since the last time it was asked; nothing where all were fresh."""
        return {} if self._pipeline is None else self._pipeline.staleness()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """While open, nothing looks at tables or plan, and all updates are applied."""
        return contextlib.nullcontext() if self._pipeline is None else self._pipeline.paused()
