"""`RegressionMetrics`: how far predictions are from labels, over any number of batches and ranks.

Five sums in float64 and a count are kept, whatever the number of samples; ranks add theirs up.

| name | what it is |
| --- | --- |
| rmse | root of the mean squared error |
| mae | mean absolute error |
| calibration | mean prediction over mean label |
| samples | how many there were |

Weights, where given, count a sample that many times. What has no answer (no samples, a mean label of 0) is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hotrow.errors import DataError


class RegressionMetrics:
    """Adds up predictions, labels and weights; `compute` gives the metrics of all so far."""

    def __init__(self) -> None:
        self._sums = torch.zeros(6, dtype=torch.float64)  # weight, squares, distances, predictions, labels; samples

    def __len__(self) -> int:
        return int(self._sums[5])

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch: predictions [B], labels of any finite size, and weights where there are some."""
        for name, given in (("labels", labels), ("weights", weights)):
            if given is not None and given.shape != predictions.shape:
                raise DataError(
                    f"Metrics: {name} of shape {tuple(given.shape)} do not fit predictions of shape "
                    f"{tuple(predictions.shape)}."
                )
        if predictions.dim() != 1:
            raise DataError(f"Metrics: predictions must be [B], not of shape {tuple(predictions.shape)}.")
        if not bool(torch.isfinite(labels).all()):
            raise DataError("Metrics: labels must be finite numbers; there is another value or NaN among them.")
        if weights is not None and not bool((weights >= 0).all()):
            raise DataError("Metrics: weights must not be negative or NaN.")
        y, z = labels.detach().double().cpu(), predictions.detach().double().cpu()
        w = torch.ones_like(y) if weights is None else weights.detach().double().cpu()
        off = z - y
        self._sums += torch.stack([w.sum(), w @ off.square(), w @ off.abs(), w @ z, w @ y, w.new_tensor(float(len(w)))])

    def state(self) -> dict[str, Tensor]:
        """The sums so far, to be sent to another rank."""
        return {"sums": self._sums.clone()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds the sums of another rank."""
        if state:
            self._sums += state["sums"]

    def compute(self) -> dict[str, float]:
        """Every metric by name."""
        weight, squares, distances, predictions, labels, samples = self._sums.tolist()
        return {
            "rmse": math.sqrt(squares / weight) if weight and not math.isnan(squares) else math.nan,
            "mae": distances / weight if weight else math.nan,
            "calibration": predictions / labels if labels else math.nan,
            "samples": samples,
        }
