"""Regression: the model gives a number a sample, the label is any finite number: a rating, minutes, a price.

Labels are taken as they are. A model's last layer starts near 0, so labels far from 0 or very large are learned faster
when they are brought near it beforehand; `huber` and `absolute` let a few huge ones count less.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.data.labels import label_column, of_column
from hotrow.errors import DataError, HotrowError
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import Better, BuiltIn, Objective, ObjectiveInputs, one_each, one_output, weighted_mean
from hotrow.objectives.regression_metrics import RegressionMetrics
from hotrow.settings import Settings

Loss = Literal["squared", "absolute", "huber"]


class Distance(Settings):
    """How far a prediction is from a label."""

    loss: Loss = Field("squared", description="the loss: squared error, absolute error, or huber, which joins the two")
    delta: float | None = Field(None, gt=0, description="huber: from which error on the loss is linear; 1 if not given")

    @model_validator(mode="after")
    def _read_by_huber_only(self) -> Distance:
        if self.delta is not None and self.loss != "huber":
            raise ValueError(f'delta is read with loss = "huber" only, and the loss is "{self.loss}"; take it away')
        return self

    def between(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample."""
        if self.loss == "huber":
            return F.huber_loss(predictions, labels, reduction="none", delta=1.0 if self.delta is None else self.delta)
        loss = F.mse_loss if self.loss == "squared" else F.l1_loss
        return loss(predictions, labels, reduction="none")


class RegressionSettings(Distance, BuiltIn):
    """A label that is any number: the mean squared, absolute or Huber error."""

    name: Literal["regression"] = "regression"
    label: str = Field("", description="the label of the data set; its only one if not given")

    def build(self, inputs: ObjectiveInputs) -> Regression:
        return Regression(self, inputs)


class Regression(Objective):
    """Mean distance from one label."""

    watched: Mapping[str, Better] = MappingProxyType({"rmse": "smaller", "mae": "smaller"})

    def __init__(self, settings: RegressionSettings, inputs: ObjectiveInputs) -> None:
        super().__init__(inputs)
        self._distance: Distance = settings
        self._column = label_column(settings.label, inputs.labels)

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        if inputs.labels is None:
            raise HotrowError("The batches have no labels, so there is nothing to train towards.")
        labels = of_column(inputs.labels, self._column)
        predictions = one_each(outputs, labels, "regression")
        return weighted_mean(self._distance.between(predictions, labels), inputs.weights)

    def predict(self, outputs: Any) -> dict[str, Tensor]:
        return {"prediction": one_output(outputs, "regression")}

    def metrics(self) -> RegressionMetrics:
        return RegressionMetrics()

    def measure(self, metrics: RegressionMetrics, outputs: Any, batch: Batch) -> None:
        if batch.labels is None:
            raise DataError("The samples have no labels to evaluate against.")
        metrics.update(one_output(outputs, "regression"), of_column(batch.labels, self._column), batch.weights)
