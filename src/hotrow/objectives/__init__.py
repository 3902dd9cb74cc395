"""What a run trains towards, a file each. `ObjectiveSettings` is what a run file's [objective] may be."""

from typing import Annotated

from pydantic import Discriminator, Tag

from hotrow.objectives.binary import Binary, BinarySettings
from hotrow.objectives.catalogue import Catalogue
from hotrow.objectives.in_batch import InBatchSoftmax, InBatchSoftmaxSettings
from hotrow.objectives.metric import Metric, OwnMetric
from hotrow.objectives.multi_task import MultiTask, MultiTaskSettings
from hotrow.objectives.next_item import NextItem, NextItemSettings
from hotrow.objectives.objective import Better, Metrics, Objective, ObjectiveInputs, OwnObjective, one_output
from hotrow.objectives.regression import Regression, RegressionSettings
from hotrow.objectives.retrieval import Retrieval
from hotrow.objectives.sampled import SampledSoftmax, SampledSoftmaxSettings
from hotrow.own import TAG, tag_of

__all__ = [
    "Better",
    "Binary",
    "BinarySettings",
    "Catalogue",
    "InBatchSoftmax",
    "InBatchSoftmaxSettings",
    "Metric",
    "Metrics",
    "MultiTask",
    "MultiTaskSettings",
    "NextItem",
    "NextItemSettings",
    "Objective",
    "ObjectiveInputs",
    "ObjectiveSettings",
    "OwnMetric",
    "OwnObjective",
    "Regression",
    "RegressionSettings",
    "Retrieval",
    "SampledSoftmax",
    "SampledSoftmaxSettings",
    "one_output",
]

ObjectiveSettings = Annotated[
    Annotated[BinarySettings, Tag("binary")]
    | Annotated[RegressionSettings, Tag("regression")]
    | Annotated[MultiTaskSettings, Tag("multi_task")]
    | Annotated[InBatchSoftmaxSettings, Tag("in_batch_softmax")]
    | Annotated[SampledSoftmaxSettings, Tag("sampled_softmax")]
    | Annotated[NextItemSettings, Tag("next_item")]
    | Annotated[OwnObjective, Tag(TAG)],
    Discriminator(tag_of),
]
