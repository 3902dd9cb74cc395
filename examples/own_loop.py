"""Your own module in your own loop: Hotrow brings the rows, the rest is plain PyTorch.

    python examples/own_loop.py --samples 100000

Makes a small click log in memory, trains a two-tower model on it with `Embeddings`, saves rows and weights, and reads
both back into a fresh model that gives the same scores.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hotrow import Batch, Embeddings, Feature, RowWiseAdagrad, Table


class TwoTower(nn.Module):
    """User and history on one side, item on the other; their product is the logit."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.rows = Embeddings(
            tables=[Table(name=name, dim=dim, optimizer=RowWiseAdagrad(lr=0.1)) for name in ("user", "item")],
            features=[
                Feature(name="user"),
                Feature(name="item"),
                Feature(name="history", table="item", pooling="mean"),  # shares the items' rows
            ],
        )
        self.user = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item = nn.Linear(dim, dim)

    def forward(self, batch: Batch) -> Tensor:
        embedded = self.rows(batch)
        user = self.user(embedded.vectors(["user", "history"]))
        return (user * self.item(embedded.vector("item"))).sum(dim=1)


def clicks(samples: int, size: int, seed: int = 0) -> Iterator[Batch]:
    """Users click items of their own kind; keys are any int64, so they need no vocabulary."""
    random = np.random.default_rng(seed)
    for _ in range(samples // size):
        user = random.integers(0, 500, size)
        item = np.minimum(random.zipf(1.3, size), 2_000)
        history = user[:, None] % 7 + 7 * random.integers(0, 200, (size, 5))
        chance = np.where(user % 7 == item % 7, 0.8, 0.2)
        features = {
            "user": torch.from_numpy(user * 1_000_003),
            "item": torch.from_numpy(item),
            "history": torch.from_numpy(history),
        }
        yield Batch.plain(features, labels=torch.from_numpy((random.random(size) < chance).astype(np.float32)))


def train(model: TwoTower, samples: int, size: int) -> float:
    """One pass; the mean loss of the last tenth."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for batch in clicks(samples, size):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.rows.step()  # each table's own optimizer, applied where the rows live
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=256)
    wanted = parser.parse_args()
    torch.manual_seed(0)
    model = TwoTower()
    print(f"loss at the end {train(model, wanted.samples, wanted.batch_size):.3f}; guessing 0.598, the best 0.500")
    for table, held in model.rows.stats().items():
        print(f"table {table}: {held['rows']:,} rows, {held['bytes']:,} bytes")

    with tempfile.TemporaryDirectory() as folder:
        model.rows.snapshot(Path(folder) / "rows").write()
        torch.save(model.state_dict(), Path(folder) / "weights.pt")
        again = TwoTower()
        again.rows.restore(Path(folder) / "rows")
        again.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True))
    (batch,) = clicks(wanted.batch_size, wanted.batch_size, seed=1)
    with torch.no_grad():
        same = torch.equal(model.eval()(batch), again.eval()(batch))
    print(f"a model read back gives {'the same scores' if same else 'OTHER scores'}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
