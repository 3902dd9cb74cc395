"""Nothing that is not finite gets into a checkpoint.

A loss is read when metrics are logged and before a checkpoint is cut, the dense weights when they are copied for one,
rows and their optimizer state as they are written (`store.snapshot`): in the thread that writes, at 4% of what hashing
them costs. So a run that diverges ends with its last good checkpoints, and can go on from them with lower rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hotrow.errors import NotFiniteError

REMEDY = (
    "Lower the learning rates, or bound gradients by optimizer.clip_norm and tables.optimizer.clip_norm; both may "
    "change when a run is resumed."
)


def mean_loss(loss: float, count: float, step: int, latest: Path | None) -> float:
    """The mean of a sum of losses, NaN if they weigh nothing; refuses a sum that is not finite."""
    if not math.isfinite(loss):
        raise NotFiniteError(
            f"The loss was {loss / (count or 1.0)} at step {step}: training does not converge. {REMEDY} {left(latest)}"
        )
    return loss / count if count else math.nan


def check_dense(arrays: Mapping[str, Tensor], step: int, latest: Path | None) -> None:
    """Refuses dense weights, and state of their optimizer, that are not finite."""
    for name, array in arrays.items():
        if array.is_floating_point() and not bool(torch.isfinite(array).all()):
            raise NotFiniteError(
                f"{name} held values that are not finite at step {step}: training does not converge. {REMEDY} "
                f"{left(latest)}"
            )


def left(latest: Path | None) -> str:
    """What there is to go on from."""
    if latest is None:
        return "There is no checkpoint yet."
    return (
        f"The last checkpoint is {latest}; if values in it have grown too far already, remove it, and the run goes on "
        f"from the one before."
    )
