"""Models, a file each. `Model` is what a run file's [model] may be; `build` makes it."""

from typing import Annotated

from pydantic import Discriminator, Tag
from torch import nn

from hotrow.models.dcnv2 import DCNv2, DCNv2Settings
from hotrow.models.deepfm import DeepFM, DeepFMSettings
from hotrow.models.din import DIN, DINSettings
from hotrow.models.dlrm import DLRM, DLRMSettings
from hotrow.models.graph import GraphModel, GraphSettings
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel
from hotrow.models.own import OwnModel
from hotrow.models.transformer import Transformer, TransformerSettings
from hotrow.models.wide_deep import WideDeep, WideDeepSettings
from hotrow.own import TAG, tag_of

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
    "OwnModel",
    "RankingModel",
    "Transformer",
    "TransformerSettings",
    "WideDeep",
    "WideDeepSettings",
    "build",
]

Model = Annotated[
    Annotated[DLRMSettings, Tag("dlrm")]
    | Annotated[DCNv2Settings, Tag("dcnv2")]
    | Annotated[DeepFMSettings, Tag("deepfm")]
    | Annotated[WideDeepSettings, Tag("wide_deep")]
    | Annotated[DINSettings, Tag("din")]
    | Annotated[TransformerSettings, Tag("transformer")]
    | Annotated[GraphSettings, Tag("graph")]
    | Annotated[OwnModel, Tag(TAG)],
    Discriminator(tag_of),
]


def build(settings: ModelSettings | OwnModel, inputs: ModelInputs) -> nn.Module:
    """The model that `settings` describe, with fresh weights from torch's generator."""
    return settings.build(inputs)
