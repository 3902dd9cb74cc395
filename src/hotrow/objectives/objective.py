"""`Objective`: what a run trains towards: the loss, what is predicted, and the metrics. Made from [objective].

The base says what most objectives share; a subclass overrides what differs. A subclass of the user's own is named in
the run file, `name = "package.module:Class"`, or passed to `Trainer`. It is made as `Class(settings, inputs)` where it
has a `Settings`, a pydantic model or a dataclass, and as `Class(inputs)` otherwise.

`prepare` and `extras` run ahead of the model in the thread that reads; all else runs where the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from hotrow.data.batch import Batch
from hotrow.data.schema import Schema
from hotrow.embedded import Embedded
from hotrow.errors import SettingsError
from hotrow.objectives.catalogue import Catalogue
from hotrow.objectives.inputs import Inputs
from hotrow.own import OwnClass
from hotrow.settings import Settings
from hotrow.table import Feature

Better = Literal["larger", "smaller"]
Outputs = Tensor | Mapping[str, Tensor]
"""What a model gives: one tensor, or several by name. The objective reads them."""


Encode = Callable[[Batch, Sequence[str], Callable[[Any, Embedded], Tensor]], Tensor]
"""What a function makes of the model and of some features' rows of a batch, without gradients, on the device."""


@dataclass(frozen=True)
class ObjectiveInputs:
    """What an objective may use: the features, which labels a sample has, and the seed of what it draws.

    `numbers` are those of the labels that may be any number; the others are from 0 to 1.
    `rank` is this process's among those that train. `items` reads the items of the training split: those of one
    feature, with further features of theirs. None where there is no data set, as in a `Predictor`.
    """

    features: Sequence[Feature]
    labels: tuple[str, ...]
    seed: int = 0
    numbers: tuple[str, ...] = ()
    rank: int = 0
    items: Callable[[str, Sequence[str]], Catalogue] | None = None

    @staticmethod
    def of(features: Sequence[Feature], schema: Schema, seed: int) -> ObjectiveInputs:
        """For samples of a schema."""
        numbers = tuple(label.name for label in schema.label_columns if label.kind == "number")
        return ObjectiveInputs(features, schema.label_names, seed, numbers)


class Metrics(Protocol):
    """Accumulates what was predicted, over any number of batches and ranks, and gives each metric by name."""

    def state(self) -> dict[str, Tensor]:
        """All so far as tensors, to be sent to another rank."""

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another rank saw."""

    def compute(self) -> dict[str, float]:
        """Every metric by name."""


class Objective:
    """A mean over samples of what `loss` says; reads one label."""

    watched: Mapping[str, Better] = MappingProxyType({})
    """The metrics that early stopping may go by, and which is better. The first is what it goes by unless told."""
    of_samples: ClassVar[bool] = True
    """Whether the loss is a mean over samples, each by its weight. Then ranks know what to divide by beforehand.

    False in a subclass that has a `weight` of its own, unless it says otherwise.
    """

    measures_training: ClassVar[bool] = True
    """Whether `measure` takes what a model gave in a step of training, as `data.follow.evaluate_every` needs it."""
    measures_on_device: ClassVar[bool] = False
    """Whether `measure` takes outputs where the model gave them; else it gets them in this process's memory."""

    def __init__(self, inputs: ObjectiveInputs) -> None:
        self.inputs = inputs

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "weight" in vars(cls) and "of_samples" not in vars(cls):
            cls.of_samples = False

    @property
    def outputs_per_sample(self) -> int:
        """How many numbers a sample a built-in model is to give."""
        return 1

    def check(self, model: nn.Module) -> None:
        """Raises `SettingsError` where the model lacks what this objective needs. Comes before anything starts."""

    def features(self) -> list[Feature]:
        """Features that are looked up besides those of the data set; `prepare` puts them into batches."""
        return []

    def prepare(self, batch: Batch, step: int) -> Batch:
        """The batch with what is drawn for it: by seed and step, so that a resumed run draws the same.

        With `train.accumulate` several batches make a step, and `step` is the number of the batch.
        """
        return batch

    def extras(self, batch: Batch) -> dict[str, Tensor]:
        """What the loss needs of a batch besides labels and weights, as `inputs.extras`."""
        return {}

    def outputs(self, model: Any, rows: Embedded, dense: Tensor | None) -> Outputs:
        """What the model gives for samples."""
        found: Outputs = model(rows, dense)
        return found

    def weight(self, batch: Batch) -> float:
        """What the loss is a mean over: the batch's samples, each by its weight."""
        return float(len(batch) if batch.weights is None else batch.weights.sum())

    def loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        """The mean loss of a batch, a scalar."""
        raise NotImplementedError

    def predict(self, outputs: Any) -> dict[str, Tensor]:
        """What a user is told of each sample, by name: a chance, a rating."""
        raise NotImplementedError

    def begin_evaluation(self, encode: Encode) -> None:
        """Before the samples of a split are measured; every rank does it."""

    def end_evaluation(self) -> None:
        """After the last of them."""

    def metrics(self) -> Metrics:
        """Metrics of no sample yet."""
        raise NotImplementedError

    def measure(self, metrics: Any, outputs: Any, batch: Batch) -> None:
        """Adds a batch to metrics."""
        raise NotImplementedError


class OwnObjective(OwnClass):
    """A class of your own, made from `hotrow.Objective`. Its own settings stand beside its name."""

    what: ClassVar[str] = "objective"
    base: ClassVar[type] = Objective

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """The objective."""
        made: Objective = self.make(inputs)
        return made


class BuiltIn(Settings):
    """The base of the settings of Hotrow's own objectives."""

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """The objective."""
        raise NotImplementedError


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of samples' losses, each by its weight."""
    if weights is None:
        return losses.mean()
    return (losses * weights).sum() / weights.sum().clamp(min=1e-12)


def one_output(outputs: Any, what: str) -> Tensor:
    """The model's one output, `[B]`; refuses several."""
    if isinstance(outputs, Tensor):
        if outputs.dim() == 1:
            return outputs
        raise SettingsError(f"{what} needs one number a sample, [B], and the model gives {tuple(outputs.shape)}.")
    names = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
    raise SettingsError(f"{what} needs one tensor [B] from the model, which gives {names}.")


def one_each(outputs: Any, labels: Tensor, what: str) -> Tensor:
    """The model's one output, a number for each label; what torch would spread over all samples is refused."""
    found = one_output(outputs, what)
    if found.shape != labels.shape:
        raise SettingsError(
            f"{what} needs one number a sample, [{len(labels)}] for this batch, and the model gives "
            f"{tuple(found.shape)}."
        )
    return found
