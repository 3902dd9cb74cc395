"""`replay`: makes a step of a run again, from the last checkpoint before it, and writes down what it was made of.

The steps up to it are made as the run made them, in a folder that is gone afterwards: same order, same pauses for
evaluations and checkpoints, but nothing is evaluated or kept. So the step has the same bits as in the run, on a CPU and
under every policy but a `Hybrid` that goes by time; where the run logged losses they are compared. The run's own folder
is only read. Each step is looked at for what is not finite: the first one that has some is the one written down.

Rows of shards are brought into this process, which has to have room for them. What several ranks made together, or from
a log that is read once, cannot be made again here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.schema import Schema
from hotrow.errors import NotFiniteError, SettingsError
from hotrow.files import write_text
from hotrow.policy import Hybrid
from hotrow.run import Cluster, Run
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.hooks import Flags
from hotrow.train.logs import RunFolder, find_run
from hotrow.train.progress import Progress
from hotrow.train.ready import Ready
from hotrow.train.trainer import Trainer
from hotrow.world import World

_LARGEST = 10


def replay(
    path: Path,
    step: int,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    trust_model: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Makes step `step` of the run in `path` again; what is known of it, which is also in the folder `out`."""
    folder = _run_folder(path)
    run = folder.run().trusted() if trust_model else folder.run()
    start = _start(folder, step)
    _refuse(run, start)
    place = out or folder.replays / f"step-{step:08d}"
    if place.exists() and not overwrite:
        raise SettingsError(f"{place} is there already. Use --overwrite to replace it, or give another --out.")
    beside = tempfile.TemporaryDirectory(prefix="hotrow-replay-")
    with beside as scratch, _Again(_elsewhere(run, Path(scratch) / "run"), folder, start, progress) as trainer:
        if step > trainer.steps:
            raise SettingsError(f"--step {step}: the run in {folder.path} has steps 1 to {trainer.steps:,}.")
        ready = trainer.go_to(step)
        found = {"run": str(folder.path), "began": trainer.start, **_found(trainer, ready)}
        found |= {**trainer.compared(folder, ready), "notes": _notes(run, trainer.start), "out": str(place)}
        place.mkdir(parents=True, exist_ok=True)
        table = table_of(ready.batch, trainer.parts.data.schema, trainer.parts.columns)
        pq.write_table(table, place / "batch.parquet")
        write_text(place / "replay.json", json.dumps(found, indent=1, allow_nan=False))
    return found


class _Kept(Checkpoints):
    """Those of the run: one of them is begun from, none is written or taken away."""

    def __init__(self, folder: Path, start: Checkpoint | None) -> None:
        super().__init__(folder)
        self._start = start

    def latest(self) -> Path | None:
        return None if self._start is None else self._start.folder

    def clean(self) -> None:
        """Leaves everything."""


class _Again(Trainer):
    """A run that is made again up to a step, beside the folder of the one that was."""

    def __init__(self, run: Run, folder: RunFolder, start: Checkpoint | None, progress: Progress | None) -> None:
        self.start = 0 if start is None else start.step
        self._kept = _Kept(folder.checkpoints, start)
        self._stood = {line["step"] for line in folder.lines() if line["kind"] in ("checkpoint", "evaluate")}
        super().__init__(run, resume=start is not None, progress=progress)

    def _assemble(self, closing: contextlib.ExitStack) -> None:
        super()._assemble(closing)
        self.checkpoints = self._kept
        self.one_step.looks = True

    def go_to(self, step: int) -> Ready:
        """The batch of that step, or of one before it that is not finite; its gradients are there, and not applied."""
        with self.pipeline() as pipeline:
            for ready in pipeline:
                if self.state.step + 1 == step and self.feed.closes:
                    self.one_step.compute(ready)
                    return self._left(ready)
                try:
                    self.step(ready)
                except NotFiniteError:
                    return self._left(ready)
        raise SettingsError(f"The run ended after step {self.state.step:,}: there is no step {step:,}.")

    def _left(self, ready: Ready) -> Ready:
        """The batch that is looked at: gradients of those before it stay, which a loop that is left would forget."""
        self.feed.held = 0
        return ready

    def step(self, ready: Ready) -> Tensor:
        """Stands still wherever the run did, for under `Hybrid` that changes what rows miss."""
        self.due.ask(Flags(checkpoint=self.feed.closes and self.state.step + 1 in self._stood))
        return super().step(ready)

    def evaluate(self, split: str = "") -> dict[str, float]:
        self.checkpoint()
        return {}

    def checkpoint(self) -> Path:
        with self.at_work(), self.feed.paused():
            for tier in self.embeddings.router.tiers.values():
                tier.flush()
        self.due.checkpoint = False
        return self.checkpoints.at(self.state.step)

    def compared(self, folder: RunFolder, ready: Ready) -> dict[str, Any]:
        """How many losses of these steps the run logged, and the first step whose loss is another now."""
        assert self.one_step.loss is not None
        self.losses.add(self.one_step.loss, self.objective.weight(ready.batch))
        mean = self.losses.shown()
        here = [*_logged(self.folder), (self.state.step + 1, mean)]
        then = _logged(folder)
        before = [line for line in then if line[0] <= self.start][-1:]
        said, again = _windows(then), _windows([*before, *here])
        both = [window for window in again if said.get(window) is not None]
        other = [window[1] for window in both if said[window] != again[window]]
        return {"logged": len(both), "differs_at": other[0] if other else None}


def table_of(batch: Batch, schema: Schema, dense: tuple[str, ...]) -> pa.Table:
    """The samples of a batch as they went into the step, a row each: keys in lists, after all of `data.steps`."""
    columns: dict[str, pa.Array] = {}
    whole = batch.expand()
    for name in whole.features:
        bags = whole[name]
        offsets = pa.array(bags.offsets.numpy(), pa.int32())
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(bags.values.numpy()))
        if bags.weights is not None:
            columns[f"{name}.weights"] = pa.ListArray.from_arrays(offsets, pa.array(bags.weights.numpy()))
    for names, tensor in ((dense, batch.dense), (schema.label_names, batch.labels)):
        for name, column in zip(names, _columns(tensor), strict=False):
            columns[name] = pa.array(column.numpy())
    for name, tensor in ((schema.weight or "weight", batch.weights), (f"{schema.user}.of_sample", batch.users)):
        columns |= {} if tensor is None else {name: pa.array(tensor.numpy())}
    return pa.table(columns)


def _run_folder(path: Path) -> RunFolder:
    folder, checkpoint = find_run(path)
    if checkpoint is not None:
        raise SettingsError(f"{path} is a checkpoint; give the run folder, {folder.path}, and the step.")
    return folder


def _start(folder: RunFolder, step: int) -> Checkpoint | None:
    """The last checkpoint before the step; none where there is none any more."""
    if step < 1:
        raise SettingsError(f"--step {step}: steps are counted from 1.")
    kept = Checkpoints(folder.checkpoints)
    before = [path for path in kept.all() if path < kept.at(step)]
    return Checkpoint(before[-1]) if before else None


def _refuse(run: Run, start: Checkpoint | None) -> None:
    """Says of what runs no step can be made again."""
    if run.data.follow is not None:
        raise SettingsError("The run follows a log, which is read once: a step of it cannot be made again.")
    if World.here().size > 1 or (start is not None and "random/cpu/1" in start.arrays()):
        raise SettingsError(
            "The steps of this run were made by several ranks together: one process cannot replay them."
        )
    if run.cluster.shards and run.cluster.wire not in (None, "float32"):
        raise SettingsError(
            f"The rows of this run travelled as {run.cluster.wire}, which rounds them, and a replay has them in its "
            f"own memory: the same step cannot be made."
        )


def _elsewhere(run: Run, folder: Path) -> Run:
    """The run in a folder of its own, with the rows of shards in this process."""
    cluster = Cluster(cache=run.cluster.cache) if run.cluster.shards else run.cluster
    return run.model_copy(
        update={
            "cluster": cluster,
            "train": run.train.model_copy(update={"early_stopping": None}),
            "output": run.output.model_copy(update={"folder": folder, "tensorboard": False}),
        }
    )


def _notes(run: Run, began: int) -> list[str]:
    """What there is to know of how the step was made."""
    notes = []
    if not began:
        notes.append("No checkpoint from before the step is left, so all steps were made from the run's beginning.")
    if isinstance(run.policy, Hybrid) and run.policy.staleness and not run.policy.worst:
        notes.append("What rows miss under hybrid is a matter of time, so the step may differ from the run's.")
    if run.train.accumulate > 1:
        notes.append("Several batches make a step: this is the last one. Gradients of weights are those of all.")
    if run.train.device != "cpu":
        notes.append("A GPU may add up in another order, so the step may differ from the run's in rounding.")
    return notes


def _found(trainer: _Again, ready: Ready) -> dict[str, Any]:
    """What is known of the step that was made last."""
    step = trainer.one_step
    return {
        "step": trainer.state.step + 1,
        "samples": len(ready.batch),
        "loss": _number(step.loss),
        "wrong": step.wrong,
        "gradients": [
            {"weight": name, "largest": _number(grad.abs().max()), "norm": _number(grad.double().norm())}
            for name, grad in step.causes.gradients().items()
            if grad.numel()
        ],
        "features": [
            {"feature": name, "largest": _number(grad.abs().max()), "norm": _number(grad.double().norm())}
            for name, grad in step.causes.gradients_of_features(ready)
            if grad.numel()
        ],
        "rows": [_norms(*found) for found in step.causes.rows(ready)],
    }


def _norms(table: str, keys: Tensor, rows: Tensor) -> dict[str, Any]:
    """How long a table's rows are, and which are longest; one that is not finite counts as such."""
    norms = rows.double().norm(dim=1)
    order = norms.nan_to_num(nan=math.inf).argsort(descending=True)[:_LARGEST].tolist()
    return {
        "table": table,
        "rows": len(keys),
        "mean": _number(norms.mean()) if len(keys) else None,
        "largest": [{"key": int(keys[i]), "norm": _number(norms[i])} for i in order],
    }


def _logged(folder: RunFolder) -> list[tuple[int, float | None]]:
    return [(line["step"], line["loss"]) for line in folder.lines() if line["kind"] == "train"]


def _windows(lines: list[tuple[int, float | None]]) -> dict[tuple[int, int], float | None]:
    """Mean losses by the steps they are of: from behind the line before to the line's."""
    return {(first, last): loss for (first, _), (last, loss) in itertools.pairwise([(0, None), *lines])}


def _columns(tensor: Tensor | None) -> tuple[Tensor, ...]:
    if tensor is None:
        return ()
    return tensor.unbind(1) if tensor.dim() == 2 else (tensor,)


def _number(value: Tensor | None) -> float | None:
    """As JSON has it: nothing for what is not finite."""
    return float(value) if value is not None and bool(torch.isfinite(value)) else None
