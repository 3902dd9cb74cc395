"""What a set of runs came to when it was recorded: the reference for changes that must not change results.

    cd tests                                 these commands need the tests' own modules
    python -m recorded record                trains all runs and writes recorded.json anew
    python -m recorded record --out A.json   the same into another file
    python -m recorded same A.json B.json    compares the bits of two such files
    python -m recorded settings              writes settings that are new into the run files

`run_files/*.toml` are the runs, 200 steps each. Each states every setting, so a better default does not touch them;
paths and addresses (`{data}`, `{shards}`) are filled in. A record holds the loss of each step, the metrics at the end,
and hashes of rows and dense weights. Losses and metrics are compared on any machine, within `TOLERANCE`. Hashes are
compared between two commits on one machine, since another CPU may round differently.

Recording anew needs its reason in the commit's message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from hotrow.data import DataSet, prepare
from hotrow.data.graph import Graph
from hotrow.data.synth import SynthSettings, write_log
from hotrow.run import Cluster, Run
from hotrow.settings import parse
from hotrow.toml import to_toml
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker
from hotrow.train.logs import RunFolder
from ranks import Ranks
from serving import shards

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
TOLERANCE = 1e-3
"""Of losses and metrics, absolute; both are near 0.5. CPUs differ by the order of sums, and 200 steps add that up."""
STEPS = 200
_SAMPLES = 6400

RANKS = {"sharded": 2, "replicated": 2, "sharded_exact": 2, "served_exact": 2, "cached_exact": 2, "hybrid_ranks": 2}
"""Runs of several ranks; all others are of one process."""
SHARDS = {"served": 2, "served_exact": 2, "cached": 1, "cached_exact": 2, "hybrid_ranks": 2}
"""Runs whose rows are on shards."""
NAMES = tuple(sorted(path.stem for path in (HERE / "run_files").glob("*.toml")))
VARYING = {"hybrid_ranks"}
"""Runs in which updates of two trainers arrive in any order: only their metrics are compared, and loosely."""


@dataclass(frozen=True)
class Outcome:
    """What one run came to. Losses are rounded to six digits; the hashes are of the exact bits."""

    losses: list[float]
    metrics: dict[str, float]
    rows: str
    weights: str


class Fixture:
    """The data that the runs train on, in `folder`, and the processes that serve as ranks."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self._ranks = folder, ranks
        self.data, self.graph, self.log = folder / "data", folder / "data.graph", folder / "arriving"

    def make_data(self) -> None:
        """A small session log of 6,400 samples to train on; its graph; and its samples as files that arrive."""
        log = SynthSettings(
            samples=8000, users=300, items=300, history_length=8, past=4, contexts=2, slow=2, vocabulary=30, test=0.2
        )
        write_log(log, self.folder / "log")
        prepare(self.folder / "log", self.data, row_group=512, validation=0)
        data = DataSet.open(self.data)
        Graph.of_data_set(data).save(self.graph)
        self.log.mkdir()
        for number, rows in enumerate(data.flat("train")):
            pq.write_table(rows, self.log / f"{number:03}.parquet")

    def text(self, name: str, output: Path, addresses: Iterable[str] = ()) -> str:
        """The run file of a run, filled in."""
        text = (HERE / "run_files" / f"{name}.toml").read_text()
        places = {"data": self.data, "graph": self.graph, "log": self.log, "output": output}
        for key, value in places.items():
            text = text.replace(f"{{{key}}}", str(value))
        return text.replace('"{shards}"', ", ".join(json.dumps(address) for address in addresses))

    @contextlib.contextmanager
    def served(self, name: str) -> Iterator[list[str]]:
        """Fresh shards of a run, if it has any."""
        with shards(SHARDS[name]) if name in SHARDS else contextlib.nullcontext([]) as addresses:
            yield addresses

    def train(
        self, name: str, output: Path, *, steps: int = STEPS, every: int | None = None, killed: int | None = None
    ) -> Outcome:
        """Trains a run for so many steps, with a checkpoint after `every` so many.

        Its processes are `killed` after that step, and the run is resumed.
        """
        with self.served(name) as addresses:
            run = _with_steps(tomllib.loads(self.text(name, output, addresses)), steps)
            size = RANKS.get(name, 1)
            if every is not None:
                run["train"]["checkpoint_every"] = every
            if killed is not None:
                answers = self._ranks.answers(size, "recorded.killed:train_and_die", to_toml(run), killed, timeout=600)
                assert all(kind != "ok" for kind, *_ in answers), "nothing was killed"
            self._ranks.run(size, "train_work:train_run", to_toml(run), killed is not None, timeout=600)
        return outcome(output)


def outcome(folder: Path) -> Outcome:
    """What the run in this folder came to, by its metrics and its last checkpoint."""
    lines = list(RunFolder(folder).lines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    (*_, metrics) = (line for line in lines if line["kind"] == "evaluate")
    checkpoint = Checkpoint(Checkpoints(folder / "checkpoints").latest())
    arrays = {n: a.numpy() for n, a in checkpoint.arrays().items() if n.startswith(("model/", "optimizer/"))}
    return Outcome(
        losses=[round(loss, 6) for loss in losses],
        metrics={n: round(v, 6) for n, v in metrics.items() if isinstance(v, float)},
        rows=_hash(_rows(folder, checkpoint)),
        weights=_hash(arrays),
    )


def _rows(folder: Path, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Every row of a checkpoint in the order of keys, with optimizer state and clock, read by one plain process."""
    alone = RunFolder(folder).run().model_copy(update={"cluster": Cluster(), "plan": None})
    ranker = Ranker(alone)
    try:
        ranker.restore(checkpoint, checkpoint.arrays())
        found = {}
        for name, store in ranker.embeddings.router.tiers["host"].stores().items():
            chunks = list(store.export())
            order = np.concatenate([chunk["keys"] for chunk in chunks]).argsort()
            for column in ("keys", "values", "state", "clocks"):
                whole = np.concatenate([chunk[column] for chunk in chunks])
                found[f"{name}/{column}"] = whole.reshape(len(order), -1)[order]
        return found
    finally:
        ranker.close()


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()[:32]


def _with_steps(run: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same run with so many steps, and samples enough for them."""
    run["train"]["steps"] = steps
    if "follow" in run["data"]:  # what arrives is read once
        run["data"]["batch_size"] = _SAMPLES // steps
    else:
        run["train"]["epochs"] = max(run["train"]["epochs"], steps // 64)
    return run


def stated(name: str) -> str:
    """A run file with every setting there is: those it has as they are, new ones with their defaults."""
    fixture = Fixture(Path("/fixture"), Ranks(1))
    filled = fixture.text(name, Path("/fixture/output"), ["{shards}"])
    text = to_toml(_plain(parse(Run, tomllib.loads(filled))))
    for key in ("data", "graph", "log", "output"):
        place = {"data": fixture.data, "graph": fixture.graph, "log": fixture.log, "output": Path("/fixture/output")}
        text = text.replace(f'"{place[key]}"', f'"{{{key}}}"')
    return text


def _plain(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude_none=True)


def read(path: Path) -> dict[str, Outcome]:
    """A record."""
    return {name: Outcome(**said) for name, said in json.loads(path.read_text()).items()}


def write(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Writes a record, a run a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(asdict(outcome))}" for name, outcome in outcomes.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(one: Mapping[str, Outcome], two: Mapping[str, Outcome]) -> list[str]:
    """The runs whose bits are not the same, by name; runs that only one of them has count too."""
    names = sorted({*one, *two} - VARYING)
    same = {n for n in {*one} & {*two} if (one[n].rows, one[n].weights) == (two[n].rows, two[n].weights)}
    return [name for name in names if name not in same]
