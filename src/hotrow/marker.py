"""`Marker`: what a state dict says of rows, which it does not hold.

A table has more rows than a state dict should, so `Embeddings` put a mark there instead: the step, and which
embeddings they are. Loaded where the rows are others, the weights would be beside rows that they were not trained with:
then nothing reads or trains a row until the right ones are restored. Weights and rows may be loaded in either order.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hotrow.errors import CheckpointError


class Marker:
    """Which rows some embeddings have, and which ones the weights loaded last belong to."""

    def __init__(self, seed: int) -> None:
        self._start = seed % 2**62
        self._own = int.from_bytes(os.urandom(7), "little")
        self._restored: int | None = None
        self._wanted: int | None = None

    def of(self, step: int) -> Tensor:
        """What a state dict of this step holds; a tensor, as other files of weights take nothing else."""
        return torch.tensor([step, self._own, self._start])

    def loaded(self, state: Tensor, step: int) -> None:
        """Weights came with this mark, while rows are at `step`."""
        wanted, whose, start = state.tolist()
        same = whose == self._own or self._restored == step or (step == 0 and start == self._start)
        self._wanted = None if same and wanted == step else wanted

    def restored(self, step: int) -> None:
        """Rows are now those of a snapshot at `step`."""
        self._restored = step
        if self._wanted == step:
            self._wanted = None

    def check(self, step: int) -> None:
        """Raises where rows are not those of the weights that were loaded."""
        if self._wanted is None:
            return
        raise CheckpointError(
            f"load_state_dict brought weights of step {self._wanted}, but a state dict has no rows, and those here, of "
            f"step {step}, are not the ones that were trained with these weights. Bring them with restore(folder), "
            f"from the snapshot(folder) that was taken at step {self._wanted}. To use the weights with the rows that "
            f'are here, load the state dict without its key "..._extra_state" and with strict=False.'
        )
