"""`Losses`: the sum of losses since the last line of metrics, kept where the model runs.

A step never asks a GPU how far it is: the sum is read when it is logged, kept in a checkpoint, or shown, once a second
at most. So a GPU's loss that is no number is found at the next line of metrics, or before the next checkpoint
(`finite`). Which step's it was the device counts meanwhile: how many steps left the sum a finite number.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import Tensor

from hotrow.train.finite import mean_loss
from hotrow.train.ranks import Ranks
from hotrow.train.state import State

_SHOWN_EVERY = 1.0
"""Seconds between two looks at the loss of a GPU, for whoever is watching."""


class Losses:
    """Adds up losses by weight. `state.loss` and `state.count` are what a checkpoint keeps of it."""

    def __init__(self, state: State, ranks: Ranks) -> None:
        self._state, self._ranks = state, ranks
        self._sum = torch.tensor(state.loss, dtype=torch.float64, device=ranks.device)
        self._good = torch.zeros((), dtype=torch.int64, device=ranks.device)  # steps since `_since` with a finite sum
        self._since = state.step
        self._held: list[tuple[Tensor, float]] = []  # batches whose step is not made yet
        self.last: Tensor | None = None
        self._shown: float | None = None
        self._shown_at = -math.inf

    def add(self, loss: Tensor, weight: float, *, closes: bool = True) -> None:
        """A batch's, which counts with the step that it is part of; `closes` where that is made with it."""
        self.last = loss
        self._held.append((loss.detach(), weight))
        if not closes:
            return
        for value, counted in self._held:
            self._state.count += counted
            self._sum.add_(value, alpha=counted)
        self._held.clear()
        self._good.add_(self._sum - self._sum == 0)

    def forget(self) -> None:
        """Lets go of batches whose step is not made."""
        self._held.clear()

    def shown(self) -> float | None:
        """The mean since the last line of metrics; from a GPU one that may be a second old."""
        if self._ranks.device.type == "cpu" or time.monotonic() - self._shown_at >= _SHOWN_EVERY:
            self._shown = float(self._sum) / max(self._state.count, 1e-12)
            self._shown_at = time.monotonic()
        return self._shown

    def sums(self, latest: Path | None) -> tuple[float, float]:
        """Sum and weight over all ranks; refuses a sum that is not finite."""
        loss, count = self._ranks.sums(float(self._sum), self._state.count)
        mean_loss(loss, count, self._first_bad(loss), latest)
        return loss, count

    def mean(self, latest: Path | None) -> float:
        """The mean over all ranks, which begins anew; refuses one that is not finite."""
        loss, count = self.sums(latest)
        self._sum.zero_()
        self._state.count = 0.0
        self._good.zero_()
        self._since = self._state.step
        return loss / count if count else math.nan

    def _first_bad(self, loss: float) -> int:
        """The first step whose loss is no finite number, on this rank; the last step where there is none."""
        first = self._since + int(self._good) + 1
        return self._state.step if math.isfinite(loss) else min(first, self._state.step)
