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
from hotrow.train.pipeline import Fetched, Pipeline

Line = tuple[str, dict[str, Any]]
"""A line of metrics: its kind and its values."""


class Feed:
    """Iterates over fetched batches; `update` applies a batch's gradients, `between_steps` comes after each step."""

    def __init__(self, ranker: Ranker) -> None:
        self.ranker, self.run = ranker, ranker.run
        if not ranker.data.samples(self.run.data.train):
            raise HotrowError(f'The split "{self.run.data.train}" of {self.run.data.path} has no samples to train on.')
        self.step = 0
        self._pipeline: Pipeline | None = None

    @property
    def batches(self) -> int:
        """Steps an epoch has."""
        return len(self.ranker.reader(self.run.data.train, shuffle=False))

    def start(self) -> list[str]:
        """Makes ready for a run's first step; says what there is to say."""
        return []

    def write(self, folder: RunFolder) -> None:
        """Writes what a started run keeps of its start."""

    def restore(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        """Makes ready to go on after `step`, from what `state` and `arrays` gave; rows are restored afterwards."""
        self.step = step

    def state(self) -> dict[str, Any]:
        """Where the feed stands, as JSON has it."""
        return {}

    def arrays(self) -> dict[str, Tensor]:
        """The large part of the state, which does not change any more."""
        return {}

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs in the background."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def __next__(self) -> Fetched:
        if self._pipeline is None:
            self._pipeline = self.ranker.pipeline(self._order(), self.run.policy.staleness)
        return next(self._pipeline)

    def update(self, batch: Batch) -> None:
        """Hands the gradients of the batch that was given last back to the tables."""
        assert self._pipeline is not None
        self._pipeline.update()
        self.step += 1

    def between_steps(self) -> list[Line]:
        """What is due after a step; lines of metrics about it."""
        return []

    def metrics(self) -> dict[str, float]:
        """What a line of training metrics says of it."""
        return {}

    def verdict(self) -> dict[str, Any]:
        """What came of the plan, at the end of a run; `said` is a sentence."""
        return {}

    def _order(self) -> Iterator[Batch]:
        """The batches from where the run stands to the end of its last epoch."""
        reader = self.ranker.reader(self.run.data.train, shuffle=self.run.data.shuffle)
        epoch, batch = divmod(self.step, len(reader))
        while epoch < self.run.train.epochs:
            reader.seek(epoch, batch)
            yield from reader
            epoch, batch = epoch + 1, 0

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """While open, nothing looks at tables or plan."""
        return contextlib.nullcontext() if self._pipeline is None else self._pipeline.paused()
