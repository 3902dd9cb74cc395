"""The way of a batch, in stages: read, group, fetch, then model and update in the consumer's own time.

Reading and grouping look at no row, so a background thread does both, ahead of the model by a bounded number
of batches. Here, under `Sync`, the fetch runs in the consumer when it asks for the next batch: exact, and nothing
touches the tables between an update and the next batch. `Behind` is what the other policies have in common: a thread
that fetches and one that updates, and how far each may be from the model. `hybrid.py` and `exact.py` say how far.

What the model takes besides rows is pinned in the background where it goes to a GPU: sending it waits for nobody.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from hotrow.data.ahead import ahead as run_ahead
from hotrow.data.batch import Batch
from hotrow.errors import HotrowError
from hotrow.objectives.inputs import Inputs
from hotrow.train.phases import Phases
from hotrow.train.ready import Ready


class Updates(Protocol):
    """What the pipeline needs of `embeddings.Update`: gradients of one step."""

    def apply(self) -> None: ...


class Fetches(Protocol):
    """What the pipeline needs of `Embeddings`."""

    steps: int

    def group(self, batch: Batch) -> Any: ...
    def fetch(self, lookup: Any, step: int | None = None, only: Any = None, *, once: bool = False) -> Any: ...
    def current(self, lookup: Any) -> bool: ...
    def prefetch(self, lookup: Any, step: int) -> None: ...
    def finish(self) -> Updates: ...

    on_step: Callable[[], None] | None
    """What ends a step instead of an update here and now."""


Extras = Callable[[Batch], Mapping[str, Tensor]]
"""What an objective needs of a batch besides labels and weights."""


def no_extras(batch: Batch) -> Mapping[str, Tensor]:
    """Nothing."""
    return {}


class Gate:
    """Threads pass while it is open; `closed` waits until the last is out, and lets none in until it ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()


class Pipeline:
    """Iterates over fetched batches; after each, `update()` applies its gradients.

    An error in a background thread is raised to the consumer at the place of the batch it concerns. Use it as
    a context, or call `close()`: threads end, and the batches that were on their way are dropped. Tiers with a cache
    are `told` of so many coming batches. `pin` is for a model on a GPU. So many `groupers` group batches side by side.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        embeddings: Fetches,
        *,
        ahead: int = 4,
        told: int = 0,
        pin: bool = False,
        phases: Phases | None = None,
        groupers: int = 1,
        extras: Extras = no_extras,
    ) -> None:
        self._embeddings = embeddings
        self._extras = extras
        self._groupers = groupers
        self._phases = phases or Phases()
        self._pin = pin
        self._gate = Gate()
        self._closed = self._takes_steps = False
        self._untold = threading.Semaphore(told)
        grouped = run_ahead(self._group(batches), ahead)
        self._ready = self._fetched(run_ahead(self._told(grouped), told) if told else grouped)

    def __iter__(self) -> Iterator[Ready]:
        return self

    def __next__(self) -> Ready:
        return next(self._ready)

    def update(self) -> None:
        """Hands the gradients of the batch that was given last back to the tables."""
        with self._phases("update"):
            self._embeddings.finish().apply()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """While open no thread of the pipeline asks anything of the embeddings, and every update is applied.

        The time to evaluate, to cut a checkpoint, to change the plan. Batches that were fetched before stay good.
        """
        return self._gate.closed()

    def take_steps(self) -> Self:
        """`embeddings.step()` hands the update of a batch over to this pipeline, until it is closed."""
        self._embeddings.on_step, self._takes_steps = self.update, True
        return self

    def _leave_steps(self) -> None:
        if self._takes_steps:
            self._embeddings.on_step, self._takes_steps = None, False

    def close(self, *, drop: bool = False) -> None:
        """Applies updates still to be made unless they are to be dropped, ends the threads, closes the source."""
        self._leave_steps()
        self._closed = True
        self._untold.release()
        self._ready.close()

    def staleness(self) -> dict[str, Any]:
        """How stale rows were since the last time it was asked; nothing where all were fresh."""
        return {}

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drop=kind is not None)

    def _group(self, batches: Iterable[Batch]) -> Generator[Ready]:
        read = self._phases.each("read", batches)
        if self._groupers == 1:
            yield from map(self._grouped, read)
            return
        with ThreadPoolExecutor(self._groupers, thread_name_prefix="hotrow-group") as threads:
            begun: deque[Future[Ready]] = deque()
            failed: Exception | None = None
            while failed is None:
                try:
                    begun.append(threads.submit(self._grouped, next(read)))
                except StopIteration:
                    break
                except Exception as error:  # comes after the batches that were read before it
                    failed = error
                if len(begun) == self._groupers:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
            if failed is not None:
                raise failed

    def _grouped(self, batch: Batch) -> Ready:
        inputs = Inputs.of(batch, self._extras(batch))
        with self._gate, self._phases("group"):
            lookup = self._embeddings.group(batch)
        return Ready(batch, lookup, inputs.pinned() if self._pin else inputs, self._embeddings)

    def _told(self, grouped: Generator[Ready]) -> Generator[Ready]:
        """The same, each once tiers with a cache have brought what they lack for it."""
        try:
            for step, item in enumerate(grouped, start=self._embeddings.steps):
                self._untold.acquire()
                if self._closed:
                    return
                with self._gate, self._phases("fetch_ahead"):
                    self._embeddings.prefetch(item.lookup, step)
                yield item
        finally:
            grouped.close()

    def _fetched(self, grouped: Generator[Ready]) -> Generator[Ready]:
        try:
            for item in self._phases.each("wait", grouped):
                with self._phases("fetch"):
                    lookup = self._embeddings.fetch(item.lookup, once=True)
                self._untold.release()
                yield replace(item, lookup=lookup)
        finally:
            grouped.close()


@dataclass
class Flight:
    """A batch from the beginning of its fetch until its update is applied.

    `number` is that of its step, `keys` are those it looks up, table by table.
    """

    number: int
    fetched: Ready
    update: Any = None
    keys: Any = None


class Behind(Pipeline):
    """Batches fetched by one thread, updated by another, in order; a policy says how far from the model.

    Counts are numbers of steps: `begun` fetches, batches `taken` by the consumer, updates `given` by it, `sent` and
    `applied`.
    They change under one condition. A policy overrides what differs: `_may_fetch`, `_may_take`, `_fetch`, `_complete`,
    `_apply`, `_after`.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        embeddings: Fetches,
        *,
        ahead: int = 4,
        room: int = 1,
        pin: bool = False,
        phases: Phases | None = None,
        extras: Extras = no_extras,
    ) -> None:
        self._changed = threading.Condition()
        self._begun = self._taken = self._given = self._sent = self._applied = embeddings.steps
        self._flights: deque[Flight] = deque()  # taken, and not applied yet
        self._error: BaseException | None = None
        self._exhausted = self._draining = False
        super().__init__(batches, embeddings, ahead=ahead, pin=pin, phases=phases, extras=extras)
        self._flying = run_ahead(self._fetch_ahead(self._ready), room)
        self._updating = threading.Thread(target=self._run_updates, name="hotrow-update", daemon=True)
        self._updating.start()

    def _may_fetch(self, number: int) -> bool:
        """Whether the fetch of a batch may begin."""
        raise TypeError(f"{type(self).__name__} does not say how far ahead it fetches")

    def _may_take(self, number: int) -> bool:
        """Whether the model may have a batch that is fetched."""
        return True

    def _fetch(self, flight: Flight) -> None:
        """Brings the rows of a batch."""
        item = flight.fetched
        flight.fetched = replace(item, lookup=self._embeddings.fetch(item.lookup, flight.number))

    def _complete(self, flight: Flight) -> None:
        """Does what is left to do for a batch that the model takes, in the consumer."""
        if not self._embeddings.current(flight.fetched.lookup):  # rows have moved since
            self._refetch(flight)

    def _refetch(self, flight: Flight) -> None:
        item = flight.fetched
        with self._phases("fetch"):
            flight.fetched = replace(item, lookup=self._embeddings.fetch(item.lookup, flight.number))

    def _apply(self, flight: Flight) -> None:
        """Applies a batch's update."""
        assert flight.update is not None
        flight.update.apply()

    def _after(self, flight: Flight) -> None:
        """What may be done once a batch's update is applied."""

    def __next__(self) -> Ready:
        if self._takes_steps and self._taken > self._given:  # whoever fetches ahead would wait for its update for ever
            raise HotrowError(
                "The batch that was given last has not been trained on, and this policy gives the next one after its "
                "update only: call step(ready), or after a backward of your own embeddings.step()."
            )
        with self._phases("wait"):
            flight = self._next_flight()
            self._wait(lambda: self._may_take(flight.number))
        self._complete(flight)
        with self._changed:
            self._taken = flight.number + 1
            self._flights.append(flight)
        return flight.fetched

    def update(self) -> None:
        """Takes the gradients of the batch that was given last; they are applied behind the model."""
        with self._phases("update"):
            update = self._embeddings.finish()
            with self._changed:
                self._raise()
                flight = next(f for f in self._flights if f.update is None)
                flight.update = update
                self._given = flight.number + 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._phases("drain"):
            self._drain()
            self._raise()
        with self._gate.closed():
            yield

    def close(self, *, drop: bool = False) -> None:
        self._leave_steps()
        if not drop:
            self._drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._updating.join()
        self._flying.close()
        self._ready.close()
        if not drop:
            self._raise()

    def _fetched(self, grouped: Generator[Ready]) -> Generator[Ready]:
        return grouped

    def _fetch_ahead(self, grouped: Generator[Ready]) -> Generator[Flight]:
        try:
            for number, item in enumerate(grouped, start=self._begun):
                flight = Flight(number, item)
                if not self._begin(number):
                    return
                with self._gate, self._phases("fetch_ahead"):
                    self._fetch(flight)
                yield flight
        finally:
            grouped.close()
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()

    def _begin(self, number: int) -> bool:
        """Waits until the fetch of a batch may begin; False if it never will."""
        with self._phases("held_back"), self._changed:
            self._changed.wait_for(lambda: self._closed or self._error is not None or self._may_fetch(number))
            if self._closed or self._error is not None:
                return False
            self._begun = number + 1
            return True

    def _next_flight(self) -> Flight:
        try:
            return next(self._flying)
        except StopIteration:
            self._wait(lambda: True)  # no end, if updates failed and fetching therefore stopped
            raise

    def _run_updates(self) -> None:
        try:
            while (flight := self._next_update()) is not None:
                with self._phases("update_behind"):
                    self._apply(flight)
                self._settle(flight)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _settle(self, flight: Flight) -> None:
        """Says that a batch's update is applied."""
        with self._changed:
            self._applied = flight.number + 1
            self._flights.popleft()
            self._changed.notify_all()
        self._after(flight)

    def _next_update(self) -> Flight | None:
        """The oldest batch whose update was not sent, as soon as its gradients are there; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._error is not None or self._given > self._sent)
            if self._closed or self._error is not None:
                return None
            self._sent += 1
            return next(flight for flight in self._flights if flight.number == self._sent - 1)

    def _drain(self) -> None:
        """Returns when every update that was given is applied, or one of them has failed."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or self._applied == self._given)
            self._draining = False

    def _wait(self, so: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or so())
            self._raise()

    def _raise(self) -> None:
        """To the consumer what went wrong behind its back."""
        if self._error is not None:
            raise self._error
