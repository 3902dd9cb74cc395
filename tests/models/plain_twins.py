"""Models as one would write it in plain PyTorch: `nn.Embedding`, `nn.Linear`, padded lists, Xavier-normal starts.

Nothing here is Hotrow's but the names. A twin shows what a model of its kind, size and settings gets from a log;
`trained` reads no more of the log than its columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Samples:
    """Keys as numbers from 1: one a field `[n, F]`, or a list padded with 0 `[n, L]`; dense inputs and labels."""

    single: Tensor
    lists: Mapping[str, Tensor]
    dense: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, places: Tensor | slice) -> "Samples":
        lists = {name: keys[places] for name, keys in self.lists.items()}
        return replace(
            self, single=self.single[places], lists=lists, dense=self.dense[places], labels=self.labels[places]
        )

    def batches(self, size: int, shuffle: bool) -> Iterator["Samples"]:
        order = torch.randperm(len(self)) if shuffle else torch.arange(len(self))
        return (self.at(places) for places in order.split(size))


@dataclass(frozen=True)
class Shape:
    """What a twin is built for: how many keys, fields and dense inputs, and what lists there are."""

    keys: int
    fields: int
    lists: tuple[str, ...]
    dense: int
    dim: int


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, linear(inputs, 1))


def rows_of(keys: int, dim: int, start: float = 0.05) -> nn.Embedding:
    rows = nn.Embedding(keys + 1, dim, padding_idx=0, sparse=True)
    nn.init.uniform_(rows.weight, -start, start)
    with torch.no_grad():
        rows.weight[0].zero_()
    return rows


class Twin(nn.Module):
    """Vectors of all fields and the means of all lists, and what is made of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.rows = rows_of(shape.keys, shape.dim)
        self.vectors = shape.fields + len(shape.lists)
        self.width = self.vectors * shape.dim + shape.dense

    def fields(self, rows: nn.Embedding, samples: Samples) -> Tensor:
        """`[B, vectors, dim]`."""
        means = [
            rows(keys).sum(dim=1) / (keys > 0).sum(dim=1, keepdim=True).clamp(min=1) for keys in samples.lists.values()
        ]
        return torch.cat([rows(samples.single), *(mean[:, None] for mean in means)], dim=1)

    def side_by_side(self, samples: Samples) -> Tensor:
        return torch.cat([self.fields(self.rows, samples).flatten(1), samples.dense], dim=1)


class DLRM(Twin):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bottom = nn.Sequential(linear(shape.dense, 64), nn.ReLU(), linear(64, shape.dim), nn.ReLU())
        self.top = mlp(shape.dim + self.vectors * (self.vectors + 1) // 2, 128, 64)

    def forward(self, samples: Samples) -> Tensor:
        first = self.bottom(samples.dense)
        vectors = torch.cat([first[:, None], self.fields(self.rows, samples)], dim=1)
        i, j = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
        products = torch.bmm(vectors, vectors.mT)[:, i, j]
        return self.top(torch.cat([first, products], dim=1))[:, 0]


class DCNv2(Twin):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.crosses = nn.ModuleList(linear(self.width, self.width) for _ in range(3))
        self.deep = nn.Sequential(*list(mlp(self.width, 128, 64))[:-1])
        self.out = linear(self.width + 64, 1)

    def forward(self, samples: Samples) -> Tensor:
        first = self.side_by_side(samples)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.out(torch.cat([x, self.deep(first)], dim=1))[:, 0]


class WideDeep(Twin):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.weights = rows_of(shape.keys, 1, start=0.0)
        self.dense_weights = nn.Linear(shape.dense, 1)
        self.deep = mlp(self.width, 128, 64)

    def forward(self, samples: Samples) -> Tensor:
        wide = self.fields(self.weights, samples).sum(dim=(1, 2)) + self.dense_weights(samples.dense)[:, 0]
        return wide + self.deep(self.side_by_side(samples))[:, 0]


class DeepFM(WideDeep):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.dense_vectors = nn.Parameter(torch.randn(shape.dense, shape.dim) * 0.01)

    def forward(self, samples: Samples) -> Tensor:
        dense = samples.dense[:, :, None] * self.dense_vectors
        vectors = torch.cat([self.fields(self.rows, samples), dense], dim=1)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return super().forward(samples) + pairs


class GraphSAGE(Twin):
    """One layer on sampled neighbours of the two fields, which come as the lists "user_hop1" and "item_hop1"."""

    def __init__(self, shape: Shape, width: int = 64) -> None:
        super().__init__(shape)
        self.own = nn.ModuleList(linear(shape.dim, width) for _ in range(2))
        self.around = nn.ModuleList(linear(shape.dim, width, bias=False) for _ in range(2))
        self.deep = mlp(3 * width, 64)

    def forward(self, samples: Samples) -> Tensor:
        rows = self.fields(self.rows, samples)
        ends = [F.normalize(self.own[i](rows[:, i]) + self.around[i](rows[:, 2 + i]), dim=1) for i in range(2)]
        return self.deep(torch.cat([*ends, ends[0] * ends[1]], dim=1))[:, 0]


class RowWiseAdagrad:
    """One accumulator a row, of its mean squared gradient; rows without a gradient stay."""

    def __init__(self, weight: Tensor, lr: float) -> None:
        self.weight, self.lr, self.sums = weight, lr, torch.zeros(len(weight))

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        gradient = self.weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        self.sums[rows] += values.square().mean(dim=1)
        self.weight[rows] -= self.lr * values / (self.sums[rows].sqrt() + 1e-8)[:, None]
        self.weight.grad = None


def trained(twin: Twin, epochs: Iterator[Samples], rate: float, dense_rate: float, batch: int) -> None:
    """Row-wise Adagrad for rows, Adam for all other weights, cross entropy; each epoch's samples shuffled."""
    rows = [module.weight for module in twin.modules() if isinstance(module, nn.Embedding)]
    others = [p for p in twin.parameters() if all(p is not weight for weight in rows)]
    optimizers = [torch.optim.Adam(others, lr=dense_rate), *(RowWiseAdagrad(weight, rate) for weight in rows)]
    twin.train()
    for samples in epochs:
        for part in samples.batches(batch, shuffle=True):
            optimizers[0].zero_grad()
            F.binary_cross_entropy_with_logits(twin(part), part.labels).backward()
            for optimizer in optimizers:
                optimizer.step()


@torch.no_grad()
def scores(twin: Twin, samples: Samples) -> Tensor:
    twin.eval()
    return torch.cat([twin(part) for part in samples.batches(2048, shuffle=False)])
