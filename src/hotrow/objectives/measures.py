"""`Measures`: all that an evaluation measures: metrics of the objective and of the user, of all samples and of slices.

The metrics of a slice have its name before theirs, `country=49.auc`. A slice that has no sample has no metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.errors import SettingsError
from hotrow.objectives.metric import Metric
from hotrow.objectives.objective import Metrics, Objective
from hotrow.objectives.slices import Slice, keys_of, picked

_OF_A_LINE = frozenset({"kind", "step", "split", "best_step"})
"""What a line of metrics says besides: a metric of such a name would take its place."""


class Together:
    """The objective's metrics and the user's own of some samples."""

    def __init__(self, objective: Objective, own: Sequence[Metric]) -> None:
        self._objective, self._own = objective, own
        self._metrics = objective.metrics()

    def update(self, outputs: Any, batch: Batch) -> None:
        """Adds a batch."""
        self._objective.measure(self._metrics, outputs, batch)
        if self._own:
            here = on_host(outputs)
            for metric in self._own:
                metric.update(here, batch)

    def state(self) -> dict[str, Tensor]:
        """All of each, its place among them before its names."""
        states = enumerate([self._metrics.state(), *(metric.state() for metric in self._own)])
        return {f"{i}/{name}": tensor for i, state in states for name, tensor in state.items()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another rank saw."""
        for i, metrics in enumerate([self._metrics, *self._own]):
            metrics.merge(below(f"{i}/", state))

    def compute(self) -> dict[str, float]:
        """Every metric by name."""
        found = dict(self._metrics.compute())
        _refuse_of_a_line(self._objective, found)
        for metric in self._own:
            for name, value in metric.compute().items():
                if name in found or name in _OF_A_LINE:
                    raise _taken(metric, name)
                found[name] = float(value)
        return found


class Measures:
    """What all samples together came to, and each part of each slice. `made` makes metrics of no sample yet."""

    def __init__(self, made: Callable[[], Together], slices: Sequence[Slice] = ()) -> None:
        self._slices = slices
        self._whole = made()
        self._names = [name for part in slices for name in part.names]
        self._parts = [made() for _ in self._names]
        self._counts = torch.zeros(len(self._names), dtype=torch.int64)

    def update(self, outputs: Any, batch: Batch) -> None:
        """Adds a batch and what the model gave for it."""
        self._whole.update(outputs, batch)
        first = 0
        for part in self._slices:
            places = torch.from_numpy(part.places(keys_of(part.column, batch)))
            for place in sorted(set(places.tolist())):
                samples = torch.nonzero(places == place).squeeze(1)
                self._parts[first + place].update(picked(outputs, samples, len(batch)), batch.take(samples))
                self._counts[first + place] += len(samples)
            first += len(part.names)

    def state(self) -> dict[str, Tensor]:
        """All so far as tensors, to be sent to another rank."""
        states = enumerate([self._whole.state(), *(part.state() for part in self._parts)])
        return {
            "counts": self._counts,
            **{f"{i}/{name}": tensor for i, state in states for name, tensor in state.items()},
        }

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another rank saw."""
        if not state:
            return
        self._counts += state["counts"]
        for i, metrics in enumerate([self._whole, *self._parts]):
            metrics.merge(below(f"{i}/", state))

    def compute(self) -> dict[str, float]:
        """Every metric by name, those of slices behind those of all samples."""
        found = self._whole.compute()
        for name, part, count in zip(self._names, self._parts, self._counts.tolist(), strict=True):
            if count:
                found |= {f"{name}.{metric}": value for metric, value in part.compute().items()}
        return found


def check_names(objective: Objective, own: Sequence[Metric]) -> None:
    """Refuses metrics of the user's whose names are taken, as far as they say them without a sample."""
    taken = {*objective.watched, *_names(objective.metrics())}
    _refuse_of_a_line(objective, taken)
    for metric in own:
        for name in {*metric.watched, *_names(metric)}:
            if name in taken or name in _OF_A_LINE:
                raise _taken(metric, name)
        taken |= {*metric.watched, *_names(metric)}


def _names(metrics: Metrics | Metric) -> set[str]:
    try:
        return set(metrics.compute())
    except Exception:  # it may need samples
        return set()


def _refuse_of_a_line(objective: Objective, names: Iterable[str]) -> None:
    if wrong := sorted(_OF_A_LINE & set(names)):
        raise SettingsError(
            f'objective: {type(objective).__name__} gives a metric "{wrong[0]}", and lines of metrics say something '
            f"else by that name. Give it another one."
        )


def _taken(metric: Metric, name: str) -> SettingsError:
    return SettingsError(
        f'evaluate.metrics: {type(metric).__name__} gives "{name}", which is there already. Give it another name.'
    )


def on_host(outputs: Any) -> Any:
    """What a model gave, in this process's memory."""
    return outputs.cpu() if isinstance(outputs, Tensor) else {name: value.cpu() for name, value in outputs.items()}


def below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a state has this before its names, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
