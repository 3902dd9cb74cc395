"""Ranking models, a file each. `Model` is what a run file's model table may be; `build` makes it."""

from typing import Annotated

from pydantic import Field

from hotrow.models.dcnv2 import DCNv2, DCNv2Settings
from hotrow.models.deepfm import DeepFM, DeepFMSettings
from hotrow.models.din import DIN, DINSettings
from hotrow.models.dlrm import DLRM, DLRMSettings
from hotrow.models.graph import GraphModel, GraphSettings
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel
from hotrow.models.transformer import Transformer, TransformerSettings
from hotrow.models.wide_deep import WideDeep, WideDeepSettings

__all__ = [
    "DIN",
    "DLRM",
    "DCNv2",
    "DCNv2Settings",
    "DINSettings",
    "DLRMSettings",
    "DeepFM",
    "DeepFMSettings",
    "GraphModel",
    "GraphSettings",
    "Model",
    "ModelInputs",
    "ModelSettings",
    "RankingModel",
    "Transformer",
    "TransformerSettings",
    "WideDeep",
    "WideDeepSettings",
    "build",
]

Model = Annotated[
    DLRMSettings
    | DCNv2Settings
    | DeepFMSettings
    | WideDeepSettings
    | DINSettings
    | TransformerSettings
    | GraphSettings,
    Field(discriminator="name"),
]


def build(settings: ModelSettings, inputs: ModelInputs) -> RankingModel:
    """The model that `settings` describe, with fresh weights from torch's generator."""
    return settings.build(inputs)
