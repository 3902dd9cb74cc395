"""Hotrow trains recommendation models whose embedding tables are far larger than the model around them.

The names here are loaded when they are first used: `import hotrow` and `hotrow --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotrow.errors import HotrowError

if TYPE_CHECKING:
    from hotrow.data.batch import Batch, Group, Jagged
    from hotrow.embedded import Embedded, JaggedRows
    from hotrow.embeddings import Embeddings
    from hotrow.models.model import ModelInputs
    from hotrow.objectives.objective import Objective, ObjectiveInputs
    from hotrow.predictor import Predictor
    from hotrow.run import Run
    from hotrow.table import Feature, Table
    from hotrow.train.hooks import Flags, Hook, StepEvent
    from hotrow.train.policies import open_pipeline
    from hotrow.train.ready import Ready
    from hotrow.train.step import Step
    from hotrow.train.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Batch": "data.batch",
    "Embedded": "embedded",
    "Embeddings": "embeddings",
    "Feature": "table",
    "Flags": "train.hooks",
    "Group": "data.batch",
    "Hook": "train.hooks",
    "Jagged": "data.batch",
    "JaggedRows": "embedded",
    "ModelInputs": "models.model",
    "Objective": "objectives.objective",
    "ObjectiveInputs": "objectives.objective",
    "Predictor": "predictor",
    "Ready": "train.ready",
    "Run": "run",
    "Step": "train.step",
    "StepEvent": "train.hooks",
    "Table": "table",
    "Trainer": "train.trainer",
    "open_pipeline": "train.policies",
}

__all__ = [
    "Batch",
    "Embedded",
    "Embeddings",
    "Feature",
    "Flags",
    "Group",
    "Hook",
    "HotrowError",
    "Jagged",
    "JaggedRows",
    "ModelInputs",
    "Objective",
    "ObjectiveInputs",
    "Predictor",
    "Ready",
    "Run",
    "Step",
    "StepEvent",
    "Table",
    "Trainer",
    "open_pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hotrow.{_HOME[name]}"), name)
