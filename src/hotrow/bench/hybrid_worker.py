"""One trainer of `hotrow bench hybrid`, a process on a host of its own: `python -m hotrow.bench.hybrid_worker JSON`.

It takes turns: each is a run of DLRM under one policy, by `hotrow.Trainer`, with tables of its own: batches are read
from a data set, rows are on the shards, dense gradients are averaged with the other trainers, losses and metrics are
logged. A turn ends after some steps, without a checkpoint: rows would cross the link for it. Before each turn it waits
for a line, so that whoever started it may look at the shards in between, and after it says what it measured as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from hotrow import Trainer
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.batches import RunBatches
from hotrow.train.ranks import together

PolicyName = Literal["sync", "exact", "hybrid"]
PATIENCE_S = 120


@dataclass(frozen=True)
class Turn:
    """`warm` steps that do not count, then `steps` that do."""

    policy: PolicyName
    shards: list[str]
    data: str
    """A data set that has enough samples for all of them."""
    dim: int
    deep: list[int]
    batch: int
    warm: int
    steps: int
    capacity: int | None = None
    """Rows that a table holds on each shard, None: all."""
    staleness: int = 8

    def settings(self, key: str | None, out: Path) -> dict[str, Any]:
        """A run file as data. The bound of `hybrid` is at its full size at once, as in the midst of a long run."""
        policy = {"staleness": self.staleness, "ramp": 0} if self.policy == "hybrid" else {}
        tables: dict[str, Any] = {"dim": self.dim, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}}
        if self.capacity is not None:
            tables["eviction"] = {"capacity": self.capacity}
        cluster = {"shards": self.shards, "timeout": PATIENCE_S, **({"key": key} if key else {})}
        return {
            "data": {"path": self.data, "batch_size": self.batch, "test": ""},
            "tables": tables,
            "model": {"name": "dlrm", "top": self.deep},
            "optimizer": {"lr": 0.001},
            "policy": {"name": self.policy, **policy},
            "train": {"threads": 1},
            "cluster": cluster,
            "output": {"folder": str(out)},
        }


@dataclass(frozen=True)
class Work:
    """What a trainer does."""

    key: str
    turns: list[Turn]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "hotrow.bench.hybrid_worker", json.dumps(asdict(self))]


def main(work: Work) -> None:
    """Takes every turn."""
    with together("cpu", timeout=300.0) as ranks, TemporaryDirectory(prefix="hotrow-bench-") as own:
        folder = Path(ranks.decide(own))  # ranks of a run share its folder; all of them are on this machine
        for number, turn in enumerate(work.turns):
            print("ready", flush=True)
            sys.stdin.readline()
            print(json.dumps(take(turn, work.key, folder / str(number))), flush=True)
        ranks.decide("")  # nobody takes the folder away before all are done


def take(turn: Turn, key: str | None, out: Path) -> dict[str, Any]:
    """One turn."""
    run = parse(Run, turn.settings(key, out))
    with Trainer(run, overwrite=True) as trainer, trainer.pipeline() as pipeline:  # turns share their shards
        tier, phases = trainer.embeddings.router.tiers["served"], trainer.feed.phases
        _steps(trainer, pipeline, turn.warm)
        trainer.ranks.sums(0.0)  # all ranks are here
        phases.take()
        before, start, busy = dict(tier.counters()), time.perf_counter(), time.process_time()
        _steps(trainer, pipeline, turn.steps)
        with trainer.feed.paused():  # every update is applied
            trainer.ranks.sums(0.0)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        after, spent = tier.counters(), phases.take()
        samples = turn.steps * turn.batch * trainer.ranks.world.size
    moved = {name: (after[name] - before[name]) / turn.steps for name in ("bytes_in", "bytes_out")}
    return {
        "samples_a_second": samples / seconds,
        "seconds": seconds,
        "cpu_ms": 1000 * busy / turn.steps,
        "phases_ms": {name: round(1000 * s / turn.steps, 2) for name, s in spent.items()},
        **moved,
    }


def _steps(trainer: Trainer, pipeline: RunBatches, count: int) -> None:
    for ready in itertools.islice(pipeline, count):
        trainer.step(ready)


if __name__ == "__main__":
    said = json.loads(sys.argv[1])
    main(Work(said["key"], [Turn(**turn) for turn in said["turns"]]))
