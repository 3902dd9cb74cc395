"""The run folder: settings as run, metrics as JSON lines, TensorBoard events, checkpoints.

    lock              only while a run is at work here: who it is
    settings.toml     a run file again, with every default spelled out and paths made absolute
    run.id            a name that no other run has: shards know by it whose rows they hold
    schema.json       that of the data set, so that who scores by the run needs nothing else
    metrics.jsonl     one object a line, each with "kind" and "step"; flushed line by line. train, evaluate, switch,
                      progressive, plan, follow: the same in every run of the same settings; checkpoint, machine, tier:
                      of this one
    tensorboard/      the same numbers as events, where tensorboard is installed
    warm_start.json   what the run took over from another when it started
    start.plan        the plan that the run made for itself when it started
    report.html       what `hotrow report` makes of all this, unless told to write it elsewhere
    replay/           steps that `hotrow replay` made again, unless told to write them elsewhere
    checkpoints/      see `checkpoint.py`

A resumed run cuts `metrics.jsonl` back to the step it resumes from, so it reads as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hotrow.data.dataset import DataSet
from hotrow.data.schema import Schema
from hotrow.errors import CheckpointError, SettingsError
from hotrow.locks import Lock
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.checkpoint import read_manifest
from hotrow.train.progress import Progress
from hotrow.train.ranks import Ranks

# What may differ between a run and its resumption: nothing of it changes what the steps so far have computed.
_FREE = {
    "train.epochs",
    "train.steps",
    "train.evaluate_every",
    "train.checkpoint_every",
    "train.keep",
    "train.incremental",
    "train.log_every",
    "policy.ahead",
    "output.folder",
    "output.tensorboard",
    "model.folder",
    "objective.folder",
    "optimizer.folder",
    "data.path",
    "data.validation",
    "data.test",
    "train.early_stopping.patience",
    "train.early_stopping.min_delta",
}

# What says how a split is read, of which a run that follows a log reads none.
_OF_A_SPLIT = {"data.train", "data.shuffle", "data.seed"}

# How far a step goes may change too, so that a run that did not converge can go on from before that.
_RATES = re.compile(r"(tables\.)?([^.]+\.)?optimizer\.(lr|schedule|clip_norm|clip_value|bound|weight_decay)(\..*)?")

# Where rows live may change, for a checkpoint goes on anywhere; and a run may begin to follow a log, or end to; and
# what is measured changes nothing.
_PLACES = ("cluster", "data.follow", "evaluate")


_LONGEST_NAME = 100


class RunFolder:
    """Where one run keeps what it writes."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.settings = self.path / "settings.toml"
        self._id = self.path / "run.id"
        self._schema = self.path / "schema.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.plan = self.path / "start.plan"
        self.report = self.path / "report.html"
        self.warm_start = self.path / "warm_start.json"
        self.replays = self.path / "replay"

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.settings.is_file()

    def lock(self) -> Lock:
        """Keeps other runs out until it is released. All ranks of a run share one, so only the first takes it."""
        remedy = "Wait until it has ended or stop it, or give another output.folder."
        return Lock(self.path, "a run", remedy, error=SettingsError, needed=False)

    def begin(self, run: Run, *, resume: bool, overwrite: bool) -> None:
        """Makes the folder ready; refuses to mix a run with another one that is already there."""
        if resume and self.exists:
            _same_run(self.run(), run, self.path)
        elif self.exists and not overwrite:
            raise SettingsError(
                f"{self.path} already holds a run. Use --resume to go on with it, --overwrite to start "
                f"afresh, or another output.folder."
            )
        else:
            self._clear()
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.settings, run.to_toml())
        if not self.id:
            _replace(self._id, f"{self.path.name[:_LONGEST_NAME]}-{secrets.token_hex(4)}\n")

    @property
    def id(self) -> str:
        """The name that no other run has; nothing where none has been started here."""
        return self._id.read_text(errors="replace").strip() if self._id.is_file() else ""

    def run(self) -> Run:
        """The settings the run was started with."""
        if not self.exists:
            raise CheckpointError(f"{self.path} is not a run folder: it has no settings.toml.")
        try:
            said = tomllib.loads(self.settings.read_text())
        except ValueError as error:  # not TOML, or not text
            raise CheckpointError(f"{self.settings} cannot be read, it was altered: {error}.") from None
        return parse(Run, said, str(self.settings))

    def keep_schema(self, schema: Schema) -> None:
        """Keeps the schema of the data set that is trained on."""
        _replace(self._schema, schema.to_json())

    def schema(self, run: Run) -> Schema:
        """The schema of the data set that the run was trained on."""
        return Schema.read(self._schema) if self._schema.is_file() else DataSet.open(run.data.path).schema

    def lines(self) -> Iterator[dict[str, Any]]:
        """The metrics so far; a line that was cut short by a kill, or damaged, is left out."""
        if self.metrics.is_file():
            for line in self.metrics.read_text(errors="replace").splitlines(keepends=True):
                with contextlib.suppress(ValueError):
                    if line.endswith("\n") and "step" in (said := json.loads(line)):
                        yield said

    def cut_back(self, step: int) -> None:
        """Forgets the metrics of steps after `step`, and what the run came to if it had ended (`best_step`)."""
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step and "best_step" not in line]
        _replace(self.metrics, "".join(kept))

    def _clear(self) -> None:
        """Removes an earlier run's files and nothing else that may be in the folder."""
        files = (self.settings, self._id, self._schema, self.metrics, self.plan, self.report, self.warm_start)
        for path in files:
            path.unlink(missing_ok=True)
        for path in (self.checkpoints, self.tensorboard, self.replays):
            if path.is_dir():
                shutil.rmtree(path)


def find_run(path: Path) -> tuple[RunFolder, Path | None]:
    """The run folder at `path` or around it, and the checkpoint that `path` is if it is one."""
    folder = RunFolder(path)
    if folder.exists:
        return folder, None
    if not path.is_dir():
        raise CheckpointError(f"There is no run folder or checkpoint {path}.")
    read_manifest(path)
    folder = RunFolder(path.resolve().parent.parent)
    if not folder.exists:
        raise CheckpointError(
            f"{path} is not in a run folder: {folder.settings} is needed to know the model and the tables."
        )
    return folder, path


@contextlib.contextmanager
def locked(folder: RunFolder, ranks: Ranks, progress: Progress) -> Iterator[None]:
    """Keeps other runs out of the run folder: the first rank does so for all."""
    lock = ranks.do_first(folder.lock)
    with lock or contextlib.nullcontext():
        if lock and lock.note:
            progress.say(lock.note)
        yield


class Quiet:
    """A log that nobody writes: of ranks beside the first."""

    note = ""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Log(Quiet):
    """Appends to a run folder's metrics and TensorBoard events."""

    def __init__(self, folder: RunFolder, *, tensorboard: bool, step: int = 0) -> None:
        self.note = ""
        self._file = folder.metrics.open("a")
        self._events = _events(folder.tensorboard, step) if tensorboard else None
        if tensorboard and self._events is None:
            self.note = "No TensorBoard events are written: tensorboard is not installed (pip install tensorboard)."

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One line, and one TensorBoard scalar for each finite number in it."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in finite.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _events(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(log_dir=str(folder), purge_step=step + 1 if step else None)


def _same_run(before: Run, now: Run, folder: Path) -> None:
    named = {*before.tables.named, *now.tables.named}
    then, today = _said(before, named), _said(now, named)
    hot_cold = now.plan is not None and now.plan.mode == "hot_cold"
    steers = {"data.validation", "data.test"} if hot_cold or now.train.early_stopping is not None else set()
    follows = before.data.follow is not None or now.data.follow is not None
    free = _FREE - steers | (_OF_A_SPLIT if follows else set())
    changed = [
        f"{name} was {then.get(name)!r} and is now {today.get(name)!r}"
        for name in sorted(then.keys() | today.keys())
        if then.get(name) != today.get(name)
        and name not in free
        and not name.startswith(_PLACES)
        and not _RATES.fullmatch(name)
    ]
    if changed:
        raise SettingsError(
            f"The run in {folder} cannot be resumed with other settings: {'; '.join(changed)}. "
            f"Put them back, or start afresh in another output.folder."
        )


def _said(run: Run, named: Iterable[str]) -> dict[str, Any]:
    """The settings, those of the named tables as they are with what all tables share."""
    said = run.model_dump(mode="json")
    said["tables"] |= {name: run.tables.table(name).model_dump(mode="json") for name in named}
    return _flat(said)


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(data, Mapping):
        return {path: data}
    return {
        name: value
        for key, below in data.items()
        for name, value in _flat(below, f"{path}.{key}" if path else key).items()
    }


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
