"""`DeviceLookup`: a batch whose results are computed on the device, from rows that live there and rows that are staged.

Rows of the device tier are read and updated in place. Unique rows of all other tiers are fetched as ever, into pinned
memory, and lie on the device for one step; the sums of their gradients come back and are handed to their tiers. So the
link carries unique cold rows, once each way, and one slot (4 bytes) a lookup.

The grouping on the device, which the update needs, is made ahead of the step, on a stream of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow import _native, kernels
from hotrow.data.batch import Batch, Group
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError
from hotrow.lookup import Layout, Lookup
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.router import Routed, Router
from hotrow.tiers.tier import Floats, Gradients

Ints = npt.NDArray[np.int64]
_ALIGNED = 16  # bytes: what any array's elements are aligned to


class DeviceLookup(Lookup):
    """A batch, and where each of its rows is."""

    def __init__(
        self,
        batch: Batch,
        layout: Layout,
        grouping: _native.Grouping,
        router: Router,
        tier: DeviceTier,
        send: bool = True,
    ) -> None:
        self._tier = tier
        self._placed = tier.place(grouping)
        super().__init__(batch, layout, grouping, router)
        self.offsets, self.weights = self._all_offsets(), self._all_weights()
        self.shape = tier.shape(tuple(self._specs()))
        self._sends = send
        self._fetched: _Ahead | None = None
        self._staged: kernels.Staged | None = None
        if send:
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
        self._grouped = ahead.keep([*sent, self._held, *vars(self._on_device).values()])

    def _route(self) -> Routed:
        """Keys that the device does not hold, to the tiers that do; their rows are staged one after another."""
        dims = [table.dim for table in self._tier.tables.values()]
        self._starts, self.staged_size = [0] * len(dims), 0
        for t in (t for tables in self._tier.segments for t in tables):
            self._starts[t] = self.staged_size
            self.staged_size += len(self._placed.others[t]) * dims[t]
        self._rest = self._tier.rest(self.router)
        return self._rest.route(self.layout.tables, self._placed.others, self._starts)

    def fetch(self, step: int, training: bool) -> None:
        self.training = training
        tier = self._tier
        with _Ahead(tier) as ahead:
            rows = torch.empty(self.staged_size, pin_memory=tier.device.type == "cuda")
            if training:
                self.tickets = self._rest.fetch(self.routed, rows.numpy(), step)
            else:
                self._rest.read(self.routed, rows.numpy(), step)
            if self.staged_size and self._sends:
                sent = rows.to(tier.device, non_blocking=True).to(tier.storage.dtype)
                self._staged = kernels.Staged(sent, *_send([self.staged_begins], tier.device))
                ahead.keep([self._staged.rows, self._staged.begins])
        self._fetched = ahead
        self.rows = rows

    def embed(self) -> Embedded:
        if self._fetched is None:
            raise BatchError("This lookup has no rows yet: fetch it before it is embedded.")
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

    def update(self, step: int) -> None:
        """Updates the device's rows where they are, and hands the others' summed gradients to their tiers."""
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
        self.finish(_to_host(handed), step)

    def finish(self, handed: Floats, step: int) -> None:
        """Hands the summed gradients of staged rows to their tiers, once the device's rows are updated."""
        self._tier.hits += self._placed.hits
        self._tier.lookups += self.shape.lookups
        self._rest.update(self.routed, Gradients(handed), step, self.tickets)

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
    """Arrays that go to a device in one copy, to the same place each time: `tensors` are there."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any] | None], device: torch.device) -> None:
        sizes = [0 if a is None else -(-a.nbytes // _ALIGNED) * _ALIGNED for a in arrays]
        self._begins = np.cumsum([0, *sizes]).tolist()
        self._pinned = torch.empty(self._begins[-1], dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(self._begins[-1], dtype=torch.uint8, device=device)
        self.tensors: list[Any] = [
            None if a is None else self._there[b : b + a.nbytes].view(torch.from_numpy(a[:0]).dtype).view(a.shape)
            for a, b in zip(arrays, self._begins, strict=False)
        ]

    def send(self, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        """Arrays of the same shapes; the last ones must have arrived."""
        into = self._pinned.numpy()
        for a, begin in zip(arrays, self._begins, strict=False):
            if a is not None:
                into[begin : begin + a.nbytes].view(a.dtype)[:] = a.reshape(-1)
        self._there.copy_(self._pinned, non_blocking=True)


def _send(arrays: Sequence[npt.NDArray[Any] | None], device: torch.device) -> list[Any]:
    """The arrays on the device; from pinned memory, so that nobody waits for them."""
    if device.type == "cpu":
        return [None if array is None else torch.from_numpy(array) for array in arrays]
    parcel = Parcel(arrays, device)
    parcel.send(arrays)
    return parcel.tensors


def _to_host(tensor: Tensor | None) -> Any:
    if tensor is None:
        return np.empty(0, np.float32)
    if not tensor.is_cuda:
        return tensor.numpy()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.numpy()


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
    def forward(ctx: Any, _: Tensor, lookup: DeviceLookup) -> tuple[Tensor | None, ...]:
        ctx.lookup = lookup
        ctx.set_materialize_grads(False)
        return lookup._results()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.lookup.keep(grads)
        return None, None
