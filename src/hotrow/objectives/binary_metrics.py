"""`BinaryMetrics`: how good predictions are, exactly, over any number of batches and ranks.

Every sample is kept, because an exact AUC needs their order: 8 bytes a sample (logit and label), 4 more with
weights and 8 more with users, and while `compute` runs about 90 more for sorting. All sums are float64, and
the loss is taken from logits, so that a confident prediction costs what it should and not infinity.

| name | what it is |
| --- | --- |
| auc | chance that a positive ranks above a negative; a tie counts half |
| log_loss | mean cross entropy, in nats |
| normalized_entropy | log_loss over that of always predicting the mean label; below 1 is better than that |
| calibration | mean prediction over mean label |
| user_auc | mean AUC within users that have both labels, each by its samples; only if users are given |
| samples | how many there were |

Weights, where given, count a sample that many times. A label between 0 and 1 makes a sample a positive and a negative
of such weights. What has no answer (one class only, no samples) is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.errors import DataError

Array = NDArray[np.float64]


class BinaryMetrics:
    """Accumulates logits, labels, weights and users; `compute` gives the metrics of all so far."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._weights: list[Tensor | None] = []
        self._users: list[Tensor | None] = []

    def __len__(self) -> int:
        return sum(len(part) for part in self._logits)

    def update(
        self, logits: Tensor, labels: Tensor, weights: Tensor | None = None, users: Tensor | None = None
    ) -> None:
        """Adds a batch: logits [B], labels from 0 to 1, and weights and users where there are some."""
        for name, given in (("labels", labels), ("weights", weights), ("users", users)):
            if given is not None and given.shape != logits.shape:
                raise DataError(
                    f"Metrics: {name} of shape {tuple(given.shape)} do not fit logits of shape {tuple(logits.shape)}."
                )
        if logits.dim() != 1:
            raise DataError(f"Metrics: logits must be [B], not of shape {tuple(logits.shape)}.")
        if not bool(((labels >= 0) & (labels <= 1)).all()):
            raise DataError("Metrics: labels must be from 0 to 1; these have another value or NaN among them.")
        if weights is not None and not bool((weights >= 0).all()):
            raise DataError("Metrics: weights must not be negative or NaN.")
        if len(logits) == 0:
            return
        if self._users and (self._users[0] is None) != (users is None):
            raise DataError("Metrics: some batches have users and some have none; give them always or never.")
        self._logits.append(_kept(logits, torch.float32))
        self._labels.append(_kept(labels, torch.float32))
        self._weights.append(None if weights is None else _kept(weights, torch.float32))
        self._users.append(None if users is None else _kept(users, torch.int64))

    def state(self) -> dict[str, Tensor]:
        """All samples so far as tensors, to be sent to another rank; `merge` takes it in."""
        if not self._logits:
            return {}
        state = {"logits": torch.cat(self._logits), "labels": torch.cat(self._labels)}
        if any(part is not None for part in self._weights):
            pairs = zip(self._weights, self._logits, strict=True)
            state["weights"] = torch.cat([torch.ones_like(of) if part is None else part for part, of in pairs])
        users = [part for part in self._users if part is not None]
        return {**state, "users": torch.cat(users)} if users else state

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds the samples of another rank's `state`."""
        if state:
            self.update(state["logits"], state["labels"], state.get("weights"), state.get("users"))

    def reset(self) -> None:
        """Forgets all samples."""
        for kept in (self._logits, self._labels, self._weights, self._users):
            kept.clear()

    def compute(self) -> dict[str, float]:
        """Every metric by name."""
        state = self.state()
        logits = state["logits"].numpy() if state else np.empty(0, np.float32)
        labels = state["labels"].numpy().astype(np.float64) if state else np.empty(0)
        weights = state["weights"].numpy().astype(np.float64) if "weights" in state else np.ones(len(logits))
        loss = log_loss(logits, labels, weights)
        metrics = {
            "auc": auc(logits, labels, weights),
            "log_loss": loss,
            "normalized_entropy": _ratio(loss, _base_entropy(labels, weights)),
            "calibration": _ratio(float(weights @ _sigmoid(logits)), float(weights @ labels)),
        }
        if "users" in state:
            metrics["user_auc"] = user_auc(logits, labels, weights, state["users"].numpy())
        return {**metrics, "samples": float(len(logits))}


def log_loss(logits: NDArray[np.floating], labels: Array, weights: Array) -> float:
    """Mean cross entropy: log(1 + e^-z) for a positive, log(1 + e^z) for a negative, in between their mean."""
    if np.isnan(logits).any():
        return float("nan")
    wrong_way = np.where(labels > 0.5, -logits, logits).astype(np.float64)
    other = np.minimum(labels, 1 - labels)  # of the rarer class; its share of the loss is less by the logit
    losses = np.logaddexp(0.0, wrong_way)
    losses -= np.multiply(other, wrong_way, out=np.zeros_like(losses), where=other > 0)
    return _ratio(float(weights @ losses), float(weights.sum()))


def auc(logits: NDArray[np.floating], labels: Array, weights: Array) -> float:
    """Area under the ROC curve."""
    if np.isnan(logits).any():
        return float("nan")
    order = np.argsort(logits, kind="stable")
    areas, _ = _areas(logits[order], labels[order], weights[order], np.zeros(len(order), np.int64))
    return float(areas[0]) if len(areas) else float("nan")


def user_auc(logits: NDArray[np.floating], labels: Array, weights: Array, users: NDArray[np.int64]) -> float:
    """Mean of the users' AUCs, each by the weight of its samples; users with one class only are left out."""
    if np.isnan(logits).any():
        return float("nan")
    order = np.lexsort((logits, users))
    areas, totals = _areas(logits[order], labels[order], weights[order], users[order])
    both = ~np.isnan(areas)
    return _ratio(float(areas[both] @ totals[both]), float(totals[both].sum()))


def _areas(
    logits: NDArray[np.floating], labels: Array, weights: Array, users: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Each user's AUC (NaN without both classes) and weight, from samples sorted by user, then by logit."""
    if len(logits) == 0:
        return np.empty(0), np.empty(0)
    starts_user = np.r_[True, users[1:] != users[:-1]]
    tie_starts = np.flatnonzero(starts_user | np.r_[True, logits[1:] != logits[:-1]])
    user_starts = np.flatnonzero(starts_user[tie_starts])  # counted in ties
    positive = np.add.reduceat(labels * weights, tie_starts)
    negative = np.add.reduceat((1 - labels) * weights, tie_starts)

    below = np.cumsum(negative) - negative
    user_of_tie = np.cumsum(starts_user[tie_starts]) - 1
    below -= below[user_starts][user_of_tie]
    won = np.add.reduceat(positive * (below + 0.5 * negative), user_starts)
    positives, negatives = np.add.reduceat(positive, user_starts), np.add.reduceat(negative, user_starts)
    pairs = positives * negatives
    areas = np.full(len(pairs), np.nan)
    np.divide(won, pairs, out=areas, where=pairs > 0)
    return areas, positives + negatives


def _base_entropy(labels: Array, weights: Array) -> float:
    """The log loss of always predicting the mean label; NaN without both classes."""
    classes = np.array([weights @ labels, weights @ (1 - labels)])
    if not classes.all():
        return float("nan")
    shares = classes / classes.sum()
    return float(-(shares @ np.log(shares)))


def _sigmoid(logits: NDArray[np.floating]) -> Array:
    z = logits.astype(np.float64)
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def _ratio(over: float, under: float) -> float:
    return over / under if under else float("nan")


def _kept(given: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the host, which the caller cannot change."""
    return given.detach().to("cpu", dtype, copy=True)
