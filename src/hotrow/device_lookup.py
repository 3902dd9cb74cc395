"""`DeviceLookup`: a batch whose results are computed on the device, from rows that live there and rows that are staged.

Rows of the device tier are read and updated in place. Unique rows of all other tiers are fetched as ever, into pinned
memory, and lie on the device for one step; the sums of their gradients come back and are handed to their tiers. So the
link carries unique cold rows, once each way, and one slot (4 bytes) a lookup.

The grouping on the device, which the update needs, is made ahead of the step, on a stream of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow import _native, kernels
from hotrow.data.batch import Batch, Group
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError
from hotrow.kernels.tables import aligned
from hotrow.lookup import Chosen, Layout, Lookup, Only, narrow
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.router import Routed, Router
from hotrow.tiers.tier import Floats, Gradients

Ints = npt.NDArray[np.int64]
_ALIGNED = 16  # bytes: what any array's elements are aligned to


class DeviceLookup(Lookup):
    """A batch, and where each of its rows is."""

    in_place = False

    def __init__(
        self,
        batch: Batch,
        layout: Layout,
        grouping: _native.Grouping,
        router: Router,
        tier: DeviceTier,
        prepare: Callable[[DeviceLookup], Any] | None = None,
    ) -> None:
        self._tier = tier
        self._placed = tier.place(grouping)
        super().__init__(batch, layout, grouping, router)
        self.routed = self._route()  # which says where staged rows begin
        self.offsets, self.weights = self._all_offsets(), self._all_weights()
        self.shape = tier.shape(tuple(self._specs()))
        self._grouped: _Ahead | None = None
        self._fetched: _Ahead | None = None
        self._staged: kernels.Staged | None = None
        # Made here, which may be ahead of the step, since pinning memory takes longer than filling it.
        self._room = torch.empty(self.staged_size, pin_memory=tier.device.type == "cuda")
        self.prepared: Any = None if prepare is None else prepare(self)
        if prepare is None:
            self._send()

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """The slot of every lookup: where its row is, or is staged."""
        return self._placed.slots

    @property
    def held(self) -> npt.NDArray[np.int32]:
        """The numbers of the batch's rows that the device holds."""
        return self._placed.held

    @property
    def staged_begins(self) -> Ints:
        """Where the staged rows of each segment begin."""
        return np.array([self._starts[tables[0]] for tables in self._tier.segments])

    def _send(self) -> None:
        """Slots to the device, and the grouping that the update needs, ahead of the step."""
        tier = self._tier
        inverses = [None if group.inverse is None else group.inverse.numpy() for group in self.batch.groups]
        with _Ahead(tier) as ahead:
            sent = _send([self.slots, self.held, self.offsets, self.weights, *inverses], tier.device)
            self._slots, held, self._offsets, self._weights, *self._inverses = sent
            self._held = held.long()
            self._on_device = kernels.group(tier.storage, self.shape, self._slots, self._offsets, self._weights)
        self._grouped = ahead.keep([*sent, self._held, *self._on_device])

    def _route(self) -> Routed:
        """Keys that the device does not hold, to the tiers that do; their rows are staged one after another."""
        dims = [table.dim for table in self._tier.tables.values()]
        self._starts, self.staged_size = [0] * len(dims), 0
        for tables in self._tier.segments:
            self.staged_size = aligned(self.staged_size)
            for t in tables:
                self._starts[t] = self.staged_size
                self.staged_size += len(self._placed.others[t]) * dims[t]
        self._rest = self._tier.rest(self.router)
        return self._rest.route(self.layout.tables, self._placed.others, self._starts)

    @property
    def rest(self) -> Router:
        return self._rest

    def keys(self) -> list[Ints]:
        return self._placed.others

    def fetch_results(self, step: int, training: bool) -> bool:
        return False  # they are computed on the device

    def fetch(self, step: int, training: bool, only: Only | None = None) -> None:
        self.training = training
        rows = self._new_rows()
        self._bring(rows.numpy(), step, only)
        self._keep_rows(rows)

    def read_again(self, chosen: Chosen, step: int, only: Only) -> None:
        if any(map(len, chosen)):
            rows = self._new_rows()
            self._rest.read(narrow([e for e in self.routed if only(e[0])], chosen), rows.numpy(), step)
            self._keep_rows(rows)

    def _new_rows(self) -> Tensor:
        """Room for the staged rows, with those that are here; where they lie now they may be on their way already.

        Not if they were prepared for a graph: then they go when its step begins.
        """
        if self.rows is None:
            return self._room
        if self.prepared is not None:
            return self.rows
        return torch.empty(self.staged_size, pin_memory=self._tier.device.type == "cuda").copy_(self.rows)

    def _keep_rows(self, rows: Tensor) -> None:
        self.rows = rows
        if self.prepared is None:
            self._stage()

    def _stage(self) -> None:
        """Rows of other tiers to the device."""
        assert self.rows is not None
        with _Ahead(self._tier) as ahead:
            if self.staged_size:
                sent = self.rows.to(self._tier.device, non_blocking=True)  # float32, which holds rows of any dtype
                self._staged = kernels.Staged(sent, *_send([self.staged_begins], self._tier.device))
                ahead.keep([self._staged.rows, self._staged.begins])
        self._fetched = ahead

    def embed(self) -> Embedded:
        if self.rows is None:
            raise BatchError("This lookup has no rows yet: fetch it before it is embedded.")
        if self._grouped is None or self._fetched is None:  # prepared for something else
            self._send()
            self._stage()
        assert self._grouped is not None and self._fetched is not None
        self._grouped.join()
        self._fetched.join()
        start = torch.empty(0, requires_grad=self.training, device=self._tier.device)
        results = _DevicePool.apply(start, self)  # type: ignore[no-untyped-call]
        return self._embedded(results)

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        self._add(list(grads))

    def gradients(self) -> Gradients:
        assert self.grads is not None
        self.grads = [None if grad is None else grad.float().cpu().contiguous() for grad in self.grads]
        return super().gradients()

    def finish(self, step: int) -> Gradients:
        """Updates the device's rows where they are, and gives the others' summed gradients."""
        tier = self._tier
        handed = torch.empty(self.staged_size, device=tier.device) if self._staged is not None else None
        tier.begin_step(step)
        if self.shape.lookups:
            kernels.update(
                tier.storage,
                self.shape,
                self._on_device,
                self._flat_grads(),
                staged=self._staged,
                handed=handed,
                seed=tier.random() if tier.storage.dtype != torch.float32 else None,
            )
            tier.count(self._held, step)
        self.count_accesses()
        return _Arriving(handed)

    def count_accesses(self) -> None:
        """Counts the batch as trained on."""
        self._tier.hits += self._placed.hits
        self._tier.lookups += self.shape.lookups

    def _flat_grads(self) -> Tensor:
        """The gradients of all results, one after another; one that is missing counts as zeros."""
        assert self.grads is not None
        shapes = [shape for shape in self.result_shapes() if shape is not None]
        grads = [g for g, shape in zip(self.grads, self.result_shapes(), strict=True) if shape is not None]
        if len(grads) == 1 and grads[0] is not None:
            return grads[0].contiguous().view(-1)
        kinds = {g.dtype for g in grads if g is not None}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        flat = [
            torch.zeros(rows * width, dtype=dtype, device=self._tier.device) if g is None else g.reshape(-1).to(dtype)
            for g, (rows, width) in zip(grads, shapes, strict=True)
        ]
        return torch.cat(flat)

    def _results(self) -> tuple[Tensor | None, ...]:
        tier = self._tier
        flat = kernels.lookup(tier.storage, self.shape, self._slots, self._offsets, self._weights, staged=self._staged)
        views = iter(self.shape.views(flat))
        return tuple(None if shape is None else next(views) for shape in self.result_shapes())

    def _embedded(self, results: tuple[Tensor | None, ...]) -> Embedded:
        groups = self.batch.groups
        pooled = [
            PooledGroup(names, dims, rows, inverse)
            for (names, dims, _), rows, inverse in zip(self.layout.pooled, results, self._inverses, strict=False)
            if rows is not None
        ]
        sequences = {}
        for (name, g, k, _), rows in zip(self.layout.sequences, results[len(groups) :], strict=True):
            assert rows is not None
            s = groups[g].unique_size
            offsets = groups[g].offsets[k * s : (k + 1) * s + 1]
            begins = self.window_begins(name) if groups[g].begins is not None else None
            sequences[name] = JaggedRows(
                rows,
                (offsets - offsets[0]).to(self._tier.device),
                self._inverses[g],
                None if begins is None else begins.to(self._tier.device),
            )
        return Embedded(pooled, sequences)

    def _specs(self) -> list[kernels.GroupSpec]:
        """The pooled features of each group, then each sequence for itself: the order in which lookups are placed."""
        specs = []
        shapes = self.result_shapes()
        for group, names in zip(self.batch.groups, self._pooled_names(), strict=True):
            if names:
                features = tuple(kernels.FeatureSpec(*self.layout.looks_up(name)) for name in names)
                specs.append(kernels.GroupSpec(features, group.unique_size, int(_offsets(group, names)[-1])))
        for (name, *_), shape in zip(self.layout.sequences, shapes[len(self.batch.groups) :], strict=True):
            assert shape is not None
            feature = kernels.FeatureSpec(*self.layout.looks_up(name), shape[0])
            specs.append(kernels.GroupSpec((feature,), 0, shape[0]))
        return specs

    def _pooled_names(self) -> list[tuple[str, ...]]:
        return [names for names, _, _ in self.layout.pooled]

    def _all_offsets(self) -> Ints:
        pooled = zip(self.batch.groups, self._pooled_names(), strict=True)
        offsets = [_offsets(group, names) for group, names in pooled if names]
        if len(offsets) == 1 and not self.layout.sequences:
            return offsets[0]
        return np.concatenate([*offsets, np.zeros(len(self.layout.sequences), np.int64)])

    def _all_weights(self) -> Floats | None:
        """A weight for each lookup where a group has weights; sequences have no use for them."""
        if all(group.weights is None for group in self.batch.groups):
            return None
        weights = []
        for group, names in zip(self.batch.groups, self._pooled_names(), strict=True):
            for name in names:
                bags = group[name]
                weights.append(np.ones(len(bags.values), np.float32) if bags.weights is None else bags.weights.numpy())
        sequences = self.result_shapes()[len(self.batch.groups) :]
        return np.concatenate([*weights, *(np.ones(shape[0], np.float32) for shape in sequences if shape is not None)])


def _offsets(group: Group, names: tuple[str, ...]) -> Ints:
    """Where the bags of these features begin if they stand one after another."""
    offsets = group.offsets.numpy()
    if names == group.features:
        return offsets
    s = group.unique_size
    lengths = offsets[1:] - offsets[:-1]
    own = [lengths[k * s : (k + 1) * s] for k in (group.features.index(name) for name in names)]
    return np.concatenate([[0], np.cumsum(np.concatenate(own))])


class Parcel:
    """Arrays packed one behind another in pinned memory, to go to a device in one copy."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        self.kinds = tuple(None if a is None else (a.dtype, a.shape) for a in arrays)
        sizes = [0 if a is None else -(-a.nbytes // _ALIGNED) * _ALIGNED for a in arrays]
        self._begins = np.cumsum([0, *sizes]).tolist()
        self._pinned = torch.empty(self._begins[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        into = self._pinned.numpy()
        for a, begin in zip(arrays, self._begins, strict=False):
            if a is not None:
                into[begin : begin + a.nbytes].view(a.dtype)[:] = a.reshape(-1)

    def send(self, device: torch.device, there: Tensor | None = None) -> Tensor:
        """The bytes on the device, or in `there`; nobody waits for them."""
        there = torch.empty(self._begins[-1], dtype=torch.uint8, device=device) if there is None else there
        return there.copy_(self._pinned, non_blocking=True)

    def tensors(self, there: Tensor) -> list[Any]:
        """The arrays in bytes that were sent."""
        found: list[Any] = []
        for kind, begin in zip(self.kinds, self._begins, strict=False):
            if kind is None:
                found.append(None)
                continue
            empty = np.empty((0,), kind[0])
            size = int(np.prod(kind[1])) * empty.itemsize
            found.append(there[begin : begin + size].view(torch.from_numpy(empty).dtype).view(kind[1]))
        return found


def _send(arrays: Sequence[npt.NDArray[Any] | None], device: torch.device) -> list[Any]:
    """The arrays on the device; from pinned memory, so that nobody waits for them."""
    if device.type == "cpu":
        return [None if array is None else torch.from_numpy(array) for array in arrays]
    parcel = Parcel(arrays)
    return parcel.tensors(parcel.send(device))


class _Arriving(Gradients):
    """Gradients on their way from the device: whoever asks for them waits until they are here, and nobody else."""

    def __init__(self, there: Tensor | None) -> None:
        super().__init__(np.empty(0, np.float32))
        self._event: Any = None
        if there is not None and there.is_cuda:
            self._host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._host.copy_(there, non_blocking=True)
            self._event = torch.cuda.current_stream(there.device).record_event()
        elif there is not None:
            self._flat = there.numpy()

    @property
    def flat(self) -> Floats:
        if self._event is not None:
            self._event.synchronize()
            self._flat, self._event = self._host.numpy(), None
        assert self._flat is not None
        return self._flat


class _Ahead:
    """Work on the tier's own stream, beside whatever the device is doing; `join` lets the current stream use it."""

    def __init__(self, tier: DeviceTier) -> None:
        self._stream: Any = tier.stream
        self._scope: Any = contextlib.nullcontext() if tier.stream is None else torch.cuda.stream(tier.stream)
        self._event: Any = None
        self._kept: list[Tensor] = []

    def keep(self, tensors: Sequence[Tensor | None]) -> _Ahead:
        """Names what was made here and will be used on another stream."""
        self._kept += [tensor for tensor in tensors if tensor is not None]
        return self

    def __enter__(self) -> _Ahead:
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._event = self._stream.record_event()
        self._scope.__exit__(*error)

    def join(self) -> None:
        if self._event is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._event)
        for tensor in self._kept:  # or its memory might be given away while the current stream still reads it
            tensor.record_stream(current)


class _DevicePool(torch.autograd.Function):
    """All features of a batch in one node, on the device; the lookup keeps the results' gradients."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, lookup: DeviceLookup) -> tuple[Tensor | None, ...]:
        ctx.lookup = lookup
        ctx.save_for_backward(start)
        ctx.set_materialize_grads(False)
        return lookup._results()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        _ = ctx.saved_tensors  # PyTorch refuses them, and so a second backward, where the graph was not retained
        ctx.lookup.keep(grads)
        return None, None
