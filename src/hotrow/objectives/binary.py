"""Binary cross entropy: the model gives a logit a sample, the label is a number from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.errors import DataError, HotrowError, SettingsError, nearest
from hotrow.objectives.binary_metrics import BinaryMetrics
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import BuiltIn, Objective, ObjectiveInputs, one_output


class BinarySettings(BuiltIn):
    """The chance of a label: a logit a sample, binary cross entropy."""

    name: Literal["binary"] = "binary"
    label: str = Field("", description="the label of the data set; its only one if not given")

    def build(self, inputs: ObjectiveInputs) -> Binary:
        return Binary(self, inputs)


class Binary(Objective):
    """Mean binary cross entropy of one label."""

    watched: ClassVar[Mapping[str, Literal["larger", "smaller"]]] = {
        "auc": "larger",
        "log_loss": "smaller",
        "normalized_entropy": "smaller",
        "user_auc": "larger",
    }

    def __init__(self, settings: BinarySettings, inputs: ObjectiveInputs) -> None:
        super().__init__(inputs)
        self._column = label_column(settings.label, inputs.labels)

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        if inputs.labels is None:
            raise HotrowError("The batches have no labels, so there is nothing to train towards.")
        logits, labels = one_output(outputs, "binary"), of_column(inputs.labels, self._column)
        if inputs.weights is None:
            return F.binary_cross_entropy_with_logits(logits, labels)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses * inputs.weights).sum() / inputs.weights.sum().clamp(min=1e-12)

    def predict(self, outputs: Any) -> dict[str, Tensor]:
        return {"score": torch.sigmoid(one_output(outputs, "binary"))}

    def metrics(self) -> BinaryMetrics:
        return BinaryMetrics()

    def measure(self, metrics: BinaryMetrics, outputs: Any, batch: Batch) -> None:
        if batch.labels is None:
            raise DataError("The samples have no labels to evaluate against.")
        logits, labels = one_output(outputs, "binary"), of_column(batch.labels, self._column)
        metrics.update(logits, labels, batch.weights, batch.users)


def label_column(name: str, labels: tuple[str, ...]) -> int:
    """Where a label stands among those of the data set; refuses one that is not there, and to guess among several."""
    if not labels:
        raise SettingsError("objective: the data set has no label. Prepare the log with one, or choose next_item.")
    if not name and len(labels) == 1:
        return 0
    if not name:
        raise SettingsError(f"objective.label: the data set has several labels: {', '.join(labels)}. Name one.")
    if name not in labels:
        raise SettingsError(f'objective.label: the data set has no label "{name}".{nearest(name, labels)}')
    return labels.index(name)


def of_column(labels: Tensor, column: int) -> Tensor:
    """One label of each sample, `[B]`, from `[B]` or `[B, L]`."""
    return labels if labels.dim() == 1 else labels[:, column]
