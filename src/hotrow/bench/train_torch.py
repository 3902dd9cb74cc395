"""The peer of `hotrow bench train`: DLRM as one writes it in plain PyTorch, on tensors that wait in memory.

It is given what Hotrow does for itself: keys are numbered before the clock starts, samples are shuffled once, whole
epochs lie in memory, nothing is logged, nothing is saved. Rows are `nn.EmbeddingBag(sparse=True)`, one a table, with
`torch.optim.Adagrad`; the rest is `torch.optim.Adam`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data import DataSet
from hotrow.models import DLRMSettings
from hotrow.run import Run
from hotrow.table import Uniform
from hotrow.train.dense import DenseAdam

Ints = NDArray[np.int64]


class Bags(NamedTuple):
    """A feature's numbered keys, sample after sample, split at `offsets`."""

    values: Ints
    offsets: Ints

    def taken(self, order: Ints) -> Bags:
        """Those of the samples named, in that order."""
        begins, lengths = self.offsets[order], np.diff(self.offsets)[order]
        offsets = np.append(0, np.cumsum(lengths))
        return Bags(self.values[np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)], offsets)


class PlainLog(NamedTuple):
    """The samples of a split as tensors: for each feature its bags, for each table how many keys it has."""

    bags: dict[str, tuple[Tensor, Tensor]]
    rows: dict[str, int]
    dense: Tensor
    labels: Tensor

    @staticmethod
    def load(file: Path, features: Mapping[str, str]) -> PlainLog:
        """What `number` wrote."""
        with np.load(file, allow_pickle=False) as held:
            found = {name: torch.from_numpy(held[name]) for name in held}
        bags = {name: (found[f"{name}.values"], found[f"{name}.offsets"]) for name in features}
        rows = {table: int(found[f"{table}.rows"]) for table in features.values()}
        return PlainLog(bags, rows, found["dense"], found["label"])

    def batch(self, first: int, last: int) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]:
        """Features, dense inputs and labels of the samples from `first` to `last`."""
        features = {}
        for name, (values, offsets) in self.bags.items():
            begin = offsets[first]
            features[name] = values[begin : offsets[last]], offsets[first:last] - begin
        return features, self.dense[first:last], self.labels[first:last]


def tables(dataset: DataSet) -> dict[str, str]:
    """For each feature the table that it looks up."""
    return {feature.name: feature.table for feature in dataset.schema.feature_settings()}


def number(dataset: DataSet, split: str, file: Path, seed: int = 0) -> None:
    """Writes a split with its keys numbered, table by table, and its samples shuffled."""
    log = pa.concat_tables(dataset.flat(split))
    order = np.random.default_rng(seed).permutation(len(log))
    features = tables(dataset)
    held: dict[str, Any] = {}
    for table in dict.fromkeys(features.values()):
        names = [name for name, of in features.items() if of == table]
        bags = [_bags(log.column(name)) for name in names]
        keys, numbers = np.unique(np.concatenate([b.values for b in bags]), return_inverse=True)
        held[f"{table}.rows"] = np.array(len(keys))
        ends = np.cumsum([len(b.values) for b in bags])
        for name, bag, own in zip(names, bags, np.split(numbers, ends[:-1]), strict=True):
            shuffled = Bags(own, bag.offsets).taken(order)
            held[f"{name}.values"], held[f"{name}.offsets"] = shuffled
    dense = [log.column(name).to_numpy().astype(np.float32) for name in dataset.schema.dense]
    held["dense"] = np.column_stack(dense)[order] if dense else np.zeros((len(log), 0), np.float32)
    held["label"] = log.column(dataset.schema.label).to_numpy().astype(np.float32)[order]
    np.savez(file, **held)


def _bags(column: pa.ChunkedArray) -> Bags:
    whole = column.combine_chunks()
    if not pa.types.is_list(whole.type) and not pa.types.is_large_list(whole.type):
        return Bags(whole.to_numpy(zero_copy_only=False).astype(np.int64), np.arange(len(whole) + 1))
    lengths = np.asarray(whole.value_lengths().fill_null(0), dtype=np.int64)
    return Bags(whole.flatten().to_numpy().astype(np.int64), np.append(0, np.cumsum(lengths)))


class Interactions(nn.Module):
    """DLRM above its rows: features side by side and dense inputs in, logits out."""

    def __init__(self, features: int, dim: int, dense: int, settings: DLRMSettings) -> None:
        super().__init__()
        self.dim, vectors = dim, features + 1
        self.bottom = nn.Sequential(*_layers(dense, [*settings.bottom, dim]))
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1])
        self.pairs: Tensor
        above = dim + vectors * (vectors - 1) // 2
        self.top = nn.Sequential(*_layers(above, settings.top), nn.Linear([above, *settings.top][-1], 1))

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = torch.cat([first, rows], dim=1).view(len(rows), -1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([first, products], dim=1))
        return logits.squeeze(1)


def _layers(inputs: int, widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return layers


class PlainDLRM(nn.Module):
    """`Interactions` above one `nn.EmbeddingBag` a table; a list is the mean of its rows."""

    def __init__(self, log: PlainLog, features: Mapping[str, str], dim: int, scale: float, model: DLRMSettings) -> None:
        super().__init__()
        self.features = dict(features)
        self.rows = nn.ModuleDict({t: nn.EmbeddingBag(n, dim, mode="mean", sparse=True) for t, n in log.rows.items()})
        for weight in self.rows.parameters():
            nn.init.uniform_(weight, -scale, scale)
        self.over = Interactions(len(features), dim, log.dense.shape[1], model)

    def forward(self, bags: Mapping[str, tuple[Tensor, Tensor]], dense: Tensor) -> Tensor:
        rows = [self.rows[table](*bags[name]) for name, table in self.features.items()]
        logits: Tensor = self.over(torch.cat(rows, dim=1), dense)
        return logits


def steps(run: Run, log: PlainLog, features: Mapping[str, str]) -> Iterator[int]:
    """Trains as the run says; the samples of each step."""
    table = run.tables.table("any")
    assert isinstance(run.model, DLRMSettings) and isinstance(table.init, Uniform)
    assert isinstance(run.optimizer, DenseAdam)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # else Adagrad warns
    torch.manual_seed(run.train.seed)
    model = PlainDLRM(log, features, table.dim, table.init.scale, run.model)
    optimizers = (
        torch.optim.Adagrad(model.rows.parameters(), lr=table.optimizer.lr),
        torch.optim.Adam(model.over.parameters(), lr=run.optimizer.lr),
    )
    for _ in range(run.train.epochs):
        for first in range(0, len(log.labels), run.data.batch_size):
            bags, dense, labels = log.batch(first, min(first + run.data.batch_size, len(log.labels)))
            loss = F.binary_cross_entropy_with_logits(model(bags, dense), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
            yield len(labels)
