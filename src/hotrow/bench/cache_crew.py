"""The crew of `hotrow bench cache_auc`: a run by `hotrow.Trainer` on several ranks, each with a cache before one shard.

    python -m hotrow.bench.cache_crew JSON

is one of the ranks, with the environment that `hotrow up` gives a rank. It trains to the end, evaluates, and prints
what it came to as JSON. `together` starts a shard and all ranks as processes of this machine, and puts what they say
together.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow import Batch, Hook, StepEvent, Trainer
from hotrow.cluster.local import environments
from hotrow.errors import HotrowError
from hotrow.run import Run
from hotrow.service.local import ShardProcess
from hotrow.settings import parse
from hotrow.tiers.cache_check import Checker
from hotrow.tiers.cached import CachedTier
from hotrow.tiers.served import ServedTier

PATIENCE_S = 1800.0
SAMPLED = 16
"""Of so many rows one is looked at by the checker."""
OWN = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}


class Came(NamedTuple):
    """What came of one training: AUC, and of the last epoch hit share, bytes against no cache, broken bounds."""

    auc: float
    hit_share: float
    saved: float
    violations: int


@dataclass(frozen=True)
class Work:
    """What a rank does: the run, and where its checker's observations go."""

    settings: dict[str, Any]
    checked: str

    def command(self) -> list[str]:
        return [sys.executable, "-m", "hotrow.bench.cache_crew", json.dumps(asdict(self))]


@dataclass(frozen=True)
class Counts:
    """Rows that were in a rank's cache or not, and bytes between it and the shard, both ways."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0

    @staticmethod
    def of(trainer: Trainer) -> Counts:
        tier = _cache(trainer)
        assert isinstance(tier.backing, ServedTier)
        rows, link = tier.counters(), tier.backing.counters()  # the cache does not see what goes past it, as at s = 0
        return Counts(int(rows["hits"]), int(rows["misses"]), int(link["bytes_in"]) + int(link["bytes_out"]))

    def since(self, before: Counts) -> Counts:
        return Counts(self.hits - before.hits, self.misses - before.misses, self.bytes - before.bytes)


class Watch(Hook):
    """What the cache of a rank did in the last epoch; its checker is there from the first step on."""

    def __init__(self) -> None:
        self.checker: Checker | None = None
        self.counted = self._before = Counts()

    def begin(self, trainer: Trainer) -> None:
        tier = _cache(trainer)
        self.checker = tier.checker = Checker(tier.settings.bound, sample=SAMPLED)
        self._before = Counts.of(trainer)

    def step(self, trainer: Trainer, event: StepEvent) -> None:
        epochs, batches = trainer.run.train.epochs, trainer.feed.batches
        if event.step == (epochs - 1) * batches:
            self._before = Counts.of(trainer)
        if event.step == epochs * batches:  # what is written back to evaluate is not of the steps
            self.counted = Counts.of(trainer).since(self._before)


def _cache(trainer: Trainer) -> CachedTier:
    tier = trainer.embeddings.router.tiers["cached"]
    assert isinstance(tier, CachedTier)
    return tier


def main(work: Work) -> dict[str, Any]:
    """Trains as a rank; what it came to."""
    watch = Watch()
    with Trainer(parse(Run, work.settings), hooks=[watch]) as trainer:
        result = trainer.fit()
        plain = _without_a_cache(trainer)
    assert watch.checker is not None
    watch.checker.save(Path(work.checked))
    return {"auc": result.metrics["auc"], "plain": plain, **asdict(watch.counted)}


def _without_a_cache(trainer: Trainer) -> int:
    """Bytes that this rank's batches of an epoch would send: keys and rows there, keys and gradients back."""
    reader = trainer.parts.reader(trainer.run.data.train, shuffle=True)
    reader.seek(trainer.run.train.epochs - 1, 0)
    dims = {name: table.dim for name, table in trainer.embeddings.tables.items()}
    table_of = {name: feature.table for name, feature in trainer.embeddings.features.items()}
    return sum(
        len(keys) * 2 * (8 + 4 * dims[table]) for batch in reader for table, keys in _unique(batch, table_of).items()
    )


def _unique(batch: Batch, table_of: dict[str, str]) -> dict[str, npt.NDArray[np.int64]]:
    looked_up: dict[str, list[npt.NDArray[np.int64]]] = {}
    for group in batch.groups:
        for name in group.features:
            looked_up.setdefault(table_of[name], []).append(group[name].values.numpy())
    return {table: np.unique(np.concatenate(keys)) for table, keys in looked_up.items()}


def together(settings: dict[str, Any], workers: int, clock: int | None) -> Came:
    """A run on a shard and so many ranks, all of them processes of this machine."""
    with TemporaryDirectory(prefix="hotrow-crew-") as name, ShardProcess() as shard:
        folder = Path(name)
        cluster = {**settings["cluster"], "shards": [shard.address]}
        run = {**settings, "cluster": cluster, "output": {"folder": str(folder / "run"), "tensorboard": False}}
        checked = [folder / f"checked-{rank}.npz" for rank in range(workers)]
        said = _all([Work(run, str(file)).command() for file in checked], folder)
        violations = Checker.load(checked, clock).violations()
    hits, misses, moved, plain = (sum(one[name] for one in said) for name in ("hits", "misses", "bytes", "plain"))
    return Came(said[0]["auc"], hits / max(hits + misses, 1), 1 - moved / max(plain, 1), violations)


def _all(commands: Sequence[list[str]], folder: Path) -> list[dict[str, Any]]:
    """What each rank says. If one fails, the others find it gone and end too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        places = environments("127.0.0.1", free.getsockname()[1], [""] * len(commands))
    errors = [folder / f"{rank}.err" for rank in range(len(commands))]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for command, place, file in zip(commands, places, errors, strict=True):
            with file.open("w") as err:
                env = {**os.environ, **OWN, **place}
                ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=err, text=True))
        outs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        said = [file.read_text().strip().splitlines()[-1:] or ["nothing"] for file in errors]
        raise HotrowError(f"Ranks of a run ended with an error. The last that each said: {[last for (last,) in said]}.")
    return [json.loads(out.strip().splitlines()[-1]) for out in outs]


if __name__ == "__main__":
    print(json.dumps(main(Work(**json.loads(sys.argv[1])))))
