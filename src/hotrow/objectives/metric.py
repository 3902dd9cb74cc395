"""`Metric`: a metric of the user's own, beside those of the objective.

    class Accuracy(Metric):                                     [[evaluate.metrics]]
        watched = {"accuracy": "larger"}                        name = "my_metrics:Accuracy"

        def __init__(self, inputs):
            super().__init__(inputs)
            self.sums = torch.zeros(2, dtype=torch.float64)

        def update(self, outputs, batch):
            self.sums += torch.tensor([float(((outputs > 0) == (batch.labels > 0.5)).sum()), len(batch)])

        def state(self):
            return {"sums": self.sums}

        def merge(self, state):
            self.sums += state["sums"]

        def compute(self):
            return {"accuracy": float(self.sums[0] / self.sums[1])}

It is made for each evaluation anew, as `Class(settings, inputs)` where it has a `Settings`, else as `Class(inputs)`.
What it holds must be sums, or samples, that ranks can join: then its value is of all samples, whoever scored them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.objectives.objective import Better, ObjectiveInputs
from hotrow.own import OwnClass


class Metric:
    """Accumulates what a model gave for samples. Override all that raises."""

    watched: Mapping[str, Better] = MappingProxyType({})
    """Those that early stopping may go by, and which is better."""

    def __init__(self, inputs: ObjectiveInputs) -> None:
        self.inputs = inputs

    def update(self, outputs: Any, batch: Batch) -> None:
        """Adds a batch: what the model gave for it, in this process's memory, and its samples with their labels."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """All so far as tensors, to be sent to another rank."""
        raise NotImplementedError

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another rank saw."""
        raise NotImplementedError

    def compute(self) -> dict[str, float]:
        """Each of its values by name."""
        raise NotImplementedError


class OwnMetric(OwnClass):
    """A class of your own, made from `hotrow.Metric`. Its own settings stand beside its name."""

    what: ClassVar[str] = "metric"
    base: ClassVar[type] = Metric

    @property
    def watched(self) -> Mapping[str, Better]:
        """What early stopping may go by."""
        found: Mapping[str, Better] = getattr(self.load(), "watched", {})
        return found

    def build(self, inputs: ObjectiveInputs) -> Metric:
        """Metrics of no sample yet."""
        made: Metric = self.make(inputs)
        return made
