"""Binary cross entropy: the model gives a logit a sample, the label is a number from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.data.labels import label_column, of_column
from hotrow.errors import DataError, HotrowError, SettingsError
from hotrow.objectives.binary_metrics import BinaryMetrics
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import Better, BuiltIn, Objective, ObjectiveInputs, one_each, one_output, weighted_mean


class BinarySettings(BuiltIn):
    """The chance of a label: a logit a sample, binary cross entropy."""

    name: Literal["binary"] = "binary"
    label: str = Field("", description="the label of the data set; its only one if not given")

    def build(self, inputs: ObjectiveInputs) -> Binary:
        return Binary(self, inputs)


class Binary(Objective):
    """Mean binary cross entropy of one label."""

    watched: Mapping[str, Better] = MappingProxyType(
        {"auc": "larger", "log_loss": "smaller", "normalized_entropy": "smaller", "user_auc": "larger"}
    )

    def __init__(self, settings: BinarySettings, inputs: ObjectiveInputs) -> None:
        super().__init__(inputs)
        self._column = label_column(settings.label, inputs.labels)
        if (label := inputs.labels[self._column]) in inputs.numbers:
            raise SettingsError(
                f'objective: binary needs a label from 0 to 1, and "{label}" may be any number. Choose regression, or '
                f"prepare the log with the label as a binary one."
            )

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        if inputs.labels is None:
            raise HotrowError("The batches have no labels, so there is nothing to train towards.")
        labels = of_column(inputs.labels, self._column)
        logits = one_each(outputs, labels, "binary")
        if inputs.weights is None:
            return F.binary_cross_entropy_with_logits(logits, labels)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return weighted_mean(losses, inputs.weights)

    def predict(self, outputs: Any) -> dict[str, Tensor]:
        return {"score": torch.sigmoid(one_output(outputs, "binary"))}

    def metrics(self) -> BinaryMetrics:
        return BinaryMetrics()

    def measure(self, metrics: BinaryMetrics, outputs: Any, batch: Batch) -> None:
        if batch.labels is None:
            raise DataError("The samples have no labels to evaluate against.")
        logits, labels = one_output(outputs, "binary"), of_column(batch.labels, self._column)
        metrics.update(logits, labels, batch.weights, batch.users)
