"""Next item: after each item of a history the next one is to be found, after the last one the sample's own.

A model of sequences gives `user_vectors`, from the whole history; with a third method it learns from every position:

    position_vectors(rows, dense)    [B, T, D]: as `JaggedRows.padded` has them, position t of a sample having seen the
                                     items up to the t-th of its last T

Without it only the sample's own item is learned. A sample's loss is the mean over its positions, 0 where it has none.
A position whose next item is no item of the training split is left out: it would never be recommended.

The right item stands against all other right ones of the batch, each once (`negatives = 0`, logits `positions x
items`), or against items drawn for the batch, as in sampled softmax. logQ is the log of an item's chance to be there.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded
from hotrow.errors import BatchError
from hotrow.objectives.catalogue import Keys
from hotrow.objectives.drawn import Draw, apart, twin, twins, with_items
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import ObjectiveInputs
from hotrow.objectives.retrieval import Retrieval, RetrievalSettings
from hotrow.table import Feature


class NextItemSettings(RetrievalSettings):
    """Which item comes next in a history, and after it."""

    name: Literal["next_item"] = "next_item"
    history: str = Field("history", description="the feature with the keys of items that came before, oldest first")
    logq: bool = Field(True, description="logits are corrected by how likely each item is a negative")
    negatives: int = Field(0, ge=0, description="items drawn for a batch; 0: the batch's own items are the negatives")
    alpha: float | None = Field(
        None, ge=0, le=1, description="drawn by count ** alpha in the training split; 0.75 if not given"
    )

    @model_validator(mode="after")
    def _draws(self) -> NextItemSettings:
        if self.alpha is not None and not self.negatives:
            raise ValueError("alpha says how negatives are drawn, and none are; set negatives, or take alpha away")
        return self

    def build(self, inputs: ObjectiveInputs) -> NextItem:
        return NextItem(self, inputs)


class NextItem(Retrieval):
    """Mean cross entropy of the next item at each position."""

    settings: NextItemSettings

    def __init__(self, settings: NextItemSettings, inputs: ObjectiveInputs) -> None:
        super().__init__(settings, inputs)
        self._of_items("history", settings.history)
        self._everywhere = False

    def check(self, model: nn.Module) -> None:
        super().check(model)
        self._everywhere = callable(getattr(model, "position_vectors", None))

    def features(self) -> list[Feature]:
        return twins(self.inputs.features, self.item_side)

    def prepare(self, batch: Batch, step: int) -> Batch:
        places = self.catalogue.find(np.unique(self._next(batch)[0]))
        places = places[places >= 0]
        if self.settings.negatives:
            places = np.concatenate([places, self._draw.places(step, self.settings.negatives)])
        return with_items(batch, self.catalogue, places if len(places) else np.zeros(1, np.int64))

    def extras(self, batch: Batch) -> dict[str, Tensor]:
        keys = batch[twin(self.settings.item)].values
        right = keys[: len(keys) - self.settings.negatives].numpy()
        following, lengths = self._next(batch)
        at = np.searchsorted(right, following).clip(max=max(len(right) - 1, 0))
        known = right[at] == following if len(right) else np.zeros(len(following), np.bool_)
        found = {"candidates": keys, "next": torch.from_numpy(np.where(known, at, -1)), "lengths": lengths}
        if not self.settings.logq:
            return found
        drawn, samples = self.settings.negatives, int(known.sum())
        logq = self._draw.log_chances(keys.numpy()) if drawn else self.log_chances(keys.numpy(), max(samples, 1))
        return {**found, "logq": logq}

    def outputs(self, model: Any, rows: Embedded, dense: Tensor | None) -> dict[str, Tensor]:
        own, candidates = apart(rows)
        if candidates is None:
            return super().outputs(model, own, dense)
        if not self._everywhere:
            positions = model.user_vectors(own, dense)[:, None]
        elif (positions := model.position_vectors(own, dense)).dim() != 3:
            raise BatchError(f"position_vectors must give [B, T, D], but it gives {tuple(positions.shape)}.")
        return {"positions": positions, "candidates": model.item_vectors(candidates, None)}

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        positions, candidates = outputs["positions"], outputs["candidates"]
        targets = _aligned(inputs.extras["next"], inputs.extras["lengths"], positions.shape[1])
        there = targets >= 0
        each = self._losses(positions[there], candidates, targets[there], inputs)
        losses = positions.new_zeros(targets.shape).masked_scatter(there, each)
        return self.mean(losses.sum(1) / there.sum(1).clamp(min=1), inputs)

    def _losses(self, vectors: Tensor, candidates: Tensor, right: Tensor, inputs: Inputs) -> Tensor:
        """Cross entropy of each position, whose item is candidate `right`."""
        keys, logq = inputs.extras["candidates"], inputs.extras.get("logq", candidates.new_zeros(len(candidates)))
        if not self.settings.negatives:
            logits = vectors @ candidates.T / self.settings.temperature - logq
            return F.cross_entropy(logits, right, reduction="none")
        first = len(candidates) - self.settings.negatives
        own = (vectors * candidates[right]).sum(1) / self.settings.temperature - logq[right]
        others = vectors @ candidates[first:].T / self.settings.temperature - logq[first:]
        others = others.masked_fill(keys[right][:, None] == keys[first:], -torch.inf)
        return torch.logsumexp(torch.cat([own[:, None], others], 1), 1) - own

    def _next(self, batch: Batch) -> tuple[Keys, Tensor]:
        """The key that follows each position, sample after sample, and how many positions each sample has."""
        items = batch.keys(self.settings.item)
        if not self._everywhere:
            return items.numpy(), torch.ones(len(items), dtype=torch.int64)
        bags = batch.group_of(self.settings.history).expand()[self.settings.history]
        following = torch.roll(bags.values, -1)
        some = bags.lengths > 0
        following[bags.offsets[1:][some] - 1] = items[some]
        return following.numpy(), bags.lengths

    @property
    def _draw(self) -> Draw:
        return self.drawing(0.75 if self.settings.alpha is None else self.settings.alpha)


def _aligned(values: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The last `width` of each sample's values, `[B, width]`, from the left; -1 behind their end."""
    kept = lengths.clamp(max=width)
    places = torch.arange(width, device=lengths.device)
    at = (lengths.cumsum(0) - kept)[:, None] + places
    padded = torch.cat([values, values.new_full((1,), -1)])
    return padded[torch.where(places < kept[:, None], at, len(values))]
