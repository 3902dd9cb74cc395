"""Persia's side of `hotrow bench hybrid`, run by an interpreter that has Persia: `python persia_side.py ROLE JSON`.

It imports nothing of Hotrow and keeps to Python 3.9 and torch 1.12. The roles are `probe` (says which versions are
here, and where the servers lie), `load` (Persia's data loader: reads batches from files and sends them, over and over)
and `train` (its NN worker). The trainer takes turns: it waits for a line that says with how many threads, takes `warm`
steps that do not count and `steps` that do, and says what it measured as JSON.

The model is that of Persia's adult-income example with Criteo's inputs; Hotrow trains this very class.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DENSE, DENSE_LR = 13, 0.1


class Model(nn.Module):
    """Rows side by side and the dense inputs, each through a layer of its own, then three layers together."""

    def __init__(self, width: int) -> None:
        """`width` is how many numbers the rows of a sample have in all."""
        super().__init__()
        self.dense, self.dense_norm = nn.Linear(DENSE, 16), nn.BatchNorm1d(16)
        self.sparse, self.sparse_norm = nn.Linear(width, 128), nn.BatchNorm1d(128)
        self.top = nn.Sequential(nn.Linear(128 + 16, 256), nn.Linear(256, 128), nn.Linear(128, 1), nn.Sigmoid())

    def forward(self, dense: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Chances [batch, 1]. Both arguments are lists, as Persia gives them, and rows may be float16."""
        sparse = self.sparse_norm(self.sparse(torch.cat(list(rows), dim=1).float()))
        chances: Tensor = self.top(torch.cat([sparse, self.dense_norm(self.dense(dense[0]))], dim=1))
        return chances


def take_turn(step: Callable[[], Tensor], batch: int, warm: int, steps: int) -> dict[str, float]:
    """What so many steps took, after some that do not count; `step` gives its loss."""
    for _ in range(warm):
        step()
    start, busy = time.perf_counter(), time.process_time()
    losses = [step() for _ in range(steps)]
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return {
        "samples_a_second": batch * steps / seconds,
        "trainer_cpu_ms": 1000 * busy / steps,
        "loss": float(torch.stack(losses).mean()),
    }


def model_alone_ms(width: int, batch: int, steps: int = 15) -> float:
    """The median of the dense part's steps by themselves, on rows that are made up: what torch alone takes."""
    model, dense, labels = Model(width), torch.randn(batch, DENSE), torch.ones(batch, 1)
    optimizer, ms = torch.optim.SGD(model.parameters(), lr=DENSE_LR), []
    for _ in range(steps):
        rows = torch.randn(batch, width, requires_grad=True)
        start = time.perf_counter()
        nn.functional.binary_cross_entropy(model([dense], [rows]), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        ms.append(1000 * (time.perf_counter() - start))
    return statistics.median(ms)


def probe() -> None:
    """Says as JSON what this environment has."""
    import persia.ctx
    import persia.data

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    said = {
        "folder": str(Path(persia.data.__file__).parent),
        "nats": shutil.which("nats-server", path=path),
        "persia": metadata.version("persia"),
        "torch": torch.__version__,
    }
    print(json.dumps(said))


def load(work: dict[str, Any]) -> None:
    """Sends the batches as fast as they are taken, until it is killed."""
    from persia.ctx import DataCtx
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch

    keys, dense, labels = (np.load(work[name], mmap_mode="r") for name in ("keys", "dense", "labels"))
    with DataCtx() as context:
        for i in itertools.cycle(range(len(keys))):
            features = [
                IDTypeFeatureWithSingleID(f"c{t}", np.ascontiguousarray(keys[i, :, t]).view(np.uint64))
                for t in range(keys.shape[2])
            ]
            inputs, label = NonIDTypeFeature(np.array(dense[i])), Label(np.array(labels[i])[:, None])
            context.send_data(PersiaBatch(features, non_id_type_features=[inputs], labels=[label], requires_grad=True))


def train(work: dict[str, Any]) -> None:
    """Takes turns until its input ends."""
    from persia.ctx import TrainCtx
    from persia.data import DataLoader, StreamingDataset
    from persia.embedding import EmbeddingConfig
    from persia.embedding.optim import SGD

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Persia may write to stdout
    torch.manual_seed(0)
    model, criterion = Model(work["width"]), nn.BCELoss()
    with TrainCtx(
        embedding_optimizer=SGD(lr=work["lr"]),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=DENSE_LR),
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig(emb_initialization=(-work["init"], work["init"]), weight_bound=0.0),
    ) as context:
        loader = DataLoader(StreamingDataset(work["buffer"]), embedding_staleness=work["in_flight"], timeout_ms=60_000)
        batches = iter(loader)

        def step() -> Tensor:
            chances, labels = context.forward(next(batches))
            loss: Tensor = criterion(chances, labels[0])
            context.backward(loss)
            return loss.detach()

        print("ready", file=answers)
        for line in sys.stdin:
            torch.set_num_threads(int(line))
            alone = model_alone_ms(work["width"], work["batch"])
            said = take_turn(step, work["batch"], work["warm"], work["steps"])
            print(json.dumps({**said, "model_alone_ms": alone}), file=answers)


if __name__ == "__main__":
    if sys.argv[1] == "probe":
        probe()
    else:
        {"load": load, "train": train}[sys.argv[1]](json.loads(sys.argv[2]))
