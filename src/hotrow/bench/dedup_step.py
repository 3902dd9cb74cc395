"""The step that `dedup.batch` measures: that of a run, `Step`, of a sequence transformer, on one batch.

    python -m hotrow.bench.dedup_step DATA BATCH

makes one step in a process of its own and prints the most memory it took: what rows, activations and gradients added
to a process that held the batch and had made a small step before, so that libraries and their buffers do not count.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from hotrow import Batch, Embeddings, Step, Table, open_pipeline
from hotrow.data import DataSet, Reader
from hotrow.errors import DataError
from hotrow.models import ModelInputs, TransformerSettings

MODEL = TransformerSettings(layers=2, heads=2, length=100)
DIM = 64
STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class SequenceStep:
    """Tables, model and optimizers, all new, and the step of a run on batches at hand."""

    def __init__(self, dataset: DataSet) -> None:
        features = dataset.schema.feature_settings()
        tables = dict.fromkeys(feature.table for feature in features)
        self._embeddings = Embeddings([Table(name=name, dim=DIM) for name in tables], features)
        torch.manual_seed(0)
        model = MODEL.build(ModelInputs(features, {f.name: DIM for f in features}, len(dataset.schema.dense)))
        self._step = Step(self._embeddings, model)

    def train_on(self, batch: Batch) -> float:
        """Rows, forward, backward, and a step of the dense part and of the tables; gives the loss."""
        with open_pipeline([batch], self._embeddings) as pipeline:
            return float(self._step(next(pipeline)))


def whole_batches(dataset: DataSet, size: int, threads: int = 1) -> Generator[Batch]:
    """Batches of `size` samples, epoch after epoch."""
    reader = Reader(dataset, "train", size, drop_last=True, threads=threads)
    if not len(reader):
        raise DataError(f"{dataset.path} has fewer than {size} samples, so there is no batch of that size.")
    while True:
        yield from reader


def c_library() -> Any:
    """The C library of this process."""
    return ctypes.CDLL(None)


def keep_memory() -> bool:
    """Asks the C library to keep freed memory for the next step instead of giving it back; whether it can.

    Large tensors are otherwise new pages in every step, which the system has to zero: two million of them, 3.7 s of
    system time, in a step of the baseline on batches of 4096, and a tenth of that in one of ours.
    """
    trim_threshold, mmap_max = -1, -4
    try:
        mallopt = c_library().mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))


def peak_of_a_step(path: Path, batch_size: int) -> int:
    """Bytes that a step on one batch, which is there, needs at most beyond what the process has before it."""
    dataset = DataSet.open(path)
    step = SequenceStep(dataset)
    step.train_on(_first_batch(dataset, 16))
    batch = _first_batch(dataset, batch_size)
    gc.collect()
    c_library().malloc_trim(0)
    PEAK_RESET.write_text("5")
    before = _resident("VmRSS")
    step.train_on(batch)
    return _resident("VmHWM") - before


def _first_batch(dataset: DataSet, size: int) -> Batch:
    """Read without threads, which might still be giving memory back while the step is measured."""
    with closing(whole_batches(dataset, size, threads=0)) as batches:
        return next(batches)


def _resident(field: str) -> int:
    found = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(found.split()[1]) << 10


if __name__ == "__main__":
    print(peak_of_a_step(Path(sys.argv[1]), int(sys.argv[2])))
