"""Sampled softmax: each sample's item against items drawn for the batch, the same ones for all its samples.

Logits are `[B, 1 + negatives]`. A draw that is the sample's own item is left out. What is drawn follows from seed,
step and rank, so a resumed run draws the same.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded
from hotrow.objectives.drawn import Draw, apart, twin, twins, with_items
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import ObjectiveInputs
from hotrow.objectives.retrieval import Retrieval, RetrievalSettings
from hotrow.table import Feature


class SampledSoftmaxSettings(RetrievalSettings):
    """Which item is the sample's, among items drawn."""

    name: Literal["sampled_softmax"] = "sampled_softmax"
    logq: bool = Field(True, description="logits are corrected by how likely each item is drawn")
    negatives: int = Field(1024, ge=1, description="items drawn for a batch")
    alpha: float = Field(0.75, ge=0, le=1, description="drawn by count ** alpha in the training split; 0: all alike")

    def build(self, inputs: ObjectiveInputs) -> SampledSoftmax:
        return SampledSoftmax(self, inputs)


class SampledSoftmax(Retrieval):
    """Mean cross entropy of each positive's item among it and those drawn."""

    settings: SampledSoftmaxSettings

    def features(self) -> list[Feature]:
        return twins(self.inputs.features, self.item_side)

    def prepare(self, batch: Batch, step: int) -> Batch:
        return with_items(batch, self.catalogue, self._draw.places(step, self.settings.negatives))

    def extras(self, batch: Batch) -> dict[str, Tensor]:
        keys, drawn = batch.keys(self.settings.item), batch[twin(self.settings.item)].values
        found = {"items": keys, "drawn": drawn}
        if self.settings.logq:
            found["logq"] = self._draw.log_chances(keys.numpy())
            found["drawn_logq"] = self._draw.log_chances(drawn.numpy())
        return found

    def outputs(self, model: Any, rows: Embedded, dense: Tensor | None) -> dict[str, Tensor]:
        own, drawn = apart(rows)
        found = super().outputs(model, own, dense)
        return found if drawn is None else {**found, "drawn": model.item_vectors(drawn, None)}

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        user, extras, temperature = outputs["user"], inputs.extras, self.settings.temperature
        right = (user * outputs["item"]).sum(1, keepdim=True) / temperature
        others = user @ outputs["drawn"].T / temperature
        if self.settings.logq:
            right, others = right - extras["logq"][:, None], others - extras["drawn_logq"]
        others = others.masked_fill(extras["items"][:, None] == extras["drawn"], -torch.inf)
        first = torch.zeros(len(user), dtype=torch.int64, device=user.device)
        return self.mean(F.cross_entropy(torch.cat([right, others], 1), first, reduction="none"), inputs)

    @property
    def _draw(self) -> Draw:
        return self.drawing(self.settings.alpha)
