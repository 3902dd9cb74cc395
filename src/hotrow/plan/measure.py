"""Measures a topology from inside it: every rank calls `measure`, and all get the same answer.

Exchanges are all-to-alls of torch.distributed, as the sharded tiers make them, so what Gloo or NCCL adds is in the
figures. Between nodes all ranks of a node send at once, each to those of its own number on other nodes; within a
node each rank sends to its node's others. Two sizes, several times each: a small one gives the latency, and what the
large one takes more gives the bandwidth. It takes about two seconds a link. Where ranks share the cores of a host, an
exchange that comes after work takes longer than one after another (1.3 ms and 0.4, four ranks on two cores): so each
is measured after some, as a training step has it.

A process that is alone measures no link and reports the memory there is.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hotrow.errors import SettingsError
from hotrow.plan.topology import Link, Topology
from hotrow.tiers.lanes import connections, exchange
from hotrow.world import World

SMALL = 1 << 10
LARGE = 8 << 20
"""Bytes that each rank sends to each other one."""
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
    between = within = None
    if world.nodes > 1:
        among = [list(range(r, world.size, world.node_size)) for r in range(world.node_size)]
        between = _link(among, device, senders=world.node_size, large=large, turns=turns, counted=True)
    if world.node_size > 1:
        among = [list(range(n * world.node_size, (n + 1) * world.node_size)) for n in range(world.nodes)]
        within = _link(among, device, senders=1, large=large, turns=turns, counted=False)
    return Topology(nodes=world.nodes, ranks=world.node_size, memory=int(memory.item()), between=between, within=within)


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


def _link(among: list[list[int]], device: torch.device, *, senders: int, large: int, turns: int, counted: bool) -> Link:
    """The link that each of these groups of ranks exchanges over, all of them at once; `senders` share it."""
    lines = connections(len(among[0]), apart=counted)
    groups = [dist.new_subgroups_by_enumeration(among)[0] for _ in range(lines)]  # type: ignore[no-untyped-call]
    sent = senders * (dist.get_world_size(groups[0]) - 1)
    few = statistics.median(_exchange(groups, device, SMALL, 3 * turns))
    few = _over_ranks([few], device, dist.ReduceOp.SUM)[0] / dist.get_world_size()
    for size in (large, 4 * large, 16 * large):  # where much else is going on, more must be sent to see a difference
        before = sent_bytes()
        taken = statistics.fmean(_exchange(groups, device, size, turns))  # a busy link has good times and bad ones
        headers = (sent_bytes() - before) / (sent * size * (turns + 1)) - 1 if counted else 0.0
        much, headers = _over_ranks([taken, headers], device, dist.ReduceOp.MAX)
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


def _over_ranks(values: list[float], device: torch.device, reduce: dist.ReduceOp.RedOpType) -> list[float]:
    """Each value's sum over the ranks, or the largest of any."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=reduce)
    return [float(v) for v in tensor.tolist()]


def _exchange(groups: list[Any], device: torch.device, each: int, turns: int) -> list[float]:
    """Seconds of all-to-alls in which each rank sends `each` bytes to each other."""
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
