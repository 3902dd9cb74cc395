"""`GraphStep`: a whole training step on a GPU as one CUDA graph, for batches that are all of one shape.

Launching the kernels of a small model takes a host longer than the GPU needs to run them. A graph is launched once:
look up, forward, backward, dense optimizer, update of the rows. Around it stays what the host must do: the batch's
slots and cold rows go in, the cold rows' gradients come out, and their tiers apply them. The first steps run kernel by
kernel, as CUDA asks for; then the step is captured. A batch of another shape, or with more cold rows than there is room
for, is captured anew, so batches whose lengths vary are better trained without.

    step = GraphStep(embeddings, model, dense, loss)
    for loss in step.each(batches):
        ...

While the device works on a batch, `each` fetches the cold rows of the next, and reads those that both have again once
they are updated: exact, and the device waits for less.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hotrow import _native, kernels
from hotrow.data.batch import Batch
from hotrow.device_lookup import DeviceLookup, Parcel
from hotrow.embedded import Embedded, PooledGroup
from hotrow.embeddings import Embeddings
from hotrow.errors import SettingsError
from hotrow.lookup import Lookup
from hotrow.tiers.tier import Floats, Gradients
from hotrow.train.dense import DenseStep
from hotrow.train.exact import fetched_ahead
from hotrow.train.pipeline import Pipeline
from hotrow.train.ready import Ready

_WARM = 3  # steps before the capture
_GROUPERS = 2  # one takes longer to group and pack a batch than the device to train on it
Loss = Callable[[Tensor, Tensor], Tensor]


class GraphStep:
    """Trains one batch a call; the loss it returns is overwritten by the next one.

    From now on `embeddings` packs grouped batches for the graph, in whichever thread groups them. A lookup of theirs
    can still be embedded, as an evaluation does; it is sent to the device then.
    """

    def __init__(self, embeddings: Embeddings, model: nn.Module, dense: DenseStep, loss: Loss) -> None:
        if embeddings.device_tier is None or embeddings.device_tier.device.type != "cuda":
            raise SettingsError("A CUDA graph needs embeddings whose results are computed on a CUDA device.")
        if any(feature.dropout for feature in embeddings.features.values()):
            raise SettingsError("A CUDA graph embeds by itself, without dropout of features. Take their dropout away.")
        self._embeddings, self._model, self._dense, self._loss = embeddings, model, dense, loss
        self._tier = embeddings.device_tier
        embeddings.prepare = self._pack
        dense.on_device(self._tier.device)
        self._stream: Any = torch.cuda.Stream(self._tier.device)  # type: ignore[no-untyped-call]
        self._captured: _Captured | None = None

    def __call__(self, lookup: DeviceLookup) -> Tensor:
        """One step of everything; the lookup is fetched."""
        loss, handed = self._begin(lookup)
        self._end(lookup, handed)
        return loss

    def each(self, batches: Iterable[Batch], *, ahead: int = 4) -> Generator[Tensor]:
        """Trains on batches one after another, and gives the loss of each; so many are read and grouped ahead."""
        with _Grouped(batches, self._embeddings, ahead=ahead, groupers=_GROUPERS) as grouped:
            first = next(grouped, None)
            lookup: Any = None if first is None else self._embeddings.fetch(first.lookup)
            while lookup is not None:
                if not self._embeddings.current(lookup):  # rows have moved since
                    lookup = self._embeddings.fetch(lookup)
                loss, handed = self._begin(lookup)
                coming: _Coming | None = None
                failed: Exception | None = None
                try:
                    coming = self._fetch_next(grouped, lookup)
                except Exception as error:  # the next batch's: this one is trained on first
                    failed = error
                self._end(lookup, handed)
                if coming is not None:
                    self._complete(coming)
                yield loss
                if failed is not None:
                    raise failed
                lookup = None if coming is None else coming.lookup

    def _begin(self, lookup: DeviceLookup) -> tuple[Tensor, Floats]:
        """Sends a step on its way: its loss, and the gradients of staged rows as they will be when it is done."""
        step = self._embeddings.steps
        if not isinstance(lookup.prepared, Parcel):
            raise SettingsError("This lookup was grouped before there was a graph; group its batch again.")
        if self._captured is None or not self._captured.fits(lookup):
            self._captured = _Captured(self, lookup)
        self._tier.begin_step(step)
        self._dense.begin_step()
        with torch.cuda.stream(self._stream):
            return self._captured.run(lookup, step)

    def _end(self, lookup: DeviceLookup, handed: Floats) -> None:
        """Waits for the device, and updates rows of other tiers."""
        self._stream.synchronize()
        lookup.count_accesses()
        lookup.update(Gradients(handed), self._embeddings.steps)
        self._embeddings.steps += 1

    def _fetch_next(self, grouped: Iterator[Ready], lookup: Lookup) -> _Coming | None:
        """The batch after `lookup`, which the device is at work on, with rows as they are before its update."""
        item = next(grouped, None)
        if item is None:
            return None
        step = self._embeddings.steps + 1
        following = self._embeddings.fetch(item.lookup, step, only=fetched_ahead)
        changed = [
            np.flatnonzero(_native.shared_keys([here, there])[1])
            for here, there in zip(lookup.keys(), following.keys(), strict=True)
        ]
        return _Coming(following, step, changed)

    def _complete(self, coming: _Coming) -> None:
        """Brings what the update before it has changed, and rows that are fetched in turn."""
        if not all(fetched_ahead(tier) for tier, _ in coming.lookup.routed):
            self._embeddings.fetch(coming.lookup, coming.step, only=lambda tier: not fetched_ahead(tier))
        coming.lookup.read_again(coming.changed, coming.step, fetched_ahead)

    def _pack(self, lookup: DeviceLookup) -> Parcel:
        """What differs from batch to batch, but for cold rows; numbers of rows that are here padded to one length."""
        batch = lookup.batch
        if any(group.inverse is not None or group.begins is not None for group in batch.groups):
            raise SettingsError(
                "A CUDA graph takes batches without deduplicated groups, which differ from batch to batch."
            )
        held = np.full(lookup.shape.lookups, len(self._tier.clock) - 1, np.int32)
        held[: len(lookup.held)] = lookup.held
        inputs = [None if t is None else t.numpy() for t in (batch.dense, batch.labels)]
        return Parcel([lookup.slots, lookup.offsets, lookup.weights, lookup.staged_begins, held, *inputs])


class _Coming(NamedTuple):
    """A batch that is fetched for its step but for rows that change before: those at some positions of each table."""

    lookup: Lookup
    step: int
    changed: list[npt.NDArray[np.intp]]


class _Grouped(Pipeline):
    """Batches read and grouped ahead; who takes them fetches."""

    def _fetched(self, grouped: Generator[Ready]) -> Generator[Ready]:
        return grouped


class _Captured:
    """A step for batches of one shape: buffers that stay where they are, and the graph once it is captured."""

    def __init__(self, owner: GraphStep, lookup: DeviceLookup) -> None:
        self._owner, self._tier = owner, owner._tier
        self._shape, self._room = lookup.shape, int(lookup.staged_size * 1.25) + 4096
        device = self._tier.device
        self._kinds = lookup.prepared.kinds
        self._there = lookup.prepared.send(device)
        self._inputs = lookup.prepared.tensors(self._there)
        self._step_number = torch.zeros(1, dtype=torch.int32, device=device)
        self._seed = self._tier.random()  # of rounding: a graph reads it from where it is at each launch
        self._rows = torch.zeros(self._room, device=device)
        self._handed = torch.zeros(self._room, device=device)
        self._back = torch.empty(self._room, pin_memory=device.type == "cuda")
        self._graph: Any = None
        self._steps = 0
        self._result: Tensor | None = None

    def fits(self, lookup: DeviceLookup) -> bool:
        return lookup.shape is self._shape and lookup.staged_size <= self._room and lookup.prepared.kinds == self._kinds

    def run(self, lookup: DeviceLookup, step: int) -> tuple[Tensor, Floats]:
        """The loss, and the gradients of the staged rows as they will be on the host when the stream is done."""
        lookup.prepared.send(self._tier.device, self._there)
        self._step_number.fill_(step)
        self._seed.fill_(self._tier.steps)
        assert lookup.rows is not None
        n = lookup.staged_size
        self._rows[:n].copy_(lookup.rows, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        elif self._steps < _WARM:
            self._result = self._step(lookup)
        else:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # Other threads group batches meanwhile, and may ask CUDA for pinned memory.
            with torch.cuda.graph(self._graph, stream=self._owner._stream, capture_error_mode="thread_local"):
                self._result = self._step(lookup)
            self._graph.replay()
        self._steps += 1
        self._back[:n].copy_(self._handed[:n], non_blocking=True)
        assert self._result is not None
        return self._result, self._back.numpy()[:n]

    def _step(self, lookup: DeviceLookup) -> Tensor:
        slots, offsets, weights, begins, held, dense, labels = self._inputs
        owner, tier, shape = self._owner, self._tier, self._shape
        staged = kernels.Staged(self._rows, begins)
        grouping = kernels.group(tier.storage, shape, slots, offsets, weights)
        results = kernels.lookup(tier.storage, shape, slots, offsets, weights, staged=staged).requires_grad_()
        views = iter(shape.views(results))
        pooled = [PooledGroup(names, dims, next(views), None) for names, dims, width in lookup.layout.pooled if width]
        loss = owner._loss(owner._model(Embedded(pooled, {}), dense), labels)
        owner._dense.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        owner._dense.apply()
        assert results.grad is not None
        kernels.update(tier.storage, shape, grouping, results.grad, staged=staged, handed=self._handed, seed=self._seed)
        tier.count(held.long(), self._step_number)
        return loss.detach()
