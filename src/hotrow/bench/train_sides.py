"""The sides of `hotrow bench train`: one training each, in a process of its own.

    python -m hotrow.bench.train_sides SIDE RUN_FILE WARM

    trainer   `hotrow train` as the run file says
    own       the same run as a user's own loop over the public pipeline and step, with a module of the user's
    torch1    a plain PyTorch loop (`train_torch.py`) with one thread; torch2 has two

It prints what was measured after the first WARM steps, as JSON. So threads that spin after their work, memory that
one side keeps and settings of a process do not reach the other side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hotrow import Batch, Embedded, Embeddings, Step, Trainer, open_pipeline
from hotrow.bench import train_torch
from hotrow.bench.rate import Measured, Rate, rate_of
from hotrow.data import DataSet, Reader
from hotrow.models import DLRMSettings
from hotrow.run import Run, load_run

PLAIN = "plain.npz"
"""The peer's numbered keys, beside the run file."""


def trainer(file: Path, warm: int) -> Measured:
    """The run itself."""
    rate = Rate(warm)
    with Trainer(load_run(file), hooks=[rate], overwrite=True) as training:
        training.fit()
    return rate.measured


class OwnDLRM(nn.Module):
    """A user's own module: rows as Hotrow brings them, under plain PyTorch."""

    def __init__(self, features: list[str], dim: int, dense: int, settings: DLRMSettings) -> None:
        super().__init__()
        self.features = features
        self.over = train_torch.Interactions(len(features), dim, dense, settings)

    def forward(self, embedded: Embedded, dense: Tensor) -> Tensor:
        logits: Tensor = self.over(embedded.vectors(self.features), dense)
        return logits


def own_steps(run: Run) -> Iterator[int]:
    """The run as a user's own loop; the samples of each step."""
    data = DataSet.open(run.data.path)
    features = [
        f.model_copy(update={"pooling": "mean" if f.pooling == "sequence" else f.pooling})
        for f in data.schema.feature_settings()
    ]
    tables = run.tables_of(feature.table for feature in features)
    embeddings = Embeddings(tables, features, seed=run.train.seed)
    torch.manual_seed(run.train.seed)
    assert isinstance(run.model, DLRMSettings)
    model = OwnDLRM([f.name for f in features], tables[0].dim, len(data.schema.dense), run.model)
    step = Step(embeddings, model, optimizer=run.optimizer)
    reader = Reader(data, run.data.train, run.data.batch_size, seed=run.data.seed)
    total, shown = torch.zeros(()), []
    with open_pipeline(_epochs(reader, run.train.epochs), embeddings, run.policy) as pipeline:
        for number, ready in enumerate(pipeline, start=1):
            total += step(ready)
            if number % run.train.log_every == 0:
                shown.append(float(total) / number)
            yield len(ready.batch)


def _epochs(reader: Reader, epochs: int) -> Iterator[Batch]:
    for _ in range(epochs):
        yield from reader


def own(file: Path, warm: int) -> Measured:
    run = load_run(file)
    if run.train.threads is not None:
        torch.set_num_threads(run.train.threads)
    return rate_of(own_steps(run), warm)


def plain(threads: int) -> Callable[[Path, int], Measured]:
    """The peer with so many threads."""

    def train(file: Path, warm: int) -> Measured:
        torch.set_num_threads(threads)
        run = load_run(file)
        features = train_torch.tables(DataSet.open(run.data.path))
        log = train_torch.PlainLog.load(file.with_name(PLAIN), features)
        return rate_of(train_torch.steps(run, log, features), warm)

    return train


SIDES: dict[str, Callable[[Path, int], Measured]] = {
    "trainer": trainer,
    "own": own,
    "torch1": plain(1),
    "torch2": plain(2),
}


if __name__ == "__main__":
    print(json.dumps(SIDES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
