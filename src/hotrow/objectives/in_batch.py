"""In-batch softmax: the items of a batch's other samples are its negatives; each rank has those of its own batch.

Logits are `[B, B]`. The same item in another sample is no negative: its logit is left out.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import ObjectiveInputs
from hotrow.objectives.retrieval import Retrieval, RetrievalSettings


class InBatchSoftmaxSettings(RetrievalSettings):
    """Which item of the batch is the sample's: cross entropy over its items."""

    name: Literal["in_batch_softmax"] = "in_batch_softmax"
    logq: bool = Field(True, description="logits are corrected by how likely each item is in a batch")

    def build(self, inputs: ObjectiveInputs) -> InBatchSoftmax:
        return InBatchSoftmax(self, inputs)


class InBatchSoftmax(Retrieval):
    """Mean cross entropy of each positive's item among the items of its batch."""

    settings: InBatchSoftmaxSettings

    def extras(self, batch: Batch) -> dict[str, Tensor]:
        keys = batch.keys(self.settings.item)
        return {"items": keys, **({"logq": self.log_chances(keys.numpy())} if self.settings.logq else {})}

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        user, item, keys = outputs["user"], outputs["item"], inputs.extras["items"]
        logits = user @ item.T / self.settings.temperature
        if self.settings.logq:
            logits = logits - inputs.extras["logq"]
        same = (keys[:, None] == keys).fill_diagonal_(False)
        right = torch.arange(len(keys), device=keys.device)
        return self.mean(F.cross_entropy(logits.masked_fill(same, -torch.inf), right, reduction="none"), inputs)
