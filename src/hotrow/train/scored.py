"""`Scored`: metrics of samples that were scored before they were trained on: progressive validation of a growing log.

Every batch of a log that is followed is new, so what the model says of it before it learns from it is an honest test,
and it needs no split. The predictions are those of the training step's own forward, which costs nothing more: with the
rows as this step fetched them, so as stale as the policy lets them be, and with the model as it trains, dropout
included. A model with much dropout therefore looks worse here than it answers.

Metrics are of windows of whole batches, so many samples or a few more each; the metrics of a window that is not full
are in every checkpoint, so a run that is killed and resumed writes the same lines. On a GPU each step is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.objectives.measures import Together, below, on_host

_ARRAYS = "feed/scored/"


class Scored:
    """The window at hand. `made` makes metrics of no sample yet; `names` says which they are."""

    def __init__(self, made: Callable[[], Together], every: int, names: list[str]) -> None:
        self._made, self._every, self._names = made, every, names
        self._metrics, self._samples = made(), 0

    def add(self, outputs: Any, batch: Batch) -> dict[str, float] | None:
        """Adds a batch; the metrics of the window if it is full with it."""
        self._metrics.update(on_host(outputs), batch)
        self._samples += len(batch)
        if self._samples < self._every:
            return None
        found = self._metrics.compute()
        self._metrics, self._samples = self._made(), 0
        return found

    def state(self) -> dict[str, Any]:
        """What JSON can say of the window."""
        return {"samples": self._samples, "metrics": self._names}

    def arrays(self) -> dict[str, Tensor]:
        """What it has seen."""
        return {f"{_ARRAYS}{name}": tensor.clone() for name, tensor in self._metrics.state().items()}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        """Goes on with the window of a checkpoint; with other metrics than it had a window begins anew."""
        self._metrics, self._samples = self._made(), 0
        if state.get("samples") and state["metrics"] == self._names:
            self._metrics.merge(below(_ARRAYS, arrays))
            self._samples = state["samples"]
