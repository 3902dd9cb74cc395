"""Hotrow trains recommendation models whose embedding tables are far larger than the model around them.

The names here are loaded when they are first used: `import hotrow` and `hotrow --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotrow.errors import HotrowError

if TYPE_CHECKING:
    from hotrow.data import DataSet, Reader, Schema
    from hotrow.data.batch import Batch, Group, Jagged
    from hotrow.data.prepare import prepare
    from hotrow.embedded import Embedded, JaggedRows, expand
    from hotrow.embeddings import Embeddings
    from hotrow.models.model import ModelInputs
    from hotrow.objectives.metric import Metric
    from hotrow.objectives.objective import Objective, ObjectiveInputs
    from hotrow.plan import Link, Plan, Share, Topology
    from hotrow.plan.shard import shard
    from hotrow.plan.zipf import Zipf
    from hotrow.policy import Bounded, Exact, Hybrid, Sync
    from hotrow.predictor import Predictor
    from hotrow.run import Run
    from hotrow.service.local import ShardProcess
    from hotrow.store.optimizers import SGD, Adagrad, Adam, Momentum, RowWiseAdagrad
    from hotrow.table import Feature, Table
    from hotrow.train.hooks import Flags, Hook, StepEvent
    from hotrow.train.policies import open_pipeline
    from hotrow.train.ready import Ready
    from hotrow.train.step import Step
    from hotrow.train.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Adagrad": "store.optimizers",
    "Adam": "store.optimizers",
    "Batch": "data.batch",
    "Bounded": "policy",
    "DataSet": "data",
    "Embedded": "embedded",
    "Embeddings": "embeddings",
    "Exact": "policy",
    "Feature": "table",
    "Flags": "train.hooks",
    "Group": "data.batch",
    "Hook": "train.hooks",
    "Hybrid": "policy",
    "Jagged": "data.batch",
    "JaggedRows": "embedded",
    "Link": "plan",
    "Metric": "objectives.metric",
    "ModelInputs": "models.model",
    "Momentum": "store.optimizers",
    "Objective": "objectives.objective",
    "ObjectiveInputs": "objectives.objective",
    "Plan": "plan",
    "Predictor": "predictor",
    "Reader": "data",
    "Ready": "train.ready",
    "RowWiseAdagrad": "store.optimizers",
    "Run": "run",
    "SGD": "store.optimizers",
    "Schema": "data",
    "ShardProcess": "service.local",
    "Share": "plan",
    "Step": "train.step",
    "StepEvent": "train.hooks",
    "Sync": "policy",
    "Table": "table",
    "Topology": "plan",
    "Trainer": "train.trainer",
    "Zipf": "plan.zipf",
    "expand": "embedded",
    "open_pipeline": "train.policies",
    "prepare": "data.prepare",
    "shard": "plan.shard",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "Bounded",
    "DataSet",
    "Embedded",
    "Embeddings",
    "Exact",
    "Feature",
    "Flags",
    "Group",
    "Hook",
    "HotrowError",
    "Hybrid",
    "Jagged",
    "JaggedRows",
    "Link",
    "Metric",
    "ModelInputs",
    "Momentum",
    "Objective",
    "ObjectiveInputs",
    "Plan",
    "Predictor",
    "Reader",
    "Ready",
    "RowWiseAdagrad",
    "Run",
    "Schema",
    "ShardProcess",
    "Share",
    "Step",
    "StepEvent",
    "Sync",
    "Table",
    "Topology",
    "Trainer",
    "Zipf",
    "expand",
    "open_pipeline",
    "prepare",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hotrow.{_HOME[name]}"), name)
