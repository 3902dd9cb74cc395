"""What is left after processes were killed with -9, or cut off the network, in the middle of everything.

Shards that keep their rows in folders, and workers that fetch and push as fast as they can: rate 1 and gradients of
exactly 1.0, so that a row says how often it was updated. A worker keeps in a mapped file how many of its pushes were
acknowledged; started again it repeats the one it died in, under the same name. What it looks up at which step follows
from its number, so in the end every row must equal minus its uses: one less is an update `lost`, one more one that
was applied `twice`.

A process is recovered from when every worker has finished a step that it began after the kill: two steps after the
last that was finished before, since the answer to one may have been on its way already. Whoever is killed is started
again at once, as `hotrow up` does it; its start is part of the time.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow.bench.hosts import Hosts
from hotrow.bench.report import Report, add
from hotrow.errors import HotrowError
from hotrow.service.curve import make_keys
from hotrow.service.local import ShardProcess
from hotrow.store.optimizers import SGD
from hotrow.table import Fill, Table
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Gradients, Part

DIMS = {"a": 4, "b": 16}
KEYS = 500
MOST_KEYS = 60  # of a table in a step
TABLES = [Table(name=name, dim=dim, optimizer=SGD(lr=1.0), init=Fill(value=0.0)) for name, dim in DIMS.items()]
STEPS, TARGET, WAITED_MS = range(3)
"""What a worker's file says: steps acknowledged, where to stop (0: not yet), and its last wait for a silent shard."""
_POLL_S = 0.005
_PATIENCE_S = 120.0

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """What one worker does."""

    worker: int
    shards: list[str]
    key: str | None
    file: str

    def command(self) -> list[str]:
        return [sys.executable, "-m", "hotrow.bench.hybrid_failures", json.dumps(asdict(self))]


def measure(report: Report, quick: bool) -> None:
    """Adds `hybrid.recovery_s`, of single kills of shards, and `hybrid.lost` and `hybrid.twice`, after random ones."""
    seconds, every = (10.0, 2.0) if quick else (60.0, 2.0)
    with tempfile.TemporaryDirectory(prefix="hotrow-failures-") as folder, Crew(Path(folder)) as crew:
        alone = [recovery(crew, number % 2) for number in range(3 if quick else 10)]
        killed = kill_at_random(crew, seconds, every)
        steps, account = crew.finish(), crew.account()
    said = {
        "killed": len(killed) + len(alone),
        "steps_a_worker": steps,
        "updates": account.updates,
        "recovered_from": [{"who": one.who, "seconds": round(one.recovery_s, 2)} for one in killed],
    }
    note = f"the longest of {len(alone)} kills; median {statistics.median(alone):.2f}"
    add(report, "hybrid.recovery_s", max(alone), "s", must=10.0, aim=2.0, better="lower", note=note)
    add(report, "hybrid.lost", account.lost, "", must=0, aim=0, better="lower", ours=said)
    add(report, "hybrid.twice", account.twice, "", must=0, aim=0, better="lower", ours=said)


def main(work: Work) -> None:
    """Makes steps from where its file says that it was to where it is told to stop."""
    state = _state(Path(work.file))
    tier = ServedTier(
        work.shards,
        TABLES,
        timeout=_PATIENCE_S,
        retry=0.2,
        key=work.key,
        on_wait=lambda address, silent: state.__setitem__(WAITED_MS, int(silent * 1000)),
        id=work.worker.to_bytes(16, "little"),
        pushed=int(state[STEPS]),
    )
    while not state[TARGET] or state[STEPS] < state[TARGET]:
        step = int(state[STEPS])
        parts, values = _parts(drawn(work.worker, step))
        ticket = tier.fetch(parts, np.empty(values, np.float32), step)
        tier.update(parts, Gradients(np.ones(values, np.float32)), step, ticket)
        state[STEPS] = step + 1
    tier.close()


def drawn(worker: int, step: int) -> list[Counts]:
    """The keys of a step, table by table."""
    draw = np.random.default_rng((worker, step))
    return [draw.permutation(KEYS)[: draw.integers(1, MOST_KEYS)] for _ in DIMS]


class Killed(NamedTuple):
    """A process that was killed, and the seconds until every worker had finished a step begun afterwards."""

    who: str
    recovery_s: float


class Account(NamedTuple):
    """Updates that are missing, and that are there too often, over all rows."""

    updates: int
    lost: int
    twice: int


@dataclass
class _Waiting:
    """A kill that is not recovered from: until the workers are that far."""

    who: str
    since: float
    until: Counts = field(repr=False)


class Crew:
    """Shards and workers as processes, on one machine or each on one of `hosts`: shards first."""

    def __init__(self, folder: Path, *, shards: int = 2, workers: int = 2, hosts: Hosts | None = None) -> None:
        self._folder, self._hosts = folder, hosts
        self._of_shard: Path | None = None
        self._of_worker: Path | None = None
        if hosts is not None:
            self._of_shard, self._of_worker = make_keys(folder / "keys")
        self.shards: list[ShardProcess] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self._files = [folder / f"worker-{w}" for w in range(workers)]
        for file in self._files:
            file.write_bytes(bytes(8 * 3))
        self._states = [_state(file) for file in self._files]
        try:
            for number in range(shards):
                self.shards.append(self._start_shard(number))
            self.addresses = [shard.address for shard in self.shards]
            for number in range(workers):
                self.workers.append(self._start_worker(number))
            self.wait_for(np.ones(workers, np.int64))
        except BaseException:
            self.close()
            raise

    @property
    def steps(self) -> Counts:
        """How far each worker is."""
        return np.array([state[STEPS] for state in self._states])

    @property
    def waited_s(self) -> list[float]:
        """How long each worker had waited for a silent shard when its client last said so."""
        return [float(state[WAITED_MS]) / 1000 for state in self._states]

    def kill_shard(self, number: int) -> None:
        """Kills it with -9, and starts it again at the same address."""
        self.shards[number].kill()
        self.shards[number] = self._start_shard(number)

    def kill_worker(self, number: int) -> None:
        """Kills it with -9, and starts it again."""
        self.workers[number].kill()
        self.workers[number].wait()
        self.workers[number] = self._start_worker(number)

    def wait_for(self, steps: Counts) -> None:
        """Returns when every worker is so far."""
        self.wait_until(lambda: bool((self.steps >= steps).all()))

    def wait_until(self, so: Callable[[], bool]) -> None:
        """Returns when it is so; raises if that takes too long, or if a worker fails meanwhile."""
        deadline = time.monotonic() + _PATIENCE_S
        while not so():
            self.check()
            if time.monotonic() > deadline:
                raise HotrowError(f"Workers do not go on: they are at steps {self.steps.tolist()}.")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises if a worker has ended with an error of its own."""
        for number, worker in enumerate(self.workers):
            if worker.poll():
                raise HotrowError(f"Worker {number} ended with code {worker.returncode}.")

    def finish(self) -> int:
        """Has every worker get as far as the first of them is, and a little more, and end; the steps of each."""
        target = int(self.steps.max()) + 10
        for state in self._states:
            state[TARGET] = target
        for worker in self.workers:
            worker.wait(_PATIENCE_S)
        self.check()
        return target

    def account(self) -> Account:
        """Compares every row with its uses, after the end."""
        uses = [np.zeros(KEYS, np.int64) for _ in DIMS]
        for worker, steps in enumerate(self.steps.tolist()):
            for step in range(steps):
                for of_table, keys in zip(uses, drawn(worker, step), strict=True):
                    of_table[keys] += 1
        prefix = [] if self._hosts is None else self._hosts.prefix(len(self.shards))
        asked = [self.addresses, None if self._of_worker is None else str(self._of_worker)]
        code = f"from hotrow.bench.hybrid_failures import say_rows; say_rows(*{asked!r})"
        said = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, check=True, timeout=120)
        found = np.split(np.frombuffer(said.stdout, np.float32), np.cumsum([KEYS * d for d in DIMS.values()])[:-1])
        lost = twice = 0
        for of_table, rows in zip(uses, found, strict=True):
            updates = -rows.reshape(KEYS, -1)
            differs = updates - of_table[:, None]
            lost += int(np.maximum(-differs, 0).max(1).sum())
            twice += int(np.maximum(differs, 0).max(1).sum())
        return Account(int(sum(of_table.sum() for of_table in uses)), lost, twice)

    def close(self) -> None:
        """Ends every process."""
        for worker in self.workers:
            worker.kill()
            worker.wait()
        for shard in self.shards:
            shard.kill()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_shard(self, number: int) -> ShardProcess:
        again = number < len(self.shards)
        bind, prefix = "tcp://127.0.0.1:*", []
        if self._hosts is not None:
            bind, prefix = f"tcp://{self._hosts.address(number)}:7700", self._hosts.prefix(number)
        if again:
            bind = self.addresses[number]
        return ShardProcess(bind, folder=self._folder / f"shard-{number}", key=self._of_shard, prefix=prefix)

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        key = None if self._of_worker is None else str(self._of_worker)
        command = Work(number, self.addresses, key, str(self._files[number])).command()
        prefix = [] if self._hosts is None else self._hosts.prefix(len(self.shards) + number)
        return subprocess.Popen([*prefix, *command], start_new_session=True)


def recovery(crew: Crew, shard: int) -> float:
    """Seconds from the kill of a shard, while all else is well, to the next step of every worker."""
    start, until = time.monotonic(), crew.steps + 2
    crew.kill_shard(shard)
    crew.wait_for(until)
    return time.monotonic() - start


def kill_at_random(crew: Crew, seconds: float, every: float, seed: int = 0) -> list[Killed]:
    """Kills a random process of those that are recovered, again and again; returns when all are recovered."""
    draw = random.Random(seed)
    waiting: list[_Waiting] = []
    killed: list[Killed] = []
    names = [f"shard {n}" for n in range(len(crew.shards))] + [f"worker {n}" for n in range(len(crew.workers))]
    now = start = time.monotonic()
    following = start + every
    while now < start + seconds or waiting:
        if following <= now < start + seconds:
            following += every
            well = [name for name in names if name not in {one.who for one in waiting}]
            if well:
                who = draw.choice(well)
                waiting.append(_Waiting(who, time.monotonic(), crew.steps + 2))
                role, number = who.split()
                (crew.kill_shard if role == "shard" else crew.kill_worker)(int(number))
        time.sleep(_POLL_S)
        crew.check()
        now, steps = time.monotonic(), crew.steps
        for one in [one for one in waiting if (steps >= one.until).all()]:
            waiting.remove(one)
            killed.append(Killed(one.who, now - one.since))
        if waiting and now - waiting[0].since > _PATIENCE_S:
            raise HotrowError(f"{waiting[0].who} was killed, and workers do not go on: {steps.tolist()}.")
    return killed


def say_rows(shards: Sequence[str], key: str | None) -> None:
    """Writes all rows to standard output, table after table."""
    tier = ServedTier(shards, TABLES, timeout=_PATIENCE_S, key=key)
    parts, values = _parts([np.arange(KEYS) for _ in DIMS])
    rows = np.empty(values, np.float32)
    tier.read(parts, rows, 0)
    tier.close()
    sys.stdout.buffer.write(rows.tobytes())


def _parts(keys: Sequence[Counts]) -> tuple[list[Part], int]:
    parts, start = [], 0
    for number, ((name, dim), of_table) in enumerate(zip(DIMS.items(), keys, strict=True)):
        parts.append(Part(name, number, of_table, None, start))
        start += len(of_table) * dim
    return parts, start


def _state(file: Path) -> np.memmap[Any, np.dtype[np.int64]]:
    return np.memmap(file, np.int64, "r+", shape=(3,))


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
