"""What ranks do in tests: functions that `ranks.Ranks` runs in processes of their own."""

from __future__ import annotations

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import CheckpointError, SettingsError
from hotrow.peers import Peers
from hotrow.plan import Plan
from hotrow.store.store import Cut
from hotrow.tiers import lanes
from hotrow.tiers.collective import CollectiveTier
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.replicated import ReplicatedTier
from hotrow.tiers.sharded import ShardedTier
from hotrow.tiers.tier import Tier
from hotrow.world import World
from test_embeddings import loss_of, results

SEED = 5
TIMEOUT = 20.0
lanes.IN_HALVES = 200  # so that small messages too go over two connections, and some still over one


@dataclass
class Job:
    """Tables, and the plans that a run has one after another, a step each; the last one stays."""

    tables: list[Table]
    features: list[Feature]
    plans: list[Plan]
    dedup: str = "node"
    wire: str = "float32"
    device: bool = False
    """Whether results are computed by the kernels, from staged rows; here by their twins."""
    device_rows: tuple[str, ...] = ()
    """Tiers whose rows are on a device, here in dense arrays; the plan names all of them."""
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Keys that are read at the end, on every rank."""


def tiers(job: Job, world: World) -> dict[str, Tier]:
    wire: Any = job.wire
    dedup: Any = job.dedup
    where = device()
    computing: dict[str, Tier] = {"device": DeviceTier(job.tables, seed=SEED, device=where)} if job.device else {}

    def of(name: str) -> dict[str, Any]:
        held = {"device": where, "keys": job.plans[0].keys_on(name)} if name in job.device_rows else {}
        return {"wire": wire, "seed": SEED, "timeout": TIMEOUT, **held}

    return computing | {
        "replicated": ReplicatedTier(job.tables, world, **of("replicated")),
        "node": ShardedTier(job.tables, world, "node", **of("node")),
        "world": ShardedTier(job.tables, world, "world", dedup=dedup, **of("world")),
    }


def device() -> torch.device:
    """The accelerator, where ranks exchange over NCCL; else this process's memory."""
    return torch.device("cuda" if dist.is_initialized() and "nccl" in str(dist.get_backend_config()) else "cpu")


def embeddings(job: Job, world: World) -> Embeddings:
    return Embeddings(job.tables, job.features, seed=SEED, tiers=tiers(job, world), plan=job.plans[0], world=world)


def close(of: Embeddings) -> None:
    for tier in of.router.tiers.values():
        tier.close()


@dataclass
class Seen:
    """What a rank saw: the results of each step, the rows at the end, and every row it would give to a snapshot."""

    results: list[dict[str, Tensor]]
    rows: dict[str, Tensor]
    given: dict[str, dict[int, tuple[Any, ...]]]
    held: dict[str, dict[int, tuple[Any, ...]]]
    ways: list[tuple[str, str]] = field(default_factory=list)
    """How rows of the world travelled in each step: deduplication and format."""


def train(world: World, job: Job, batches: list[Batch]) -> Seen:
    """A step for each batch, each with the plan whose turn it is."""
    ours = embeddings(job, world)
    try:
        seen = []
        for step, batch in enumerate(batches):
            if step and step < len(job.plans):
                ours.replan(job.plans[step])
            embedded = ours(batch)
            seen.append({name: r.detach().clone() for name, r in results(embedded).items()})
            loss_of(embedded).backward()
            ours.step()
        return _seen(ours, job, seen)
    finally:
        close(ours)


def train_planned(world: World, job: Job, batches: list[Batch]) -> Seen:
    """As `train`, with the tiers that the plans ask for and no others."""
    ours = Embeddings(job.tables, job.features, seed=SEED, plan=job.plans[0], world=world)
    ways = []
    try:
        for step, batch in enumerate(batches):
            if step and step < len(job.plans):
                ours.replan(job.plans[step])
            tier = ours.router.tiers["world"]
            assert isinstance(tier, ShardedTier)
            ways.append((tier.dedup, tier.wire))
            loss_of(ours(batch)).backward()
            ours.step()
        seen = _seen(ours, job, [])
        return Seen(seen.results, seen.rows, seen.given, seen.held, ways)
    finally:
        close(ours)


def train_on_device(world: World, job: Job, batches: list[Batch]) -> dict[str, Any]:
    """As `train_planned`, with rows on the device: those of which tiers are, and what is said if they cannot be."""
    ours = Embeddings(
        job.tables, job.features, seed=SEED, plan=job.plans[0], world=world, device=device(), device_rows=True
    )
    try:
        loss_of(ours(batches[0])).backward()
        ours.step()
        before = {table.name: ours.read(table.name, job.keys) for table in job.tables}
        said = ""
        try:
            ours.replan(job.plans[1])
        except SettingsError as error:
            said = str(error)
        ours.replan(job.plans[2])
        for table in job.tables:
            assert torch.equal(ours.read(table.name, job.keys), before[table.name])
        loss_of(ours(batches[1])).backward()
        ours.step()
        tiers = {name: tier.on_device for name, tier in ours.router.tiers.items() if isinstance(tier, CollectiveTier)}
        return {**tiers, "said": said}
    finally:
        close(ours)


def train_own(world: World, own: tuple[Job, list[Batch]]) -> Seen:
    """As `train`, with a job of the rank's own."""
    return train(world, *own)


def train_summed(world: World, job: Job, batches: list[Batch]) -> Seen:
    """Several lookups, one step."""
    ours = embeddings(job, world)
    try:
        sum(loss_of(ours(batch)) for batch in batches).backward()
        ours.step()
        return _seen(ours, job, [])
    finally:
        close(ours)


def train_ahead(world: World, job: Job, batches: list[Batch]) -> Seen:
    """As `train`, but batches are fetched in another thread, up to two of them ahead of the update."""
    ours = embeddings(job, world)
    try:
        with ThreadPoolExecutor(1) as ahead:
            fetched = [ahead.submit(ours.fetch, ours.group(batch), step) for step, batch in enumerate(batches[:2])]
            for step in range(len(batches)):
                lookup = fetched[step].result(timeout=TIMEOUT)
                if step + 2 < len(batches):
                    fetched.append(ahead.submit(ours.fetch, ours.group(batches[step + 2]), step + 2))
                loss_of(ours.embed(lookup)).backward()
                ours.step()
        return _seen(ours, job, [])
    finally:
        close(ours)


def train_and_save(world: World, job: Job, folder: str, base: str | None, batches: list[Batch]) -> Seen:
    """Trains on, from snapshot `base` if there is one, and takes a snapshot; incremental if `base` is."""
    ours = embeddings(job, world)
    try:
        if base:
            ours.restore(base)
        for batch in batches:
            loss_of(ours(batch)).backward()
            ours.step()
        ours.snapshot(Path(folder), base).write()
        return _seen(ours, job, [])
    finally:
        close(ours)


def process(world: World) -> int:
    return os.getpid()


def die_in_mid_run(world: World, job: Job, victim: int, batches: list[Batch]) -> None:
    """Trains, and one rank is killed while the others wait for its rows."""
    ours = embeddings(job, world)
    for step, batch in enumerate(batches):
        lookup = ours.group(batch)
        if step == 1 and world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(ours.embed(ours.fetch(lookup))).backward()
        ours.step()


def miss_a_step(world: World, job: Job, batches: list[Batch]) -> None:
    """Rank 1 believes that it is a step further."""
    ours = embeddings(job, world)
    try:
        ours.steps += world.rank
        ours(batches[0])
    finally:
        close(ours)


def stay_away(world: World, job: Job, batches: list[Batch]) -> None:
    """Rank 0 fetches, and the others do not."""
    tier = ShardedTier(job.tables, world, seed=SEED, timeout=0.5)
    ours = Embeddings(job.tables, job.features, seed=SEED, tiers={"world": tier}, plan=job.plans[0], world=world)
    if world.rank == 0:
        ours(batches[0])
    else:
        Peers.of(world).hear("stopped", [0])  # until rank 0 has given up


def host_rows(world: World, job: Job, batches: list[Batch]) -> None:
    Embeddings(job.tables, job.features, plan=Plan.all_on("host", job.tables), world=world)


def fail_to_write(world: World, job: Job, folder: str, batches: list[Batch]) -> str:
    """Takes a snapshot that one rank cannot write; says what each was told, and takes another that works."""
    ours = embeddings(job, world)
    try:
        loss_of(ours(batches[0])).backward()
        ours.step()
        snapshot = ours.snapshot(Path(folder) / "rows")
        if world.rank == 1:
            snapshot._write_store = _full  # type: ignore[method-assign, assignment]
        try:
            snapshot.write()
        except CheckpointError as error:
            said = str(error)
        ours.snapshot(Path(folder) / "again").write()
        return said
    finally:
        close(ours)


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _seen(ours: Embeddings, job: Job, found: list[dict[str, Tensor]]) -> Seen:
    ours.eval()
    rows = {table.name: ours.read(table.name, job.keys) for table in job.tables}
    return Seen(found, rows, given_rows(ours), held_rows(ours))


def given_rows(of: Embeddings) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Every row that a snapshot would take from this rank, by table and key."""
    found: dict[str, dict[int, tuple[Any, ...]]] = {name: {} for name in of.tables}
    for tier in of.router.tiers.values():
        for name, rows in tier.stores().items():
            _collect(rows, found[name])
    return found


def held_rows(of: Embeddings) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Every row in this rank's memory, copies too, by tier and table, and key."""
    found: dict[str, dict[int, tuple[Any, ...]]] = {}
    for tier_name, tier in of.router.tiers.items():
        for name, rows in tier.stores().items():
            _collect(getattr(rows, "store", rows), found.setdefault(f"{tier_name}/{name}", {}))
    return found


def _collect(rows: Any, into: dict[int, tuple[Any, ...]]) -> None:
    moment = rows.begin_cut(Cut.PEEK)
    while n := len((c := moment.read_snapshot(1000))["keys"]):
        for i, key in enumerate(c["keys"].tolist()):
            assert key not in into, "a row lives on two tiers"
            values, state = c["values"].reshape(n, -1)[i], c["state"].reshape(n, -1)[i]
            into[key] = (values.tolist(), state.tolist(), *(int(c[m][i]) for m in ("clocks", "uses", "last")))
    moment.end_snapshot(True)
