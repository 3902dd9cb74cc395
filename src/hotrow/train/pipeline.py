"""The way of a batch, in stages: read, group, fetch, then model and update in the consumer's own time.

Reading and grouping look at no row, so a background thread does both, ahead of the model by a bounded number
of batches. Fetching reads rows; how far it may run ahead of the updates is the policy's `staleness`. At 0 the
fetch runs in the consumer when it asks for the next batch: exact, and nothing touches the tables between an
update and the next batch, which is where checkpoints are cut. Above 0 a second thread fetches, at most
`staleness` batches past the last update.

What the model takes besides rows is pinned in the background where it goes to a GPU: sending it waits for nobody.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hotrow.data.ahead import ahead as run_ahead
from hotrow.data.batch import Batch


class Fetches(Protocol):
    """What the pipeline needs of `Embeddings`."""

    def group(self, batch: Batch) -> Any: ...
    def fetch(self, lookup: Any) -> Any: ...
    def step(self) -> None: ...


class Inputs(NamedTuple):
    """What a step takes of a batch besides rows; each may be None."""

    dense: Tensor | None
    labels: Tensor | None
    weights: Tensor | None

    def pinned(self) -> Inputs:
        """The same in memory that a GPU can read by itself."""
        return Inputs(*(None if t is None else t.pin_memory() for t in self))

    def to(self, device: torch.device) -> Inputs:
        """The same on `device`; from pinned memory nobody waits for the copy."""
        return Inputs(*(None if t is None else t.to(device, non_blocking=True) for t in self))


@dataclass(frozen=True)
class Fetched:
    """A batch and its lookup, whose rows are here; `inputs` on the host."""

    batch: Batch
    lookup: Any
    inputs: Inputs


class Pipeline:
    """Iterates over fetched batches; after each, `update()` applies its gradients.

    An error in a background thread is raised to the consumer at the place of the batch it concerns. Use it as
    a context, or call `close()`: threads end, and the batches that were on their way are dropped. `pin` is for a
    model on a GPU.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        embeddings: Fetches,
        *,
        ahead: int = 4,
        staleness: int = 0,
        pin: bool = False,
    ) -> None:
        self._embeddings = embeddings
        self._staleness = staleness
        self._pin = pin
        self._closed = False
        self._working = threading.Lock()
        self._permits = threading.Semaphore(staleness + 1)
        grouped = run_ahead(self._group(batches), ahead)
        fetched = self._fetch(grouped)
        self._ready = run_ahead(fetched, staleness + 1) if staleness else fetched

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        return next(self._ready)

    def update(self) -> None:
        """Hands the gradients of the oldest batch back to the tables, and lets one more batch be fetched."""
        self._embeddings.step()
        self._permits.release()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While open no thread of the pipeline asks anything of the embeddings: the time to change their plan."""
        with self._working:
            yield

    def close(self) -> None:
        """Ends the threads and closes the source of batches, where it can be closed."""
        self._closed = True
        self._permits.release()
        self._ready.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _group(self, batches: Iterable[Batch]) -> Generator[Fetched]:
        for batch in batches:
            inputs = Inputs(batch.dense, batch.labels, batch.weights)
            with self._working:
                lookup = self._embeddings.group(batch)
            yield Fetched(batch, lookup, inputs.pinned() if self._pin else inputs)

    def _fetch(self, grouped: Generator[Fetched]) -> Generator[Fetched]:
        try:
            for item in grouped:
                if self._staleness:  # without it the consumer's own order, update and then next, is the permit
                    self._permits.acquire()
                if self._closed:
                    return
                with self._working if self._staleness else contextlib.nullcontext():
                    lookup = self._embeddings.fetch(item.lookup)
                yield Fetched(item.batch, lookup, item.inputs)
        finally:
            grouped.close()
