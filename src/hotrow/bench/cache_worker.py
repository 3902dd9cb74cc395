"""One worker of `hotrow bench cache`, a process on a host of its own: `python -m hotrow.bench.cache_worker JSON`.

It is a rank of a run by `hotrow.Trainer`: batches are read from a data set, rows come from the shard, through a cache
or not, dense gradients are averaged with the other workers (Gloo), losses and metrics are logged. It says "warm" when
the cache has seen enough, waits for a line, makes the steps that count, and says what it measured as JSON. What is
written back at the end, when it is told to, is counted apart; no checkpoint is made, for rows would cross the link.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hotrow import Batch, Trainer
from hotrow.run import Run
from hotrow.service.remote import RemoteRows
from hotrow.settings import parse
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.cached import CachedTier
from hotrow.tiers.served import ServedTier
from hotrow.train.batches import RunBatches
from hotrow.train.ranks import together

PASSES, AT_ONCE = 4, 50_000
PATIENCE_S = 120
EPOCHS = 1_000
"""More than are needed: a worker makes so many steps as it is told."""


@dataclass(frozen=True)
class Work:
    """What one worker does; the same for all but `fill`, `checked` and the rank that its environment says."""

    shard: str
    key: str
    """The trainers' key file; empty where the shard asks for none."""
    batch: int
    data: str
    data_steps: list[dict[str, Any]]
    model: dict[str, Any]
    dim: int
    fill: str
    """A file of what is there before anything counts: "all.TABLE" are keys of this worker's share of the rows and
    "clocks.TABLE" their clocks; "hot.TABLE" is used as often as `PASSES` says. Either may be left out."""
    warm: int
    """Steps after that, which do not count either."""
    steps: int
    cache: dict[str, Any] | None
    clock: int
    """The bound of the cache."""
    checked: str
    """Where the checker's observations go; empty for none."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "hotrow.bench.cache_worker", json.dumps(asdict(self))]

    def settings(self, out: Path) -> dict[str, Any]:
        """A run file as data: `bounded` with a cache, `sync` without."""
        cluster: dict[str, Any] = {
            "shards": [self.shard],
            "timeout": PATIENCE_S,
            **({"key": self.key} if self.key else {}),
        }
        policy: dict[str, Any] = {"name": "sync"}
        if self.cache is not None:
            cluster["cache"], policy = self.cache, {"name": "bounded", "clock": self.clock}
        return {
            "data": {"path": self.data, "batch_size": self.batch, "test": "", "steps": self.data_steps},
            "tables": {"dim": self.dim, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
            "model": self.model,
            "optimizer": {"lr": 0.001},
            "policy": policy,
            "train": {"threads": 1, "epochs": EPOCHS},
            "cluster": cluster,
            "output": {"folder": str(out)},
        }


class Timed:
    """Adds up the seconds that a served tier's requests take: a batch's own, or those of a cache in front of it."""

    def __init__(self, served: ServedTier) -> None:
        self.seconds = 0.0
        for name in ("fetch", "update", "exchange"):
            setattr(served, name, self._timed(getattr(served, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def main(work: Work) -> None:
    """Warms up, waits to be told, and measures."""
    with together("cpu", timeout=PATIENCE_S) as ranks, TemporaryDirectory(prefix="hotrow-bench-") as own:
        out = Path(ranks.decide(own)) / "run"  # ranks of a run share its folder; all of them are on this machine
        with Trainer(parse(Run, work.settings(out)), overwrite=True) as trainer:
            train(work, trainer)
        ranks.decide("")  # nobody takes the folder away before all are done


def train(work: Work, trainer: Trainer) -> None:
    """The steps of a run, its exchange timed and its reads checked."""
    (tier,) = trainer.embeddings.router.tiers.values()
    served = tier.backing if isinstance(tier, CachedTier) else tier
    assert isinstance(served, ServedTier)
    exchange = Timed(served)
    checker = Checker(tier.settings.bound, sample=16) if isinstance(tier, CachedTier) and work.checked else None
    if isinstance(tier, CachedTier):
        tier.checker = checker
    if work.fill:
        _fill(trainer, served, work)
    with trainer.pipeline() as pipeline:
        _steps(trainer, pipeline, work.warm)
        print("warm", flush=True)
        sys.stdin.readline()
        before, waited = dict(tier.counters()), exchange.seconds
        start = time.perf_counter()
        _steps(trainer, pipeline, work.steps)
        seconds = time.perf_counter() - start
        after, waited = tier.counters(), exchange.seconds - waited
    counted = {name: after[name] - before.get(name, 0) for name in after if isinstance(after[name], int)}
    said = {"exchange_s": waited, "seconds": seconds, "counters": counted}
    print(json.dumps({**said, "staleness": after.get("staleness", {})}), flush=True)
    sys.stdin.readline()
    if checker is not None:
        checker.save(Path(work.checked))
    _wait(trainer)


def _steps(trainer: Trainer, pipeline: RunBatches, count: int) -> None:
    """So many steps; all workers end together."""
    for ready in itertools.islice(pipeline, count):
        trainer.step(ready)
    _wait(trainer)


def _wait(trainer: Trainer) -> None:
    trainer.ranks.sums(0.0)


def _fill(trainer: Trainer, served: ServedTier, work: Work) -> None:
    """Gives the shard rows with clocks, and uses those that a long run leaves in a cache a few times."""
    embeddings = trainer.embeddings
    draw = np.random.default_rng(trainer.ranks.world.rank)
    with np.load(work.fill, allow_pickle=False) as stored:
        for number, table in enumerate(embeddings.tables.values()):
            if f"all.{table.name}" not in stored:
                continue
            keys, clocks = stored[f"all.{table.name}"], stored[f"clocks.{table.name}"].astype(np.uint32)
            columns = {
                "keys": keys,
                "values": draw.uniform(-0.05, 0.05, (len(keys), table.dim)).astype(np.float32),
                "state": (1e-4 * clocks).astype(np.float32),
                "clocks": clocks,
                "uses": clocks,
                "last": np.zeros(len(keys), np.uint32),
            }
            RemoteRows(served.client, table, number).import_(columns)
        _wait(trainer)
        keys = {table: stored[f"hot.{table}"] for table in embeddings.tables if f"hot.{table}" in stored}
        pieces = -(-sum(map(len, keys.values())) // AT_ONCE)
        for piece in list(range(pieces)) * PASSES:
            batch = Batch.plain({name: [some[piece::pieces].tolist()] for name, some in keys.items()})
            (1e-3 * embeddings(batch).vectors().sum()).backward()
            embeddings.step()
    _wait(trainer)


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
