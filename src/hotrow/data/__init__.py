"""Data: what a log means (`Schema`), making a data set of it (`prepare`), and batches from it (`Reader`)."""

from hotrow.data.batch import Batch, Group, Jagged
from hotrow.data.dataset import DataSet, DataSetWriter
from hotrow.data.prepare import prepare
from hotrow.data.reader import Reader
from hotrow.data.schema import Column, Schema

__all__ = ["Batch", "Column", "DataSet", "DataSetWriter", "Group", "Jagged", "Reader", "Schema", "prepare"]
