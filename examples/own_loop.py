"""Your own module in your own loop: Hotrow brings the rows, the rest is plain PyTorch.

    python examples/own_loop.py --samples 100000

Makes a small click log in memory and trains a two-tower model on it in three loops, each as fast as the next:

1. every line written out, on batches whose rows are fetched ahead of the model;
2. with `Step`, which is the same lines and finds the same losses, bit for bit;
3. with `Trainer`, which has evaluation, checkpoints, resuming and a report besides.

Rows and weights are saved and read back into a fresh model that gives the same scores.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from hotrow import (
    Batch,
    Embedded,
    Embeddings,
    Exact,
    Feature,
    ModelInputs,
    RowWiseAdagrad,
    Run,
    Step,
    Table,
    Trainer,
    open_pipeline,
    prepare,
)

TABLES = [Table(name=name, dim=16, optimizer=RowWiseAdagrad(lr=0.1)) for name in ("user", "item")]
FEATURES = [
    Feature(name="user"),
    Feature(name="item"),
    Feature(name="history", table="item", pooling="mean"),  # shares the items' rows
]
INPUTS = ModelInputs(FEATURES, {feature.name: 16 for feature in FEATURES})
SCHEMA = """
label = "click"
features = [{ name = "user" }, { name = "item" }, { name = "history", kind = "keys", table = "item", pooling = "mean" }]
"""


class TwoTower(nn.Module):
    """User and history on one side, item on the other; their product is the logit."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        dim = inputs.dims["item"]
        self.user = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item = nn.Linear(dim, dim)

    def forward(self, rows: Embedded, dense: Tensor | None = None) -> Tensor:
        user = self.user(rows.vectors(["user", "history"]))
        return (user * self.item(rows.vector("item"))).sum(dim=1)


def clicks(samples: int, size: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Users click items of their own kind; keys are any int64, so they need no vocabulary."""
    random = np.random.default_rng(seed)
    for _ in range(samples // size):
        user = random.integers(0, 500, size)
        item = np.minimum(random.zipf(1.3, size), 2_000)
        history = user[:, None] % 7 + 7 * random.integers(0, 200, (size, 5))
        chance = np.where(user % 7 == item % 7, 0.8, 0.2)
        click = (random.random(size) < chance).astype(np.float32)
        yield {"click": click, "user": user * 1_000_003, "item": item, "history": history}


def batches(samples: int, size: int, seed: int = 0) -> Iterator[Batch]:
    """A prepared data set has them too: `Reader(DataSet.open(folder), "train", size)`."""
    for columns in clicks(samples, size, seed):
        found = {name: torch.from_numpy(column) for name, column in columns.items()}
        yield Batch.plain({feature.name: found[feature.name] for feature in FEATURES}, labels=found["click"])


def written_out(embeddings: Embeddings, model: TwoTower, samples: int, size: int) -> list[float]:
    """One pass with every line in sight; the loss of each step."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.001), []
    with open_pipeline(batches(samples, size), embeddings, Exact(ahead=4)) as pipeline:
        for ready in pipeline:
            loss = nn.functional.binary_cross_entropy_with_logits(model(ready.rows()), ready.batch.labels)
            optimizer.zero_grad()
            loss.backward()
            embeddings.step()  # each table's own optimizer, applied where the rows live
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def with_step(embeddings: Embeddings, model: TwoTower, samples: int, size: int) -> list[float]:
    """The same in two lines."""
    step = Step(embeddings, model)
    with open_pipeline(batches(samples, size), embeddings, Exact(ahead=4)) as pipeline:
        return [float(step(ready)) for ready in pipeline]


def read_back(embeddings: Embeddings, model: TwoTower, folder: Path) -> bool:
    """Whether a fresh model and fresh tables give the same scores once they have read what these save."""
    embeddings.snapshot(folder / "rows").write()
    torch.save(model.state_dict(), folder / "weights.pt")
    rows, again = Embeddings(TABLES, FEATURES), TwoTower(INPUTS)
    rows.restore(folder / "rows")
    again.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    (batch,) = batches(256, 256, seed=1)
    with torch.no_grad():
        return torch.equal(model(embeddings.eval()(batch)), again(rows.eval()(batch)))


def over_a_run(folder: Path, samples: int, size: int) -> dict[str, float]:
    """A loop over a run, left in the middle and gone on with; the metrics of its test split."""
    logs = [pa.table({name: list(column) for name, column in part.items()}) for part in clicks(samples, size)]
    pq.write_table(pa.concat_tables(logs), folder / "log.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    prepare(folder / "log.parquet", folder / "data", schema=folder / "schema.toml", split="last:0.2")
    (folder / "run.toml").write_text(f'data = {{ path = "data", batch_size = {size} }}\ntables.optimizer.lr = 0.1\n')
    run = Run.load(folder / "run.toml")
    with Trainer(run, model=TwoTower) as trainer, trainer.pipeline() as pipeline:
        for ready in pipeline:
            trainer.step(ready)
            if trainer.state.step == 10:
                break
        trainer.checkpoint()
    with Trainer(run, model=TwoTower, resume=True) as trainer:
        for ready in trainer.pipeline():
            trainer.step(ready)
        return trainer.evaluate("test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=256)
    wanted = parser.parse_args()
    losses = {}
    for loop in (written_out, with_step):
        torch.manual_seed(0)
        embeddings, model = Embeddings(TABLES, FEATURES), TwoTower(INPUTS)
        losses[loop] = loop(embeddings, model, wanted.samples, wanted.batch_size)
    last = losses[with_step][-max(1, len(losses[with_step]) // 10) :]
    print(f"loss at the end {np.mean(last):.3f}; guessing 0.598, the best 0.500")
    print(f"both loops have {'the same losses' if losses[written_out] == losses[with_step] else 'OTHER losses'}")
    for table, held in embeddings.stats().items():
        print(f"table {table}: {held['rows']:,} rows, {held['bytes']:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        same = read_back(embeddings, model, Path(folder))
        print(f"a model read back gives {'the same scores' if same else 'OTHER scores'}")
        metrics = over_a_run(Path(folder), wanted.samples, wanted.batch_size)
        print(f"a run, stopped and resumed: AUC {metrics['auc']:.3f} on its test split; the best 0.800")
    if not same or losses[written_out] != losses[with_step]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
