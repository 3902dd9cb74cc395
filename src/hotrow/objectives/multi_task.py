"""Several labels at once: a task for each, binary or regression, and the weighted sum of their losses.

    [objective]                             every label of the data set is a task, of the label's own kind
    name = "multi_task"
    tasks.click = {}                        or those that are named, each with a weight in the loss
    tasks.minutes = { weight = 0.1, loss = "huber" }

The model gives a tensor `[B]` for each task by its name, or all side by side, `[B, tasks]` in the order of the tasks; a
built-in model does the latter. A task of weight 0 is measured and not trained on. Metrics have the task's name before
theirs, `click.auc`; means over the tasks of a kind come first: `mean_auc` and `mean_log_loss`, or `mean_rmse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from hotrow.data.batch import Batch
from hotrow.data.labels import label_column
from hotrow.errors import SettingsError
from hotrow.models.model import RankingModel
from hotrow.objectives.binary import BinarySettings
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import Better, BuiltIn, Metrics, Objective, ObjectiveInputs
from hotrow.objectives.regression import Distance, RegressionSettings

_MEANS: Mapping[str, Better] = {"auc": "larger", "log_loss": "smaller", "rmse": "smaller"}
"""What is averaged over tasks, and which is better."""


class Task(Distance):
    """One label among several. `loss` and `delta` are those of a regression."""

    kind: Literal["binary", "regression"] | None = Field(
        None, description="regression for labels of the kind number, binary for others, if not given"
    )
    weight: float = Field(1.0, ge=0, description="what its loss counts; with 0 it is measured only")


class MultiTaskSettings(BuiltIn):
    """Several labels at once, each a task of its own: [objective.tasks.LABEL]."""

    name: Literal["multi_task"] = "multi_task"
    tasks: dict[str, Task] = Field(default_factory=dict, description="by label; every label if there are none")

    def build(self, inputs: ObjectiveInputs) -> MultiTask:
        return MultiTask(self, inputs)


class MultiTask(Objective):
    """The weighted sum of what each task's own objective says."""

    def __init__(self, settings: MultiTaskSettings, inputs: ObjectiveInputs) -> None:
        super().__init__(inputs)
        if not inputs.labels:
            label_column("", inputs.labels, "objective.tasks")  # which says so
        tasks = settings.tasks or {name: Task() for name in inputs.labels}
        self.tasks: dict[str, Objective] = {name: _objective(name, task, inputs) for name, task in tasks.items()}
        self.weights = {name: task.weight for name, task in tasks.items()}
        if not any(self.weights.values()):
            raise SettingsError("objective.tasks: every task has weight 0, so there is nothing to train towards.")
        self.means = [m for m in _MEANS if any(m in task.watched for task in self.tasks.values())]
        self.watched = {
            **{f"mean_{name}": _MEANS[name] for name in self.means},
            **{f"{name}.{m}": which for name, task in self.tasks.items() for m, which in task.watched.items()},
        }

    @property
    def outputs_per_sample(self) -> int:
        return len(self.tasks)

    def check(self, model: nn.Module) -> None:
        if isinstance(model, RankingModel) and model.inputs.outputs != self.outputs_per_sample:
            raise SettingsError(
                f"multi_task has {self.outputs_per_sample} tasks, and the model gives {model.inputs.outputs} numbers."
            )

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        found = self.by_task(outputs)
        losses = [
            weight * self.tasks[name].loss(found[name], inputs) for name, weight in self.weights.items() if weight
        ]
        return sum(losses[1:], losses[0])

    def predict(self, outputs: Any) -> dict[str, Tensor]:
        found = self.by_task(outputs)
        return {name: next(iter(task.predict(found[name]).values())) for name, task in self.tasks.items()}

    def metrics(self) -> MultiTaskMetrics:
        return MultiTaskMetrics({name: task.metrics() for name, task in self.tasks.items()}, self.means)

    def measure(self, metrics: MultiTaskMetrics, outputs: Any, batch: Batch) -> None:
        found = self.by_task(outputs)
        for name, task in self.tasks.items():
            task.measure(metrics.tasks[name], found[name], batch)

    def by_task(self, outputs: Any) -> dict[str, Tensor]:
        """What the model gives for each task, `[B]`; refuses what does not say it of every one."""
        names = list(self.tasks)
        if isinstance(outputs, Mapping):
            if lacking := [name for name in names if name not in outputs]:
                raise SettingsError(
                    f"multi_task: the model gives {', '.join(outputs) or 'nothing'}, and no {', '.join(lacking)}. It "
                    f"must give a tensor [B] for each task by its name."
                )
            return {name: outputs[name] for name in names}
        if isinstance(outputs, Tensor) and outputs.dim() == 1 and len(names) == 1:
            return {names[0]: outputs}
        if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] == len(names):
            return dict(zip(names, outputs.unbind(1), strict=True))
        said = f"a tensor {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise SettingsError(
            f"multi_task needs a tensor [B] for each of {', '.join(names)} by its name, or one [B, {len(names)}], and "
            f"the model gives {said}."
        )


class MultiTaskMetrics:
    """Those of each task, its name before theirs, and means over tasks."""

    def __init__(self, tasks: Mapping[str, Metrics], means: list[str]) -> None:
        self.tasks, self._means = dict(tasks), means

    def state(self) -> dict[str, Tensor]:
        """That of each task, its place among them before its names."""
        states = enumerate(metrics.state() for metrics in self.tasks.values())
        return {f"{i}/{name}": tensor for i, state in states for name, tensor in state.items()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds those of another rank."""
        for i, metrics in enumerate(self.tasks.values()):
            prefix = f"{i}/"
            metrics.merge({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})

    def compute(self) -> dict[str, float]:
        """Every metric by name."""
        found = {name: metrics.compute() for name, metrics in self.tasks.items()}
        samples = {m.pop("samples") for m in found.values()}
        means = {}
        for mean in self._means:
            values = [m[mean] for m in found.values() if mean in m]
            means[f"mean_{mean}"] = sum(values) / len(values)
        of_tasks = {f"{task}.{name}": value for task, metrics in found.items() for name, value in metrics.items()}
        return {**means, **of_tasks, "samples": max(samples)}


def _objective(label: str, task: Task, inputs: ObjectiveInputs) -> Objective:
    """A task's own objective."""
    column = label_column(label, inputs.labels, "objective.tasks")
    kind = task.kind or ("regression" if label in inputs.numbers else "binary")
    if kind == "regression":
        return RegressionSettings(label=inputs.labels[column], loss=task.loss, delta=task.delta).build(inputs)
    if (task.loss, task.delta) != ("squared", None):
        raise SettingsError(
            f"objective.tasks.{label}.loss: it is read by a regression, and this task is binary. Take it away, or set "
            f'kind = "regression".'
        )
    return BinarySettings(label=inputs.labels[column]).build(inputs)
