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
    from hotrow.predictor import Predictor
    from hotrow.table import Feature, Table

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Embedded",
    "Embeddings",
    "Feature",
    "Group",
    "HotrowError",
    "Jagged",
    "JaggedRows",
    "Predictor",
    "Table",
]

_HOME = {
    "Batch": "data.batch",
    "Embedded": "embedded",
    "Embeddings": "embeddings",
    "Feature": "table",
    "Group": "data.batch",
    "Jagged": "data.batch",
    "JaggedRows": "embedded",
    "Predictor": "predictor",
    "Table": "table",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hotrow.{_HOME[name]}"), name)
