"""`Inputs`: what a step takes of a batch besides rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hotrow.data.batch import Batch

_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Inputs:
    """`dense[B, n]`, `labels` `[B]` or `[B, L]`, `weights[B]`, each or None; `extras` are what an objective asked for.

    They are pinned in the background where they go to a GPU, so that sending them waits for nobody.
    """

    dense: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=lambda: _NONE)

    @staticmethod
    def of(batch: Batch, extras: Mapping[str, Tensor] = _NONE) -> Inputs:
        return Inputs(batch.dense, batch.labels, batch.weights, extras)

    def pinned(self) -> Inputs:
        """The same in memory that a GPU can read by itself."""
        return self._each(lambda t: t.pin_memory())

    def to(self, device: torch.device) -> Inputs:
        """The same on `device`; from pinned memory nobody waits for the copy."""
        if device.type == "cpu":
            return self
        return self._each(lambda t: t.to(device, non_blocking=True))

    def _each(self, change: Any) -> Inputs:
        dense, labels, weights = (None if t is None else change(t) for t in (self.dense, self.labels, self.weights))
        return Inputs(dense, labels, weights, {name: change(t) for name, t in self.extras.items()})
