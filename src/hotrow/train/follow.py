"""`Following`: a feed of what arrives in a log that grows, batch after batch, for as long as something comes.

What has arrived is read, grouped and fetched ahead as any other data, under the run's policy; when nothing is left the
pipeline ends, with every update applied, and the log is looked at again and again. Its place is in every checkpoint:
a run that is killed and resumed trains on each sample once. What was learned is written after
`data.follow.checkpoint_every` seconds, for a `Predictor` in another process to pick up; with `train.incremental` that
is the rows that changed. One process trains: the order in which files arrive is no agreement between several.
Nothing of the data set's training split is read; its schema is the log's, and its test split is evaluated on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.folder_log import FolderLog
from hotrow.data.fresh import batch_of
from hotrow.data.growing import Arrived, Follow, GrowingLog
from hotrow.data.kafka import KafkaLog
from hotrow.data.schema import Schema
from hotrow.errors import HotrowError
from hotrow.train.evaluate import Ranker
from hotrow.train.feed import Feed, Line
from hotrow.train.ready import Ready
from hotrow.train.scored import Scored


def open_log(settings: Follow, schema: Schema, batch_size: int) -> GrowingLog:
    """The log that a run follows."""
    kind = FolderLog if settings.topic is None else KafkaLog
    return kind(settings, schema, batch_size)


class Following(Feed):
    """Batches of a growing log. `ready` says whether there is one; where there is none it has waited a moment."""

    def __init__(self, ranker: Ranker, log: GrowingLog | None = None) -> None:
        super().__init__(ranker)
        assert self.run.data.follow is not None
        self.settings = self.run.data.follow
        self.log = log or open_log(self.settings, ranker.data.schema, self.run.data.batch_size)
        self.samples = 0  # of the log, up to here
        self._read: deque[Arrived] = deque()  # and not trained on yet
        self._next: Ready | None = None
        self._lines: list[Line] = []
        self._heard = self._cut_at = time.monotonic()
        self._cut_step = 0
        every, metrics = self.settings.evaluate_every, self.run.evaluate.metrics
        names = [metric.name for metric in metrics]
        self._scored = None if every is None else Scored(ranker.fresh_metrics, every, names)
        self._unscored = 0

    def _of_epoch(self) -> tuple[int, int]:
        """There are no epochs, and the split that was trained on before need not be there any more."""
        return 0, 0

    @property
    def left(self) -> float:
        """Nobody knows."""
        return float("inf")

    def ready(self) -> bool:
        """Whether a batch is there; if not, time has passed or, after the idle time, `ended` is true."""
        self._next = self._next or self._taken()
        if self._next is not None:
            self._heard = time.monotonic()
            return True
        idle, waited = self.settings.idle, time.monotonic() - self._heard
        self.ended = idle is not None and waited >= idle
        if not self.ended:
            time.sleep(self.settings.look_every if idle is None else min(self.settings.look_every, idle - waited))
        return False

    def __next__(self) -> Ready:
        assert self._next is not None
        fetched, self._next = self._next, None
        return fetched

    def update(self, batch: Batch) -> None:
        assert self._pipeline is not None
        self._pipeline.update()
        self.step += 1
        self.samples += len(batch)
        self._unscored += self._scored is not None
        self._lines += [("follow", line) for line in self.log.trained(self._read.popleft())]

    @property
    def scores(self) -> bool:
        return self._scored is not None

    def scored(self, batch: Batch, outputs: Any) -> None:
        assert self._scored is not None
        self._unscored -= 1
        if found := self._scored.add(outputs, batch):
            self._lines.append(("progressive", found))

    def between_steps(self) -> list[Line]:
        if self._unscored:
            raise HotrowError(
                "data.follow.evaluate_every: a batch was trained on that was not scored, for only trainer.step(ready) "
                "says what the model gave. Make steps with it, or take the setting away."
            )
        lines, self._lines = self._lines, []
        said, self.log.notes = self.log.notes, []
        return [*lines, *(("follow", {"said": sentence}) for sentence in said)]

    @property
    def checkpoint_due(self) -> bool:
        """Whether what was learned since the last checkpoint has waited long enough."""
        return self.step > self._cut_step and time.monotonic() - self._cut_at >= self.settings.checkpoint_every

    def state(self) -> dict[str, Any]:
        self._cut_at, self._cut_step = time.monotonic(), self.step
        scored = {} if self._scored is None else {"scored": self._scored.state()}
        return {**super().state(), "follow": {**self.log.state(), "total": self.samples}, **scored}

    def arrays(self) -> dict[str, Tensor]:
        return {**super().arrays(), **({} if self._scored is None else self._scored.arrays())}

    def restore(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        super().restore(step, state, arrays)
        place = state.get("follow", {})
        self._cut_step, self.samples = step, place.get("total", 0)
        self.log.restore(place)
        if self._scored is not None:
            self._scored.restore(state.get("scored", {}), arrays)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.log.close()

    def _taken(self) -> Ready | None:
        """The next batch, from a new pipeline where something has arrived; None if nothing has."""
        while True:
            if self._pipeline is None:
                if not self.log.arrived():
                    return None
                self._read.clear()
                self._pipeline = self.ranker.pipeline(self._order(), self.run.policy, self.phases)
            try:
                return next(self._pipeline)
            except StopIteration:
                self.close()
                self._lines += [("follow", line) for line in self.log.rest()]

    def _order(self) -> Iterator[Batch]:
        data, first = self.run.data, self.samples
        for arrived in self.log.read():
            self._read.append(arrived)
            yield batch_of(arrived.samples, self.ranker.data.schema, data.steps, data.seed, first)
            first += len(arrived.samples)
