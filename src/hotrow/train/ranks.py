"""What the ranks of a run do together: average dense gradients, combine metrics, and decide.

Dense gradients of all parameters go through one all-reduce of one flat buffer, not DistributedDataParallel: the dense
part of a recommendation model is a few megabytes, one bucket of DDP's or less, so there is nothing to overlap within
it. It is begun after the backward pass and runs beside the embeddings' update, which is the longer of the two. The sum
is divided by the number of ranks: an exact average, and the same bits on every rank. In the same buffer travels what
ranks decide at each step (somebody was told to stop, a checkpoint is due), so that deciding costs no message.

Everything else, once in many steps, goes through `Peers`: texts, so that nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from hotrow.errors import HotrowError, RankError
from hotrow.objectives import Metrics
from hotrow.peers import Peers
from hotrow.world import World

T = TypeVar("T")
Keys = npt.NDArray[np.int64]
RANKS_S = 1800.0
"""Seconds that another rank is waited for, unless a run says otherwise."""
FLAGS = ("SIGINT", "SIGTERM", "checkpoint", "evaluate", "stop", "not finite")
"""What a rank may say with its gradients; the last is the step's own to say."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed after torch 2.12


class Ranks:
    """The ranks of a run, as one of them. A process by itself is the only one, and nothing is sent."""

    def __init__(self, world: World, device: torch.device, *, timeout: float = RANKS_S) -> None:
        self.world, self.device = world, device
        self.peers = Peers.of(world)
        self._keys: Any = None  # a group for each of the threads that use one
        self._between: Any = None
        if world.size > 1:
            self._keys = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._between = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.world.rank == 0

    def decide(self, value: T) -> T:
        """What the first rank thinks, for all; anything that JSON can say."""
        return json.loads(self.peers.agree("decide", json.dumps(value if self.first else None))[0])  # type: ignore[no-any-return]

    def do_first(self, work: Callable[[], T]) -> T | None:
        """Has the first rank do something, and all raise if it fails; what it gave, on the first rank."""
        failure, result = "", None
        if self.first:
            try:
                result = work()
            except HotrowError as error:
                if self.world.size == 1:
                    raise
                failure = f"{error}"
        if failure := self.decide(failure):
            raise HotrowError(failure)
        return result

    def sums(self, *values: float) -> list[float]:
        """Each summed over all ranks, in float64."""
        if self.world.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self.peers.named():
            dist.all_reduce(total, group=self._between)
        return [float(value) for value in total.tolist()]

    def merged(self, metrics: Metrics, fresh: Callable[[], Metrics]) -> dict[str, float]:
        """The metrics of all ranks' samples, exactly, on every rank; `fresh` makes metrics of no sample yet."""
        if self.world.size == 1:
            return metrics.compute()
        state = metrics.state()
        whole = fresh()
        with self.peers.named():
            for rank, arrays in enumerate(self._gather_states(state)):
                whole.merge(arrays if rank != self.world.rank else state)
        computed = whole.compute() if self.first else {}
        said = self.decide({name: repr(value) for name, value in computed.items()})
        return {name: float(value) for name, value in said.items()}

    def gather(self, arrays: list[Keys]) -> list[Keys]:
        """Each array of 32-bit hashes with those of all ranks, one behind the other; in the thread that fetches."""
        if self.world.size == 1:
            return arrays
        sizes = torch.tensor([len(a) for a in arrays], dtype=torch.int64)
        every = torch.empty(self.world.size * len(arrays), dtype=torch.int64)
        mine = torch.from_numpy(np.concatenate(arrays).astype(np.uint32).view(np.int32))
        with self.peers.named():
            _all_gather(every, sizes, group=self._keys)
            counts = every.view(self.world.size, -1)
            room = int(counts.sum(1).max())
            padded = torch.zeros(room, dtype=torch.int32)
            padded[: len(mine)] = mine
            got = torch.empty(self.world.size * room, dtype=torch.int32)
            _all_gather(got, padded, group=self._keys)
        pieces = [
            np.split(row[: sum(of_rank)].numpy().view(np.uint32).astype(np.int64), np.cumsum(of_rank)[:-1])
            for row, of_rank in zip(got.view(self.world.size, room), counts.tolist(), strict=True)
        ]
        return [np.concatenate([of_rank[t] for of_rank in pieces]) for t in range(len(arrays))]

    def generators(self, state: Tensor) -> list[Tensor]:
        """Every rank's state of a random generator."""
        if self.world.size == 1:
            return [state]
        got = [torch.empty_like(state) for _ in range(self.world.size)]
        with self.peers.named():
            dist.all_gather(got, state, group=self._between)
        return got

    def _gather_states(self, state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Every rank's state of metrics, in the order of ranks."""
        mine = json.dumps({name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()})
        shapes = [json.loads(text) for text in self.peers.agree("metrics", mine)]
        for rank, shape in enumerate(shapes):
            found = {}
            for name, (size, kind) in shape.items():
                dtype = getattr(torch, kind.removeprefix("torch."))
                sent = state[name] if rank == self.world.rank else torch.empty(size, dtype=dtype)
                as_bytes = sent.contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(as_bytes, src=rank, group=self._between)
                found[name] = as_bytes.view(dtype).reshape(size)
            yield found


class DenseSync:
    """Averages a model's dense gradients over ranks; `begin` after the backward pass, `end` before the optimizer."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self._parameters]
        self._buffer = torch.zeros(sum(sizes) + len(sizes) + len(FLAGS), device=ranks.device)
        *grads, self._there, self._flags = torch.split(self._buffer, [*sizes, len(sizes), len(FLAGS)])
        self._grads = [g.view_as(p) for g, p in zip(grads, self._parameters, strict=True)]
        self._work: Any = None

    def begin(self, flags: Sequence[bool]) -> None:
        """Sends the gradients there are on their way, and what this rank has to say."""
        if self._ranks.world.size == 1:
            return
        for parameter, room in zip(self._parameters, self._grads, strict=True):
            if parameter.grad is None:
                room.zero_()
            else:
                room.copy_(parameter.grad)
        self._there.copy_(torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.float32))
        self._flags.copy_(torch.tensor(flags, dtype=torch.float32))
        with self._ranks.peers.named():
            self._work = dist.all_reduce(self._buffer, async_op=True)

    def end(self, flags: Sequence[bool]) -> dict[str, bool]:
        """Puts the averages where the gradients were; for each flag whether any rank raised it."""
        if self._ranks.world.size == 1:
            return dict(zip(FLAGS, flags, strict=True))
        with self._ranks.peers.named():
            self._work.wait()
        there = self._there.tolist()
        for parameter, mean, had in zip(self._parameters, self._grads, there, strict=True):
            if had:
                mean.div_(self._ranks.world.size)
                parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)
        return {name: bool(value) for name, value in zip(FLAGS, self._flags.tolist(), strict=True)}


def _join(backend: str, timeout: timedelta) -> None:
    """Joins the process group. Each start by torchrun has keys of its own in the store.

    torchrun keeps one store over its restarts, and Gloo would find the addresses of the processes that are gone in it.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.distributed_c10d.PrefixStore(f"start{start}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


def _why(error: Exception) -> str:
    if "EADDRINUSE" not in str(error):
        return str(error)
    return f"another process holds port {os.environ.get('MASTER_PORT')}. End that one, or set another MASTER_PORT"


@contextlib.contextmanager
def together(device: str, *, nccl: bool = False, timeout: float = RANKS_S) -> Iterator[Ranks]:
    """The ranks that the environment speaks of (`torchrun`, `hotrow up`), joined; or this process alone.

    With a CUDA device dense gradients go over NCCL; rows, which come from host memory, over Gloo unless `nccl` is set.
    """
    world = World.here()
    where = torch.device(device)
    if world.size == 1:
        yield Ranks(world, where)
        return
    if where.type == "cuda":
        where = torch.device("cuda", world.node_rank % max(torch.cuda.device_count(), 1))
        torch.cuda.set_device(where)
    joined = not dist.is_initialized()
    if joined:
        try:
            backend = "gloo" if where.type == "cpu" else "nccl" if nccl else "cpu:gloo,cuda:nccl"
            _join(backend, timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"Rank {world.rank} of {world.size} could not join the others: {_why(error)}.") from error
    try:
        yield Ranks(world, where, timeout=timeout)
    finally:
        if joined:
            Peers.of(world).close()
            dist.destroy_process_group()
