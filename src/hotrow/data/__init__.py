"""Data: what a log means (`Schema`), making a data set of it (`prepare`), and batches from it (`Reader`).

What needs torch is loaded when it is first used: tasks of `prepare` do without it, and are the smaller for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotrow.data.dataset import DataSet, DataSetWriter
from hotrow.data.prepare import prepare
from hotrow.data.schema import Column, Schema

if TYPE_CHECKING:
    from hotrow.data.batch import Batch, Group, Jagged
    from hotrow.data.reader import Reader

__all__ = ["Batch", "Column", "DataSet", "DataSetWriter", "Group", "Jagged", "Reader", "Schema", "prepare"]

_HOME = {"Batch": "batch", "Group": "batch", "Jagged": "batch", "Reader": "reader"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hotrow.data.{_HOME[name]}"), name)
