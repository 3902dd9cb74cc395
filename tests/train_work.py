"""What ranks do in tests of training: functions that `ranks.Ranks` runs in processes of their own."""

import os
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from hotrow import Embeddings, Feature, Table, _native
from hotrow.errors import HotrowError
from hotrow.plan import Plan, Share
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.store.optimizers import SGD
from hotrow.tiers import HostTier
from hotrow.train.ranks import Ranks
from hotrow.train.step import Step
from hotrow.train.trainer import train
from hotrow.world import World


def train_run(world: World, text: str, resume: bool = False, trusted: bool = False) -> dict[str, object]:
    """Trains the run of a run file's text, as torchrun would have it; what it came to."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (world.rank, world.size, world.node_size)), strict=True))
    try:
        run = parse(Run, tomllib.loads(text))
        result = train(run.trusted() if trusted else run, resume=resume)
    finally:
        for name in names:
            del os.environ[name]
    return {"stopped": result.stopped, "steps": result.steps, "samples": result.samples, "metrics": result.metrics,
            "best_step": result.best_step, "checkpoint": str(result.checkpoint)}  # fmt: skip


def train_trusted(world: World, text: str) -> dict[str, object]:
    """As `train_run`, of a run that names classes of its own."""
    return train_run(world, text, trusted=True)


def spoiled_snapshot(world: World, folder: str) -> str:
    """Takes a snapshot of rows that only the last rank has spoiled; what it says."""
    table = Table(name="a", dim=2, optimizer=SGD())
    plan = Plan({"a": (Share("world"),)})
    embeddings = Embeddings([table], [Feature(name="a")], plan=plan, world=world)
    bad = np.nan if world.rank == world.size - 1 else 1.0
    zeros = np.zeros(64, np.uint32)
    columns = {"keys": np.arange(64), "values": np.full(128, bad, np.float32), "state": np.empty(0, np.float32)}
    embeddings.router.give("a", {**columns, "clocks": zeros, "uses": zeros, "last": zeros})
    try:
        embeddings.snapshot(Path(folder)).write()
    except HotrowError as error:
        return f"{type(error).__name__}: {error}"
    return "written"


def spoiled_step(world: World, text: str) -> str:
    """Trains where the last rank alone has a weight that is no number from step 4 on; what it says."""
    step = Step.__call__

    def spoiled(self: Step, *arguments: Any) -> Any:
        if self.embeddings.steps == 3 and world.rank == world.size - 1:
            next(self.model.parameters()).data.view(-1)[0] = np.nan
        return step(self, *arguments)

    with mock.patch.object(Step, "__call__", spoiled):
        try:
            train_run(world, text)
        except HotrowError as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


def groups(world: World, text: str) -> list[float]:
    """How many seconds each process group that a run makes waits for the other ranks."""
    seconds, new_group = [], dist.new_group

    def seen(*arguments: Any, timeout: Any = None, **named: Any) -> Any:
        seconds.append(0.0 if timeout is None else timeout.total_seconds())
        return new_group(*arguments, timeout=timeout, **named)

    with mock.patch.object(dist, "new_group", seen):
        train_run(world, text)
    return seconds


def caches(world: World, text: str) -> list[dict[str, Any]]:
    """How the caches of a run are made."""
    made, cache = [], _native.Cache

    def seen(**named: Any) -> Any:
        made.append({name: value for name, value in named.items() if name in ("drift", "sample", "bound")})
        return cache(**named)

    with mock.patch.object(_native, "Cache", seen):
        train_run(world, text)
    return made


def train_unevenly(world: World, text: str) -> dict[str, object]:
    """The same where one rank is slow to update its rows, and the other slow to go on once hashes are exchanged."""
    update, gather = HostTier.update, Ranks.gather

    def slow_update(self: HostTier, *arguments: Any) -> None:
        time.sleep(0.03)
        update(self, *arguments)

    def slow_gather(self: Ranks, arrays: list[Any]) -> list[Any]:
        got = gather(self, arrays)
        time.sleep(0.015)
        return got

    slow: list[Any] = [
        mock.patch.object(Ranks, "gather", slow_gather),
        mock.patch.object(HostTier, "update", slow_update),
    ]
    with slow[world.rank]:
        return train_run(world, text)
