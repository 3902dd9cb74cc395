"""A data set of keys drawn at random, for runs whose keys follow a law and whose labels say nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data import DataSet, prepare
from hotrow.data.schema import Column, Schema

CLICKED = 0.25
"""The chance of a label to be 1."""


def drawn_log(folder: Path, name: str, keys: npt.NDArray[np.int64], seed: int = 0) -> DataSet:
    """The samples `keys[sample, table]` as a prepared data set; table t is called "ct"."""
    labels = np.random.default_rng(seed).random(len(keys)) < CLICKED
    columns = {f"c{t}": keys[:, t] for t in range(keys.shape[1])}
    log = folder / f"{name}.parquet"
    pq.write_table(pa.table({"label": labels.astype(np.float32), **columns}), log)
    schema = Schema(label="label", features=tuple(Column(name=column) for column in columns))
    made = prepare(log, folder / name, schema=schema, split="none", cluster=False, dedup=False, overwrite=True)
    log.unlink()
    return made
