"""One side of `dedup.train`: `hotrow train` of a sequence transformer on a data set, in a process of its own.

    python -m hotrow.bench.dedup_train DATA BATCH THREADS WARM STEPS

prints what its steps came to after the first `WARM`, as JSON: files read and shuffled, losses logged. `THREADS` 0 are
as many as there are cores. Freed memory is kept for the next step (`keep_memory`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hotrow import Trainer
from hotrow.bench.dedup_step import DIM, MODEL, keep_memory
from hotrow.bench.rate import Measured, Rate
from hotrow.data import DataSet
from hotrow.run import Run
from hotrow.settings import parse


def settings(data: Path, out: Path, batch: int, threads: int, steps: int) -> dict[str, Any]:
    """A run file as data."""
    epochs = -(-steps // max(1, DataSet.open(data).samples("train") // batch))
    return {
        "data": {"path": str(data), "batch_size": batch, "test": ""},
        "tables": {"dim": DIM},
        "model": MODEL.model_dump(mode="json"),
        "train": {"epochs": epochs, "steps": steps, "log_every": 1, **({"threads": threads} if threads else {})},
        "output": {"folder": str(out), "tensorboard": False},
    }


def train(data: Path, batch: int, threads: int, warm: int, steps: int) -> Measured:
    """Trains; what the steps after the first `warm` came to."""
    rate = Rate(warm)
    with TemporaryDirectory(prefix="hotrow-bench-") as folder:
        run = parse(Run, settings(data, Path(folder) / "run", batch, threads, warm + steps))
        with Trainer(run, hooks=[rate]) as trainer:
            trainer.fit()
    return rate.measured


if __name__ == "__main__":
    keep_memory()
    print(json.dumps(train(Path(sys.argv[1]), *map(int, sys.argv[2:6]))))
