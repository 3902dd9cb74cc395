"""Which techniques pay for a data set on given machines, by how much, and the run file that uses them.

Everything is read off the profile beside the data set, and for hot samples off a random part of it: nothing is trained.
So what is said of values, rows, bytes and accesses is counted; what that does to the time of a step depends on the
machine, and `hotrow bench` and `hotrow report` measure it. A technique "pays" above a factor of `_WORTH` in what it
saves, or above half of the accesses; where it needs what is not there, it does not, and the reason is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.capabilities import kept_in_words, refused
from hotrow.data.dataset import DataSet
from hotrow.data.prepare.memory import machine_memory
from hotrow.data.schema import Label
from hotrow.errors import SettingsError
from hotrow.models.histories import targets_of
from hotrow.models.model import ModelInputs
from hotrow.plan import row_bytes
from hotrow.plan.budget import Counted, count_keys, plan_data_set
from hotrow.plan.cluster import plan_for_topology, used_tables
from hotrow.plan.topology import Topology
from hotrow.profile import Profile
from hotrow.profile.factor import expected
from hotrow.profile.groups import find_groups
from hotrow.sizes import size_text
from hotrow.table import Feature, Table
from hotrow.toml import to_toml

DIM, BATCH, STEPS = 16, 4096, 100
"""Values of a row, samples of a batch at most, and steps that an epoch should have at least."""
_WORTH = 1.2
_HOST_ROW = 28
"""Bytes that a row in host memory takes beside values and optimizer state: head and index."""


@dataclass(frozen=True)
class Technique:
    """Whether one technique pays, and why; `figures` are those in the sentence."""

    name: str
    source: str
    pays: bool
    said: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """What was found, and a run file's settings."""

    data: str
    samples: int
    techniques: list[Technique]
    run: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    def run_file(self, data: str) -> str:
        """The run file, with the reasons above its settings; `data` is the path that it shall name."""
        settings = {**self.run, "data": {"path": data, **self.run["data"]}}
        why = [f"# {'+' if t.pays else '-'} {t.name}: {t.said}" for t in self.techniques]
        head = ["# Written by hotrow advise; + pays, - does not. Change it, and train: hotrow train RUN.toml", *why, ""]
        return "\n".join(head) + to_toml(settings)


@dataclass(frozen=True)
class _Known:
    """What all advice is made from."""

    dataset: DataSet
    profile: Profile
    counted: Counted
    tables: list[Table]
    batch: int
    memory: int
    accelerator: bool
    topology: Topology | None


def advise(
    dataset: DataSet,
    *,
    memory: int,
    accelerator: bool,
    topology: Topology | None = None,
    progress: Callable[[int], None] | None = None,
) -> Advice:
    """Advice for a data set's train split; `memory` is what hot rows may take on an accelerator."""
    profile, _ = Profile.of_data_set(dataset, "train", progress)
    batch = _batch(profile.samples, 1 if topology is None else topology.size)
    tables = [Table(name=name, dim=DIM) for name in profile.tables]
    known = _Known(dataset, profile, count_keys(dataset), tables, batch, memory, accelerator, topology)
    techniques = [_dedup(known), _hot(known), _cache(known), _shard(known), _admission(known), _ahead(known)]
    return Advice(str(dataset.path), profile.samples, techniques, _run(known, techniques))


def _batch(samples: int, ranks: int) -> int:
    """A power of two that leaves enough steps in an epoch."""
    return int(2 ** np.clip(np.floor(np.log2(max(samples / ranks / STEPS, 1))), 4, np.log2(BATCH)))


def _dedup(known: _Known) -> Technique:
    name, source, schema = "keep repeats once", "RecD", known.dataset.schema
    found = known.profile.repetition
    if schema.session is None:
        said = "the log has no session column, so nothing is known to repeat. If it has one, name it in the schema."
        return Technique(name, source, False, said)
    groups = schema.groups or find_groups(found, schema)
    factor = expected(found, schema.model_copy(update={"groups": groups}), known.batch).total
    figures = {"factor": factor, "samples_per_session": found.samples_per_session}
    fewer = f"a batch of {known.batch:,} holds {factor:.2f} times fewer values than its samples spelled out"
    if factor < _WORTH:
        return Technique(name, source, False, f"{fewer}: sessions are short, or change in every sample.", figures)
    if schema.groups:
        return Technique(name, source, True, f"{fewer}. The data set has it already: nothing to do.", figures)
    said = f"{fewer}, but this data set spells them out. Prepare the log again, without --no-dedup."
    return Technique(name, source, True, said, figures)


def _hot(known: _Known) -> Technique:
    name, source = "hot rows on the accelerator", "FAE"
    kept = refused(known.tables)
    if len(kept) == len(known.tables):
        return Technique(name, source, False, kept_in_words(kept))
    _, shown = plan_data_set(known.dataset, known.tables, known.memory, known.counted)
    share, samples, taken = shown["share"]["value"], shown["samples"]["value"], shown["bytes"]
    figures = {"share": share, "samples": samples, "bytes": float(taken)}
    said = f"{size_text(taken)} hold the rows of {share:.1%} of all accesses; {samples:.1%} of samples need no other"
    if not known.accelerator:
        return Technique(name, source, False, f"{said}. But torch finds no GPU here to put them on.", figures)
    if share < 0.5:
        return Technique(name, source, False, f"{said}: too few. More --memory may change that.", figures)
    return Technique(name, source, True, f"{said}. The run file plans them when it starts.", figures)


def _cache(known: _Known) -> Technique:
    name, source = "a cache in front of served rows", "HET"
    share = _top(known, 0.1)
    said = f"the hottest tenth of the rows takes {share:.1%} of the accesses; a cache of that size hits about as often"
    figures = {"share_of_top_10_percent": share}
    if known.topology is None or known.topology.nodes == 1:
        return Technique(name, source, False, f"{said}. But rows are on this machine: nothing to save.", figures)
    return Technique(name, source, share >= 0.5, f"{said}.", figures)


def _top(known: _Known, share: float) -> float:
    """The share of accesses that the hottest rows of all tables take."""
    counts = np.concatenate([known.counted.counts[t.name].histogram().counts for t in known.tables])
    keys = np.concatenate([known.counted.counts[t.name].histogram().keys for t in known.tables])
    by = np.argsort(-counts, kind="stable")
    rows, accesses = np.cumsum(keys[by]), np.cumsum((counts * keys)[by])
    total = sum(known.counted.counts[t.name].total for t in known.tables)
    return float(np.interp(rows[-1] * share, rows, accesses) / max(total, 1))


def _shard(known: _Known) -> Technique:
    name, source, topology = "rows sharded by how hot they are", "FlexShard", known.topology
    if topology is None or topology.size == 1:
        said = "one machine trains. With several, write a cluster file (hotrow topology) and give --topology."
        return Technique(name, source, False, said)
    features = known.dataset.schema.feature_settings()
    used = used_tables(known.dataset, known.tables, known.counted, topology, known.batch, features=features)
    _, shown = plan_for_topology(used, known.counted.counts, topology, compare=True)
    others = {row["name"]: row for row in shown["compare"]}
    ours, plain = shown["traffic"], others["row-wise"]
    once = min(row["seconds"] for name, row in others.items() if name.startswith("row-wise"))
    slower, slower_once = plain["seconds"] / max(ours["seconds"], 1e-12), once / max(ours["seconds"], 1e-12)
    figures = {"seconds": ours["seconds"], "row_wise_seconds": plain["seconds"], "row_wise_once_seconds": once}
    said = (
        f"exchanges of a step take {slower:.1f} times less than with every row on one rank ({slower_once:.1f} times "
        f"less than if keys are also asked for once)"
    )
    if topology.nodes > 1:
        saved = 1 - ours["between"] / max(plain["between"], 1e-12)
        figures["bytes_saved_between_nodes"] = saved
        said += f", and {saved:.1%} fewer bytes go between nodes"
    said += ". See the plan: hotrow plan DATA --topology CLUSTER.toml --compare"
    return Technique(name, source, slower >= _WORTH, said, figures)


def _admission(known: _Known) -> Technique:
    name, source = "no rows for keys seen once", "admission"
    once = rows = accesses = 0
    whole = 0.0
    for table in known.tables:
        counts = known.counted.counts[table.name]
        classes = counts.histogram()
        single = int(classes.keys[classes.counts == 1].sum())
        once, rows, accesses = once + single, rows + counts.distinct, accesses + counts.total
        whole += counts.distinct * row_bytes(table, _HOST_ROW)
    here = machine_memory()
    figures = {"rows": float(rows), "bytes": whole, "seen_once": once / max(rows, 1)}
    said = (
        f"rows of dim {DIM} take {size_text(whole)} of this machine's {size_text(here)}; {once / max(rows, 1):.1%} of "
        f"them are for keys seen once, which are {once / max(accesses, 1):.1%} of the accesses"
    )
    tight = whole > here / 2
    return Technique(name, source, tight, f"{said}." if tight else f"{said}: there is room for all.", figures)


def _ahead(known: _Known) -> Technique:
    name, source = "rows fetched ahead of the model", "Persia"
    if known.topology is None or known.topology.nodes == 1:
        said = "fetching from this machine's memory is a small part of a step; hotrow report shows how small."
        return Technique(name, source, False, said)
    said = 'rows come over a network, so let it run beside the model: policy "exact" gives the same bits as without.'
    return Technique(name, source, True, said)


def _run(known: _Known, techniques: Sequence[Technique]) -> dict[str, Any]:
    pays = {t.name: t.pays for t in techniques}
    run: dict[str, Any] = {"data": {"batch_size": known.batch}, "tables": {"dim": DIM}}
    if pays["no rows for keys seen once"]:
        run["tables"]["admission"] = {"name": "count", "count": 2}
    run["model"] = _model(known.dataset.schema.feature_settings())
    if (objective := _objective(known.dataset.schema.label_columns)) is not None:
        run["objective"] = {"name": objective}
    run["optimizer"] = {"name": "adam", "lr": 0.001}
    steps = max(1, known.profile.samples // known.batch)
    run["train"] = {"epochs": 1, "log_every": max(1, steps // 50), "checkpoint_every": max(1, steps // 2)}
    if known.accelerator:
        run["train"]["device"] = "cuda"
    has = {split for split in known.dataset.splits if known.dataset.samples(split)}
    if has & {"validation", "test"}:
        run["train"]["evaluate_every"] = max(1, steps // 5)
    if "test" not in has:
        run["data"]["test"] = ""
    if pays["hot rows on the accelerator"]:
        run["plan"] = {"memory": str(known.memory) if known.memory % 2**20 else f"{known.memory >> 20}MiB"}
    if pays["rows fetched ahead of the model"]:
        run["policy"] = {"name": "exact"}
    return run


def _model(features: Sequence[Feature]) -> dict[str, Any]:
    """A transformer where there is a history with an item to score against it, else DLRM."""
    inputs = ModelInputs(features, {f.name: DIM for f in features})
    try:
        histories: Mapping[str, str] = targets_of("transformer", {}, inputs) if inputs.sequences else {}
    except SettingsError:
        histories = {}
    if histories:
        return {"name": "transformer", "layers": 1, "targets": dict(histories)}
    return {"name": "dlrm"}


def _objective(labels: Sequence[Label]) -> str | None:
    """What the labels are for; None where it is what a run does anyway."""
    if len(labels) > 1:
        return "multi_task"
    return "regression" if labels and labels[0].kind == "number" else None


def relative(path: Path, run_file: Path) -> str:
    """`path` as a run file beside or above it would name it; absolute where it lies elsewhere."""
    whole, here = path.resolve(), run_file.resolve().parent
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
