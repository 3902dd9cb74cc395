"""`Retrieval`: what objectives have in common that bring users and items into one space, to find items for a user.

The model has two methods, each of which gets the rows of a batch and its dense inputs `[B, n]`, or None:

    user_vectors(rows, dense)    [B, D]: reads no row of the item
    item_vectors(rows, dense)    [B, D]: reads rows of the item alone; `dense` is None where items are encoded alone

An item's score is the product of the two. A sample whose label is above 0 is a positive, and so is every sample of a
log without labels; the others are no queries, though their items may be negatives. Metrics rank each positive's item
among all items of the training split (`retrieval_metrics`): their vectors, `N x D` floats on the run's device, are
made anew for every evaluation, on each rank.

logQ: what is drawn often is a negative often, so log(Q), the log of an item's chance to be drawn, is taken from its
logit, the right item's too (Yi et al., RecSys 2019). Q comes from the counts of items in the training split.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from hotrow.data.batch import Batch
from hotrow.data.labels import label_column, of_column
from hotrow.embedded import Embedded
from hotrow.errors import BatchError, HotrowError, NotFiniteError, SettingsError, nearest
from hotrow.objectives.catalogue import Catalogue, Keys
from hotrow.objectives.drawn import Draw
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.objective import BuiltIn, Encode, Objective, ObjectiveInputs
from hotrow.objectives.retrieval_metrics import MEASURES, RetrievalMetrics, ranks_of

_CHUNK = 4096
"""Items encoded at a time."""


class RetrievalSettings(BuiltIn):
    """What objectives for retrieval share."""

    item: str = Field("item", description="the feature whose key is the item: one key a sample")
    item_features: tuple[str, ...] = Field((), description="further features of an item that item_vectors reads")
    label: str = Field("", description="a sample is a positive where it is above 0; the only label if not given")
    temperature: float = Field(1.0, gt=0, description="scores are divided by it in the loss")
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (10, 50), min_length=1, description="metrics look at so many first items"
    )
    exclude: str = Field(
        "", description="a feature with keys of items that evaluation does not recommend again, as the history"
    )


class Retrieval(Objective):
    """Scores by vectors, and metrics over all items. A subclass says the loss."""

    of_samples: ClassVar[bool] = False
    measures_training: ClassVar[bool] = False
    measures_on_device: ClassVar[bool] = True

    def __init__(self, settings: RetrievalSettings, inputs: ObjectiveInputs) -> None:
        super().__init__(inputs)
        self.settings = settings
        self.watched = {f"{name}@{k}": "larger" for k in settings.k for name in MEASURES}
        self.item_side = (settings.item, *settings.item_features)
        self._table = self._feature("item", settings.item).table
        for name in settings.item_features:
            self._feature("item_features", name)
        if settings.exclude:
            self._of_items("exclude", settings.exclude)
        self._column = label_column(settings.label, inputs.labels) if inputs.labels or settings.label else None
        self._catalogue: Catalogue | None = None
        self._draws: Draw | None = None
        self._items: Tensor | None = None

    @property
    def catalogue(self) -> Catalogue:
        """The items of the training split; read when it is first needed."""
        if self._catalogue is None:
            if self.inputs.items is None:
                raise SettingsError(
                    "The objective needs the items there are and how often each is used, which a run reads from its "
                    "data set. In a loop of your own give them: ObjectiveInputs(..., items=...)."
                )
            self._catalogue = self.inputs.items(self.settings.item, self.settings.item_features)
        return self._catalogue

    def check(self, model: nn.Module) -> None:
        for name, what in (("user_vectors", "the user"), ("item_vectors", "the item")):
            if not callable(getattr(model, name, None)):
                raise SettingsError(
                    f"objective: the model {type(model).__name__} has no method {name}(rows, dense), which gives the "
                    f"vector of {what} of each sample, [B, D]. Write it, or choose another objective."
                )

    def outputs(self, model: Any, rows: Embedded, dense: Tensor | None) -> dict[str, Tensor]:
        user, item = model.user_vectors(rows, dense), model.item_vectors(rows, dense)
        if user.dim() != 2 or user.shape != item.shape:
            raise BatchError(
                f"user_vectors and item_vectors must both give [B, D], but they give {tuple(user.shape)} and "
                f"{tuple(item.shape)}."
            )
        return {"user": user, "item": item}

    def weight(self, batch: Batch) -> float:
        return float(self.weights(batch.labels, batch.weights, len(batch)).sum())

    def weights(self, labels: Tensor | None, weights: Tensor | None, samples: int) -> Tensor:
        """What each sample counts as a query: 0 where it is no positive."""
        if labels is None or self._column is None:
            return torch.ones(samples) if weights is None else weights
        positive = (of_column(labels, self._column) > 0).float()
        return positive if weights is None else positive * weights

    def mean(self, losses: Tensor, inputs: Inputs) -> Tensor:
        """The mean of `losses[B]` over positives."""
        weights = self.weights(inputs.labels, inputs.weights, len(losses)).to(losses.device)
        return (losses * weights).sum() / weights.sum().clamp(min=1e-12)

    def predict(self, outputs: Any) -> dict[str, Tensor]:
        return {"score": (outputs["user"] * outputs["item"]).sum(1)}

    def begin_evaluation(self, encode: Encode) -> None:
        items, made = self.catalogue, list[Tensor]()
        for first in range(0, len(items), _CHUNK):
            batch = items.batch(first, min(first + _CHUNK, len(items)))
            made.append(encode(batch, self.item_side, items_alone))
        self._items = torch.cat(made)
        if not bool(torch.isfinite(self._items).all()):
            raise NotFiniteError("item_vectors gives values that are no finite numbers: weights or rows are not.")

    def end_evaluation(self) -> None:
        self._items = None

    def metrics(self) -> RetrievalMetrics:
        return RetrievalMetrics(self.settings.k)

    def measure(self, metrics: RetrievalMetrics, outputs: Any, batch: Batch) -> None:
        if self._items is None:
            raise HotrowError("All items are encoded before samples are measured: call begin_evaluation.")
        users, device = outputs["user"], self._items.device
        weights = self.weights(batch.labels, batch.weights, len(batch))
        positive = torch.nonzero(weights > 0).squeeze(1)
        places = torch.from_numpy(self.catalogue.find(batch.keys(self.settings.item).numpy()))[positive]
        excluded = self._excluded(batch, positive) if self.settings.exclude else None
        if excluded is not None:
            excluded = (excluded[0].to(device), excluded[1].to(device))
        asked = users.to(device)[positive.to(device)]
        ranks = ranks_of(asked, self._items, places.clamp(min=0).to(device), excluded)
        metrics.update(ranks, weights[positive], places < 0)

    def _excluded(self, batch: Batch, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these samples have which items of the catalogue in the feature to exclude."""
        bags = batch.expand()[self.settings.exclude]
        of = torch.repeat_interleave(torch.arange(len(batch)), bags.lengths)
        number = torch.full((len(batch),), -1)
        number[samples] = torch.arange(len(samples))
        places = torch.from_numpy(self.catalogue.find(bags.values.numpy()))
        there = (places >= 0) & (number[of] >= 0)
        return number[of][there], places[there]

    def log_chances(self, keys: Keys, draws: int | None = None) -> Tensor:
        """log(Q) of items in a batch: of being a sample's item, or of being that of one of so many samples."""
        share = self.catalogue.counted(keys) / max(int(self.catalogue.counts.sum()), 1)
        if draws is not None:
            share = -np.expm1(draws * np.log1p(-np.minimum(share, 1 - 1e-12)))
        return torch.from_numpy(np.log(share).astype(np.float32))

    def drawing(self, alpha: float) -> Draw:
        """Draws negatives."""
        if self._draws is None:
            self._draws = Draw(self.catalogue, alpha, self.inputs.seed, self.inputs.rank)
        return self._draws

    def _feature(self, setting: str, name: str) -> Any:
        for feature in self.inputs.features:
            if feature.name == name:
                return feature
        known = [feature.name for feature in self.inputs.features]
        raise SettingsError(f'objective.{setting}: the data set has no feature "{name}".{nearest(name, known)}')

    def _of_items(self, setting: str, name: str) -> None:
        table = self._feature(setting, name).table
        if table != self._table:
            raise SettingsError(
                f'objective.{setting}: the keys of feature {name} are those of table "{table}", not of items, whose '
                f'table is "{self._table}".'
            )


def items_alone(model: Any, rows: Embedded) -> Tensor:
    """What a model makes of items by themselves."""
    found: Tensor = model.item_vectors(rows, None)
    return found
