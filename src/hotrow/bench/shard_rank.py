"""A rank of `hotrow bench shard`: `python -m hotrow.bench.shard_rank JOB.json OUT.json`, with torchrun's environment.

For each log all ranks measure the links they have, plan for them, and then the sides take turns. Once for all would not
do: where cores are not these ranks' alone, how fast they talk changes within minutes by more than a prediction may be
off.

An exchange is timed alone: the fetch and the update of a batch, ranks standing at a barrier before each, with the batch
grouped before and the gradients computed in between. Training is timed whole: from a batch's keys to the updates of
rows and dense weights. Bytes are those that the kernel counts on this host's link, from a barrier before a turn to one
behind it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from hotrow import Batch, Embeddings, Feature, Table, _native
from hotrow.bench.dedup_step import keep_memory
from hotrow.bench.shard_work import LR, LightModel, Work
from hotrow.data import DataSet, Reader
from hotrow.peers import Peers
from hotrow.plan import Plan
from hotrow.plan.budget import count_keys
from hotrow.plan.cluster import used_tables
from hotrow.plan.cost import TableUse
from hotrow.plan.measure import measure, sent_bytes
from hotrow.plan.shard import Sharding, shard
from hotrow.plan.topology import Topology
from hotrow.plan.traffic import Dedup, Wire
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.tiers.collective import CollectiveTier
from hotrow.world import World

Ints = npt.NDArray[np.int64]
MEMORY = 4 << 30  # what a rank may take; the budget of copies is what limits


@dataclass(frozen=True)
class Job:
    """What the ranks do. `budget` are the bytes a rank that copies may take; `turns` and `steps` of each side."""

    work: dict[str, Any]
    budget: int
    turns: int
    steps: int
    train_turns: int
    train_steps: int
    torchrec: bool
    replicated: int
    node: int
    """Rows of each table that the side "copies" copies, whether it pays or not."""
    logs: dict[str, str] = field(default_factory=dict)
    """Prepared data sets of real logs, by name."""
    log_batch: int = 4096


@dataclass
class Reading:
    """What one side did on this rank, step by step; bytes are of this host's link, where this rank counts them."""

    exchanges: list[list[tuple[float, float]]] = field(default_factory=list)
    """For each step its exchanges in their order: when each began and ended here, by the machine's one clock."""
    calls: list[float] = field(default_factory=list)
    """Seconds of a whole step of training; where exchanges are timed alone, of fetch and update."""
    bytes: int = 0
    steps: int = 0


class Rows:
    """Rows sharded as a plan says, and the exchanges of a step alone."""

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature], plan: Plan, world: World) -> None:
        self.embeddings = Embeddings(tables, features, plan=plan, world=world)
        self._seen: list[tuple[float, float]] = []
        for tier in self.embeddings.router.tiers.values():
            assert isinstance(tier, CollectiveTier)
            for traffic in tier.traffic.values():
                traffic.told = lambda begun, ended: self._seen.append((begun, ended))

    def exchange(self, batch: Batch, reading: Reading | None) -> None:
        """One step of fetch and update."""
        self._seen = []
        lookup = self.embeddings.group(batch)
        dist.barrier()
        begin = time.perf_counter()
        self.embeddings.fetch(lookup)
        taken = time.perf_counter() - begin
        embedded = self.embeddings.embed(lookup)
        found = [embedded.sequence(n).values for n in embedded.sequence_features] + [g.rows for g in embedded.groups]
        torch.autograd.backward(found, [torch.full_like(rows, 1e-3) for rows in found])
        update = self.embeddings.finish()
        _ = update.grads.flat  # summed by row before the exchange begins
        dist.barrier()
        begin = time.perf_counter()
        update.apply()
        taken += time.perf_counter() - begin
        if reading is not None:
            reading.exchanges.append(self._seen)
            reading.calls.append(taken)
            reading.steps += 1

    @property
    def held(self) -> int:
        """Bytes of this rank's rows."""
        return sum(found["bytes"] for found in self.embeddings.stats().values())

    def close(self) -> None:
        for tier in self.embeddings.router.tiers.values():
            tier.close()


def main(job_file: str, out: str) -> None:
    """Does the job with the other ranks; this rank's readings go to a file."""
    torch.set_num_threads(1)
    _native.set_threads(1)
    keep_memory()
    job = Job(**json.loads(Path(job_file).read_text()))
    world = World.here()
    dist.init_process_group("gloo")
    work = Work(**job.work)
    found = {
        "zipf": on_zipf(job, work, world),
        "logs": {name: on_log(job, Path(path), world) for name, path in job.logs.items()},
        "train": trained(job, work, world),
    }
    Path(out).write_text(json.dumps(found))
    dist.barrier()
    Peers.of(world).close()
    os._exit(0)  # native threads of the peer's, still at work, would abort an orderly end


def links(world: World) -> Topology:
    """The links as they are now."""
    return measure(world).model_copy(update={"memory": MEMORY})


def row_wise(tables: Sequence[Table], dedup: Dedup) -> Plan:
    """Everything row-wise over the world."""
    plan = Plan.all_on("world", tables)
    return Plan(plan.shares, plan.row_bytes, {"dedup": dedup, "wire": "float32"})


def chosen(
    used: Sequence[TableUse],
    topology: Topology,
    hottest: Callable[[str, int], Ints],
    extra: int,
    wire: Wire = "float32",
) -> tuple[Plan, Sharding]:
    """What the planner takes for the links that were measured."""
    made = shard(used, topology, extra=extra, wire=wire)
    return made.plan(hottest), made


def on_zipf(job: Job, work: Work, world: World) -> dict[str, Any]:
    """The exchanges of every side, and what was expected of each."""
    topology = links(world)
    used = work.used(topology)
    sides, made = _sides(job, work.settings, used, topology, lambda _, count: work.keys[:count])
    rows = {name: Rows(work.settings, work.features, plan, world) for name, plan in sides.items()}

    def batches() -> Iterator[Batch]:
        return (work.batch_of(work.drawn(world.rank, number)) for number in itertools.count())

    return _exchanged(job, rows, {name: batches() for name in rows}, made, world)


def on_log(job: Job, path: Path, world: World) -> dict[str, Any]:
    """The same on a real log's items and histories of items, in the order in which training reads them."""
    topology = links(world)
    dataset = DataSet.open(path)
    counted = count_keys(dataset)
    features = [f for f in dataset.schema.feature_settings() if f.table == "item"]
    tables = [Table(name="item", dim=job.work["dim"], optimizer=RowWiseAdagrad(lr=LR))]
    used = used_tables(dataset, tables, counted, topology, job.log_batch, features=features)
    sides, made = _sides(job, tables, used, topology, lambda name, count: counted.counts[name].hottest(count)[0])
    rows = {name: Rows(tables, features, plan, world) for name, plan in sides.items()}

    def batches(name: str) -> Iterator[Batch]:
        reader = Reader(dataset, "train", job.log_batch, rank=world.rank, world=world.size, drop_last=True, threads=0)
        while True:
            for batch in reader:  # row-wise sends every lookup of every sample
                yield batch.expand() if name == "row-wise" else batch

    return _exchanged(job, rows, {name: batches(name) for name in rows}, made, world)


def _sides(
    job: Job,
    tables: Sequence[Table],
    used: Sequence[TableUse],
    topology: Topology,
    hottest: Callable[[str, int], Ints],
) -> tuple[dict[str, Plan], dict[str, Sharding]]:
    """Row-wise in its two forms, the plan in row-wise's memory and with the budget, in 16 bits; and copies anyway."""
    sides: dict[str, Plan] = {"row-wise": row_wise(tables, "none"), "rank dedup": row_wise(tables, "rank")}
    ways: dict[str, Dedup] = {"row-wise": "none", "rank dedup": "rank"}
    whole = tuple({"world": t.keys, "node": t.keys * 0, "replicated": t.keys * 0} for t in used)
    made = {name: Sharding(topology, "float32", way, tuple(used), whole, 0) for name, way in ways.items()}
    asked: tuple[tuple[str, int, Wire], ...] = (
        ("same memory", 0, "float32"),
        ("ours", job.budget, "float32"),
        ("ours, bfloat16", job.budget, "bfloat16"),
    )
    for name, extra, wire in asked:
        sides[name], made[name] = chosen(used, topology, hottest, extra, wire)
    forced = tuple(_copied(t, job.replicated, job.node) for t in used)
    made["copies"] = Sharding(topology, "float32", made["ours"].dedup, tuple(used), forced, job.budget)
    sides["copies"] = made["copies"].plan(hottest)
    return sides, made


def _copied(table: TableUse, replicated: int, node: int) -> dict[str, Ints]:
    """So many of the most used rows copied to every rank, and so many more to every node."""
    before = np.cumsum(table.keys) - table.keys
    hottest = {
        name: np.clip(n - before, 0, table.keys) for name, n in (("rank", replicated), ("both", replicated + node))
    }
    on_node = hottest["both"] - hottest["rank"]
    return {"replicated": hottest["rank"], "node": on_node, "world": table.keys - hottest["both"]}


def _told(sharding: Sharding) -> dict[str, Any]:
    traffic = sharding.traffic
    return {
        "between": traffic.between_with_headers(sharding.topology),
        "seconds": traffic.seconds(sharding.topology),
        "memory": sharding.memory,
        "dedup": sharding.dedup,
        "copies": {tier: sum(sharding.rows(tier).values()) for tier in ("replicated", "node")},
    }


def _exchanged(
    job: Job,
    rows: Mapping[str, Rows],
    batches: Mapping[str, Iterator[Batch]],
    made: Mapping[str, Sharding],
    world: World,
) -> dict[str, Any]:
    """Readings of sides that take turns, each with a first step in every turn that does not count."""
    readings = {name: Reading() for name in rows}
    for _ in range(job.turns):
        for name, side in rows.items():
            side.exchange(next(batches[name]), None)
            sent = _counted(world)
            for _ in range(job.steps):
                side.exchange(next(batches[name]), readings[name])
            readings[name].bytes += _counted(world) - sent
    sides = {
        name: {**asdict(readings[name]), "held": side.held, "expected": _told(made[name])}
        for name, side in rows.items()
    }
    for side in rows.values():
        side.close()
    return {"sides": sides, "topology": made["ours"].topology.model_dump()}


def _counted(world: World) -> int:
    """Bytes that left this host so far, all ranks having come to the same point; 0 but on one rank of each host."""
    dist.barrier()
    found = sent_bytes() if world.node_rank == 0 else 0
    dist.barrier()
    return found


def trained(job: Job, work: Work, world: World) -> dict[str, Any]:
    """Whole training steps: ours, and TorchRec's in its ways, by turns."""
    topology = links(world)
    plan, _ = chosen(work.used(topology), topology, lambda _, count: work.keys[:count], job.budget)
    embeddings = Embeddings(work.settings, work.features, plan=plan, world=world)

    def ours(keys: Sequence[Ints]) -> list[Tensor]:
        embedded = embeddings(work.batch_of(keys))
        return [embedded.sequence(f.name).values.view(work.batch, work.length, work.dim) for f in work.features]

    steps = {"ours": _training(ours, work, world, embeddings.step)}
    if job.torchrec:
        from hotrow.bench.shard_torchrec import sharded

        for way in ("row", "table"):
            for dedup in (False, True):
                name = f"torchrec {way}-wise{', index dedup' if dedup else ''}"
                steps[name] = _training(sharded(work, world, way, dedup), work, world)
    readings = {name: Reading() for name in steps}
    number = 0
    for turn in range(job.train_turns + 1):  # the first turn makes rows and connections, and does not count
        for name, step in steps.items():
            before = _counted(world)
            for _ in range(job.train_steps if turn else 1):
                keys = work.drawn(world.rank, 1_000_000 + number)
                number += 1
                dist.barrier()
                begin = time.perf_counter()
                step(keys)
                if turn:
                    readings[name].calls.append(time.perf_counter() - begin)
            if turn:
                readings[name].bytes += _counted(world) - before
                readings[name].steps += job.train_steps
    for tier in embeddings.router.tiers.values():
        tier.close()
    return {name: asdict(reading) for name, reading in readings.items()}


def _training(
    look_up: Callable[[Sequence[Ints]], list[Tensor]],
    work: Work,
    world: World,
    update: Callable[[], None] = lambda: None,
) -> Callable[[Sequence[Ints]], None]:
    torch.manual_seed(0)
    model = LightModel(work.tables, work.dim)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    labels = (torch.arange(work.batch) % 2).float()

    def step(keys: Sequence[Ints]) -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(look_up(keys))
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
        update()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        flat /= world.size
        at = 0
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
