"""`Run`: everything one training run is, read from a TOML run file and checked before anything starts.

    [data]                          [tables]                    [model]
    path = "clicks"                 dim = 16                    name = "dlrm"
    batch_size = 4096
                                    [tables.item]               [optimizer]
    [train]                         dim = 32                    name = "adam"
    epochs = 1                      optimizer.lr = 0.05         lr = 0.001

`[tables]` holds what all tables share and `[tables.NAME]` what one of them has of its own; which tables and
features there are is the data set's business. A table's section changes only what it says: `optimizer.lr`
alone keeps the shared optimizer, `optimizer.name` starts a new one. Relative paths are taken from the folder
of the run file, wherever the command is given.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import nn

from hotrow.data.growing import Follow
from hotrow.data.neighbours import Neighbours
from hotrow.data.steps import Step
from hotrow.errors import SettingsError, nearest
from hotrow.models import Model, OwnModel
from hotrow.objectives import BinarySettings, Metric, Objective, ObjectiveSettings, OwnMetric, OwnObjective
from hotrow.own import OwnClass
from hotrow.policy import Policy, Sync
from hotrow.settings import Settings, parse
from hotrow.sizes import parse_size
from hotrow.store.optimizers import Optimizer, RowWiseAdagrad
from hotrow.table import Admission, Eviction, Feature, Init, Table, Uniform
from hotrow.tiers.cached import Cache
from hotrow.toml import override_setting, to_toml
from hotrow.train.dense import DenseAdam, DenseOptimizer
from hotrow.train.own_optimizer import OwnOptimizer


class Data(Settings):
    """What is read, and in which portions."""

    path: Path = Field(description="folder of a prepared data set")
    batch_size: int = Field(4096, ge=1, lt=2**31, description="samples a step, on each rank")
    shuffle: bool = Field(True, description="another order of samples in every epoch")
    seed: int = Field(0, ge=0, lt=2**63, description="of the order of samples")
    train: str = Field("train", description="the split to train on")
    validation: str = Field(
        "validation", description="the split to evaluate on while training and to stop by; test if there is none"
    )
    test: str = Field("test", description="the split to evaluate on at the end; empty for none")
    steps: tuple[Step, ...] = Field((), description="preprocessing, in order: [[data.steps]], see hotrow.data.steps")
    follow: Follow | None = Field(None, description="a log to train on as it grows: [data.follow]")


class TableSection(Settings):
    """What a table may set of its own; `without` names what the others share and it has not."""

    dim: int | None = Field(None, ge=1, le=4096)
    dtype: Literal["float32", "bfloat16"] | None = None
    optimizer: Optimizer | None = None
    init: Init | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    without: tuple[Literal["admission", "eviction"], ...] = ()


class Tables(Settings):
    """What all tables share, and below each table's name what it has of its own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TableSection]

    dim: int = Field(16, ge=1, le=4096)
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: Optimizer = RowWiseAdagrad()
    init: Init = Uniform()
    admission: Admission | None = None
    eviction: Eviction | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, data: Any) -> Any:
        """Gives `optimizer.lr = 1` without a name the default's name, or for a table the shared one's."""
        if not isinstance(data, dict):
            return data
        out = dict(data)
        for name, value in data.items():
            if name in cls.model_fields:
                out[name] = _below(cls.model_fields[name].default, value)
        for name, section in data.items():
            if name in cls.model_fields:
                continue
            if not isinstance(section, (dict, TableSection)):
                raise _unknown("setting", name, cls.model_fields)
            if isinstance(section, dict):
                out[name] = {key: _below(cls._shared(out, key), value) for key, value in section.items()}
        return out

    @classmethod
    def _shared(cls, data: Mapping[str, Any], key: str) -> Any:
        return data.get(key, cls.model_fields[key].default if key in cls.model_fields else None)

    def table(self, name: str) -> Table:
        """The settings of one table: its own section over what all share."""
        own = self.section(name)
        shared = {key: getattr(self, key) for key in Tables.model_fields if key not in own.without}
        mine = {key: getattr(own, key) for key in Tables.model_fields if getattr(own, key) is not None}
        return Table(name=name, **{**shared, **mine})

    def section(self, name: str) -> TableSection:
        """What a table has of its own."""
        return (self.__pydantic_extra__ or {}).get(name, TableSection())

    @property
    def named(self) -> tuple[str, ...]:
        """The tables that have a section of their own."""
        return tuple(self.__pydantic_extra__ or {})


class FeatureSection(Settings):
    """What a run may change about a feature of the data set."""

    pooling: Literal["sum", "mean", "sequence"] | None = Field(
        None, description="what a sample gets of its rows; as the data set says if not given"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="share of samples whose vector is zeros in training; of a sequence, share of rows"
    )

    @model_validator(mode="after")
    def _changes_something(self) -> FeatureSection:
        if not self.model_fields_set:
            raise PydanticCustomError("sentence", "the section is empty: give pooling or dropout, or take it away.")
        return self


class PlanSection(Settings):
    """Which rows live on the device: a saved plan, or the best for so much memory, made when the run starts.

    With `replan_every` keys are counted as they are trained on, and rows move to a new plan for the same memory. With
    mode "hot_cold" samples that look up hot rows only have batches of their own, and the plan stays.
    """

    path: Path | None = Field(None, description="a plan that `hotrow plan` wrote")
    memory: str | None = Field(None, description='what hot rows may take on the device, as in "512MiB"')
    mode: Literal["split", "hot_cold"] = Field("split", description="both tiers in every batch, or batches of one kind")
    replan_every: Annotated[int, Field(ge=1)] | Literal["epoch"] | None = Field(
        None, description='steps, or "epoch": a new plan from what was trained on'
    )
    judge: int = Field(100_000, ge=1, description="hot_cold: first samples of validation, whose loss steers it")
    device_rows: bool = Field(
        False, description="several ranks: rows that the plan names lie on each rank's device, not in host memory"
    )

    @field_validator("memory", mode="before")
    @classmethod
    def _a_size(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str):
            try:
                parse_size(text, "a memory budget")
            except SettingsError as error:
                raise PydanticCustomError("sentence", "{said}", {"said": str(error)}) from None
        return text

    @model_validator(mode="after")
    def _one_source(self) -> PlanSection:
        if (self.path is None) == (self.memory is None):
            raise PydanticCustomError(
                "sentence", 'give either the path of a saved plan or the memory to plan for, as in memory = "512MiB".'
            )
        if self.mode == "hot_cold" and self.replan_every is not None:
            raise PydanticCustomError(
                "sentence",
                'replan_every works with mode = "split" only: batches of hot_cold are made for one plan.',
            )
        if self.device_rows and self.memory is not None:
            raise PydanticCustomError(
                "sentence",
                "device_rows is for a saved plan of several ranks; with memory, rows go to the device anyway.",
            )
        return self

    @property
    def bytes(self) -> int | None:
        """The memory to plan for."""
        return None if self.memory is None else parse_size(self.memory)


class Cluster(Settings):
    """Where rows live that do not live in this process alone, and how they travel.

    `hotrow up` fills in `shards` by itself. With several ranks and no shards each rank owns a part of the rows.
    """

    shards: tuple[str, ...] = Field((), description='addresses of running shards, as "tcp://127.0.0.1:7700"')
    rows: Literal["host", "served", "sharded", "replicated"] | None = Field(
        None,
        description="host: this process; served: the shards; sharded: a part on each rank; replicated: all on each",
    )
    wire: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="rows and gradients on the way; as a plan for ranks says, else float32, if not given"
    )
    exchange: Literal["gloo", "nccl"] = Field(
        "gloo", description="how ranks send each other rows: from host memory, or from device to device"
    )
    key: Path | None = Field(None, description="the trainers' key file, for shards on other machines (hotrow keys)")
    timeout: float | None = Field(
        None,
        gt=0,
        description="seconds that a shard or another rank is waited for; 60 for a shard, 300 for rows of a rank and "
        "1,800 for all else of it if not given",
    )
    cache: Cache | None = Field(None, description="copies of rows in this process, in front of the shards")

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        if self.shards and self.rows not in (None, "served"):
            raise PydanticCustomError("sentence", 'shards are given, so rows = "served"; leave one of the two out.')
        if self.cache is not None and self.rows in ("sharded", "replicated"):
            raise PydanticCustomError("sentence", 'a cache stands in front of shards; set rows = "served".')
        return self


class EarlyStopping(Settings):
    """Training stops when `metric` has not become better for `patience` evaluations in a row.

    The run then stands for its best checkpoint: what it says it reached, what is evaluated and what answers.
    """

    metric: str = Field("", description="which one; the objective's first if not given: auc")
    patience: int = Field(3, ge=1, description="evaluations without a better value")
    min_delta: float = Field(0.0, ge=0, description="what counts as better")

    def better(self, value: float, best: float | None, which: Literal["larger", "smaller"]) -> bool:
        """Whether `value` improves on the best so far."""
        if best is None:
            return True
        gain = value - best if which == "larger" else best - value
        return gain > self.min_delta


class Train(Settings):
    """How long, on what, and what happens on the way."""

    epochs: int = Field(1, ge=1, description="times the training split is read")
    steps: int | None = Field(None, ge=1, description="stop after this many steps, if epochs do not end before")
    warm_start: Path | None = Field(
        None, description="a run folder or checkpoint: tables and weights that this run has too start from it"
    )
    accumulate: int = Field(
        1, ge=1, le=256, description="batches that make one step, as one batch of all their samples would"
    )
    evaluate_every: int | None = Field(None, ge=1, description="steps; there is always an evaluation at the end")
    checkpoint_every: int | None = Field(None, ge=1, description="steps; there is always a checkpoint at the end")
    keep: int = Field(2, ge=1, description="checkpoints kept; the best one is kept besides when stopping early")
    incremental: int = Field(0, ge=0, description="checkpoints with changed rows only, after each one with all rows")
    log_every: int = Field(50, ge=1, description="steps between lines of metrics")
    early_stopping: EarlyStopping | None = None
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the dense part runs, and hot rows live")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of the dense part's products; weights stay fp32")
    compile: bool = Field(False, description="torch.compile of the dense part, for training")
    threads: int | None = Field(None, ge=1, le=1024, description="threads on the host; all cores if not given")
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, new rows and dropout")

    @model_validator(mode="after")
    def _stopping_needs_evaluations(self) -> Train:
        if self.early_stopping is not None and self.evaluate_every is None:
            raise ValueError("early_stopping needs evaluate_every")
        return self


class Evaluate(Settings):
    """What evaluations measure besides the objective's metrics of all samples."""

    slices: tuple[str, ...] = Field(
        (), description="features with one key a sample, or the user: metrics for each of their values too"
    )
    values: int = Field(10, ge=1, description="so many values of each, the most frequent; all others are one more")
    metrics: tuple[OwnMetric, ...] = Field((), description="metrics of your own: [[evaluate.metrics]]")


class Output(Settings):
    """Where the run writes."""

    folder: Path = Field(
        description="settings, metrics and checkpoints go here; runs/NAME of the run file if not given"
    )
    tensorboard: bool = Field(True, description="also write TensorBoard events, where tensorboard is installed")


class Run(Settings):
    """One training run."""

    data: Data
    tables: Tables = Tables()
    features: dict[str, FeatureSection] = Field(default_factory=dict)
    model: Model = OwnModel()
    objective: ObjectiveSettings = BinarySettings()
    optimizer: DenseOptimizer = DenseAdam()
    policy: Policy = Sync()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    plan: PlanSection | None = None
    cluster: Cluster = Cluster()
    output: Output

    @field_validator("objective", mode="before")
    @classmethod
    def _binary_unless_named(cls, value: Any) -> Any:
        return {"name": "binary", **value} if isinstance(value, dict) else value

    @field_validator("policy", mode="before")
    @classmethod
    def _sync_unless_named(cls, value: Any) -> Any:
        return {"name": "sync", **value} if isinstance(value, dict) else value

    @staticmethod
    def load(path: Path | str, overrides: Sequence[str] = ()) -> Run:
        """The run of a run file. `overrides` are settings in its place, as in "train.epochs=2"."""
        return load_run(path, overrides)

    def trusted(self, folder: Path | None = None) -> Run:
        """The same, whose own classes may be imported; from `folder`, where they do not say another."""
        own: dict[str, Any] = {name: value.trusted(folder) for name, value in self._own()}
        metrics = tuple(metric.trusted(folder) for metric in self.evaluate.metrics)
        own["evaluate"] = self.evaluate.model_copy(update={"metrics": metrics})
        return self.model_copy(update=own)

    def with_classes(
        self,
        model: type[nn.Module] | None = None,
        objective: type[Objective] | None = None,
        optimizer: type[torch.optim.Optimizer] | None = None,
        metrics: Sequence[type[Metric]] = (),
    ) -> Run:
        """The same with classes that the caller has at hand; metrics come behind those that the run names."""
        found: dict[str, Any] = {}
        if model is not None:
            found["model"] = _own_of(OwnModel, self.model).given(model)
        if objective is not None:
            found["objective"] = _own_of(OwnObjective, self.objective).given(objective)
        if optimizer is not None:
            found["optimizer"] = _own_of(OwnOptimizer, self.optimizer).given(optimizer)
        if metrics:
            given = (*self.evaluate.metrics, *(OwnMetric().given(metric) for metric in metrics))
            found["evaluate"] = self.evaluate.model_copy(update={"metrics": given})
        return self.model_copy(update=found)

    @property
    def sources(self) -> list[Path]:
        """Files and folders of the user's own classes, which every process of the run imports."""
        own = [*(value for _, value in self._own()), *self.evaluate.metrics]
        return list(dict.fromkeys(path for value in own if (path := value.source) is not None))

    def _own(self) -> Iterator[tuple[str, OwnClass]]:
        for name in ("model", "objective", "optimizer"):
            value = getattr(self, name)
            if isinstance(value, OwnClass):
                yield name, value

    def tables_of(self, names: Iterable[str]) -> list[Table]:
        """The tables called `names`, with their settings; refuses a section for a table that is not there.

        A model with a wide part (deepfm, wide_deep) gets rows of one value more, its linear weight.
        """
        known = list(dict.fromkeys(names))
        for name in self.tables.named:
            if name not in known:
                raise SettingsError(f'tables.{name}: the data set has no table "{name}".{nearest(name, known)}')
        extra = self.model.extra_row_values
        tables = [self.tables.table(name) for name in known]
        return [t.model_copy(update={"dim": t.dim + extra}) for t in tables]

    def features_of(self, features: Sequence[Feature]) -> list[Feature]:
        """The data set's features with what this run changes about them."""
        known = [f.name for f in features]
        for name in self.features:
            if name not in known:
                raise SettingsError(f'features.{name}: the data set has no feature "{name}".{nearest(name, known)}')
        changes = {name: section.model_dump(exclude_none=True) for name, section in self.features.items()}
        return [f.model_copy(update=changes.get(f.name, {})) for f in features]

    def to_toml(self) -> str:
        """These settings, defaults and all, as a run file that can be run again."""
        return to_toml(self.model_dump(mode="json", exclude_none=True))


def _own_of(kind: type[Any], said: Any) -> Any:
    """The section as one for an own class, whose settings it then holds; refuses one that names a built-in."""
    if isinstance(said, kind):
        return said
    if isinstance(said, DenseAdam) and "name" not in said.model_fields_set:  # a section that names none may be any's
        return kind(**said.model_dump(exclude_unset=True))
    if said != type(said)():
        raise SettingsError(
            f'{kind.what}.name: the run names "{said.name}", and a class is passed too. Take the name and its settings '
            f"out of the run, or pass no class."
        )
    return kind()


def _unknown(what: str, name: str, known: Iterable[str]) -> PydanticCustomError:
    said = {"what": what, "name": name, "hint": nearest(name, known)}
    return PydanticCustomError("sentence", 'there is no {what} "{name}".{hint}', said)


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> Run:
    """Reads and checks a run file; `overrides` are "key=value" with a TOML value, as in `train.epochs=2`."""
    path = Path(path)
    data = _read(path)
    for override in overrides:
        override_setting(data, override)
    data.setdefault("output", {})
    if isinstance(data["output"], dict):
        data["output"].setdefault("folder", str(Path("runs") / path.stem))
    try:
        run = parse(Run, data)
    except SettingsError as error:
        raise SettingsError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None
    here = path.resolve().parent
    found: dict[str, Any] = {
        "data": _data_from(here, run.data),
        "output": run.output.model_copy(update={"folder": (here / run.output.folder).resolve()}),
    }
    if run.train.warm_start is not None:
        found["train"] = run.train.model_copy(update={"warm_start": (here / run.train.warm_start).resolve()})
    if run.plan is not None and run.plan.path is not None:
        found["plan"] = run.plan.model_copy(update={"path": (here / run.plan.path).resolve()})
    if run.cluster.key is not None:
        found["cluster"] = run.cluster.model_copy(update={"key": (here / run.cluster.key).resolve()})
    return run.model_copy(update=found).trusted(here)


def _data_from(here: Path, data: Data) -> Data:
    """The data section with its relative paths taken from `here`."""
    steps = (
        step.model_copy(update={"graph": (here / step.graph).resolve()}) if isinstance(step, Neighbours) else step
        for step in data.steps
    )
    follow = None if data.follow is None else data.follow.under(here)
    return data.model_copy(update={"path": (here / data.path).resolve(), "steps": tuple(steps), "follow": follow})


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise SettingsError(f"There is no run file {path}.") from None
    except IsADirectoryError:
        raise SettingsError(f"{path} is a folder; a run is described by a TOML file.") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not a TOML file: byte {error.start} is not UTF-8.") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no error of TOML
        raise SettingsError(f"{path} is not valid TOML: {str(error)[:1].lower()}{str(error)[1:]}.") from None


def _below(shared: Any, own: Any) -> Any:
    """`own` over `shared` where both are sections and `own` does not name another thing."""
    if isinstance(shared, Settings):
        shared = shared.model_dump()
    if not (isinstance(shared, dict) and isinstance(own, dict)):
        return own
    if "name" in own and own["name"] != shared.get("name"):
        return own
    return {**shared, **{key: _below(shared.get(key), value) for key, value in own.items()}}
