"""Measures a topology from inside it: every rank calls `measure`, and all get the same answer.

Exchanges are all-to-alls of torch.distributed over lanes as the sharded tiers have them, connections included, so what
Gloo or NCCL adds is in the figures. For `between` every rank sends to all others; for `rail` each to those of its place
on other nodes, all rails at once, a node as many bytes as before; for `within` each to its node's others. Two sizes,
several times each: a small one gives the latency, and what the large one takes more gives the bandwidth. It takes two
to three seconds a link.

Each exchange comes after some work, as in a training step: where ranks share few cores it takes longer than one after
another (1.3 ms and 0.4, four ranks on two cores). A small one takes what a rank has of it; a large one is over when the
last rank has its bytes: connections do not share a link evenly, and what ranks take on average is too little (8 MB a
node over rails at 1 Gbit/s: 68 ms, and 88 until the last has them).

A process that is alone measures no link and reports the memory there is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hotrow.errors import SettingsError
from hotrow.plan.topology import Link, Topology
from hotrow.plan.uses import Floats
from hotrow.tiers.lanes import connections, exchange
from hotrow.world import LaneKind, World

SMALL = 1 << 10
LARGE = 8 << 20
"""Bytes that each rank sends to each other one of its node or rail; over the world a node sends as many in all."""
WORK = 12 << 20
"""Bytes that each rank copies before an exchange."""
TURNS = 15
_COUNTERS = Path("/proc/net/dev")


def measure(world: World, *, large: int = LARGE, turns: int = TURNS) -> Topology:
    """The topology of all ranks; each must call it, after `torch.distributed.init_process_group`."""
    device = _device(world)
    if world.size == 1:
        return Topology(nodes=1, ranks=1, memory=_memory(device, 1))
    memory = torch.tensor([_memory(device, world.node_size)], dtype=torch.int64, device=device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    found: dict[str, Link] = {}
    if world.nodes > 1:
        each = max(large // world.node_size, 4 * SMALL)
        found["between"] = _link("world", world, device, large=each, turns=turns)
    if world.node_size > 1:
        found["within"] = _link("node", world, device, large=large, turns=turns)
    if world.nodes > 1 and world.node_size > 1:  # with one rank a node the world is one rail
        found["rail"] = _link("rail", world, device, large=large, turns=turns)
    return Topology(nodes=world.nodes, ranks=world.node_size, memory=int(memory.item()), **found)


def host_memory() -> int:
    """Bytes this process may take of the host's memory: all of it, or the limit of its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        said = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, int(said)) if said.isdecimal() else total
    except OSError:
        return total


def _device(world: World) -> torch.device:
    """Where exchanged tensors must lie: NCCL takes those of its device only."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", world.node_rank)
    return torch.device("cpu")


def _memory(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() // ranks


def _link(kind: LaneKind, world: World, device: torch.device, *, large: int, turns: int) -> Link:
    """The link that lanes of a kind exchange over, all of them at once."""
    every = world.lanes(kind)
    members, near = len(every[0]), 1 if kind == "rail" else world.node_size
    lines = connections(members, apart=kind != "node")
    groups = [dist.new_subgroups_by_enumeration(every)[0] for _ in range(lines)]  # type: ignore[no-untyped-call]
    sent = members - 1 if kind == "node" else world.node_size * (members - near)  # messages of one sender: rank or node
    few = float(np.median(_gathered(_exchange(groups, device, SMALL, 3 * turns), device), axis=1).mean())
    for size in (large, 4 * large, 16 * large):  # where much else is going on, more must be sent to see a difference
        before = sent_bytes()
        much = float(_gathered(_exchange(groups, device, size, turns), device).max(axis=0).mean())
        counted = (sent_bytes() - before) / (sent * size * (turns + 1)) - 1 if kind != "node" else 0.0
        headers = float(_gathered([counted], device).max())
        if much > 1.25 * few:
            break
    for group in groups:
        dist.destroy_process_group(group)
    if much <= few:
        raise SettingsError(
            f"Exchanges of {size:,} bytes took no longer than of {SMALL:,}, so no bandwidth can be told: something "
            "else is busy on these machines. Measure again."
        )
    return Link(
        bandwidth=sent * (size - SMALL) / (much - few), latency=few, overhead=headers if 0 < headers < 0.25 else 0.0
    )


def _gathered(values: Sequence[float], device: torch.device) -> Floats:
    """The values of all ranks, a line for each."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).cpu().numpy()


def _exchange(groups: list[Any], device: torch.device, each: int, turns: int) -> list[float]:
    """Seconds of all-to-alls in which each rank sends `each` bytes to each other, as this rank has them."""
    ranks = dist.get_world_size(groups[0])
    sizes = [each] * ranks
    sizes[dist.get_rank(groups[0])] = 0  # what stays on a rank crosses no link
    data = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    out = torch.empty_like(data)
    taken = []
    work, copied = np.zeros((2, WORK), np.uint8)
    for _ in range(turns + 1):
        copied[:] = work
        dist.barrier()
        begin = time.perf_counter()
        exchange(out, data, sizes, sizes, groups)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return taken[1:]


def sent_bytes() -> int:
    """Bytes this host has sent over its interfaces, the loopback left out; 0 where the system does not say."""
    try:
        lines = _COUNTERS.read_text().splitlines()[2:]
    except OSError:
        return 0
    named = (line.partition(":") for line in lines)
    return sum(int(values.split()[8]) for name, _, values in named if name.strip() != "lo")
