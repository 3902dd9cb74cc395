"""Models as one would write them in plain PyTorch: `nn.Embedding`, `nn.Linear`, padded lists.

Nothing here is Hotrow's but the names of weights, by which a twin can be given a model's start. Fields come in the
model's order.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Samples:
    """For each field its keys `[n, L]`, numbers from 1 on and 0 behind the last; dense inputs and labels."""

    keys: Mapping[str, Tensor]
    dense: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, shuffle: bool) -> Iterable["Samples"]:
        order = torch.randperm(len(self)) if shuffle else torch.arange(len(self))
        for at in order.split(size):
            keys = {name: keys[at] for name, keys in self.keys.items()}
            yield Samples(keys, self.dense[at], self.labels[at])


@dataclass(frozen=True)
class Shape:
    """What a twin is built for: how many keys and dense inputs there are, and its fields; a history is the last."""

    keys: int
    fields: tuple[str, ...]
    dense: int
    dim: int


def mlp(inputs: int, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1))


def xavier(module: nn.Module) -> None:
    """Xavier-normal weights and zero biases, for `nn.Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def rows_of(keys: int, dim: int, start: float = 0.05) -> nn.Embedding:
    rows = nn.Embedding(keys + 1, dim, padding_idx=0, sparse=True)
    nn.init.uniform_(rows.weight, -start, start)
    with torch.no_grad():
        rows.weight[0].zero_()
    return rows


class Twin(nn.Module):
    """The mean vector of every field, and what is made of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.rows = rows_of(shape.keys, shape.dim)
        self.width = len(shape.fields) * shape.dim + shape.dense

    def means(self, rows: nn.Embedding, samples: Samples, fields: tuple[str, ...] | None = None) -> Tensor:
        """`[B, fields, dim]`, of all fields if none are named."""
        keys = [samples.keys[name] for name in fields or self.shape.fields]
        lists = rows(torch.cat(keys, dim=1)).split([k.shape[1] for k in keys], dim=1)
        counts = [(k > 0).sum(dim=1, keepdim=True).clamp(min=1) for k in keys]
        return torch.stack([values.sum(dim=1) / count for values, count in zip(lists, counts, strict=True)], dim=1)

    def side_by_side(self, samples: Samples) -> Tensor:
        return torch.cat([self.means(self.rows, samples).flatten(1), samples.dense], dim=1)


class DLRM(Twin):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bottom = nn.Sequential(nn.Linear(shape.dense, 64), nn.ReLU(), nn.Linear(64, shape.dim), nn.ReLU())
        vectors = len(shape.fields) + 1
        self.top = mlp(shape.dim + vectors * (vectors - 1) // 2, 128, 64)

    def forward(self, samples: Samples) -> Tensor:
        first = self.bottom(samples.dense)
        vectors = torch.cat([first[:, None], self.means(self.rows, samples)], dim=1)
        i, j = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
        products = torch.bmm(vectors, vectors.mT)[:, i, j]
        return self.top(torch.cat([first, products], dim=1))[:, 0]


class Cross(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(width, width))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.project(x) + x


class DCNv2(Twin):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.crosses = nn.ModuleList(Cross(self.width) for _ in range(3))
        self.deep = mlp(self.width, 128, 64)[:-1]
        self.out = nn.Linear(self.width + 64, 1)

    def forward(self, samples: Samples) -> Tensor:
        first = self.side_by_side(samples)
        x = first
        for cross in self.crosses:
            x = cross(first, x)
        return self.out(torch.cat([x, self.deep(first)], dim=1))[:, 0]


class WideDeep(Twin):
    """Linear weights in a table of their own; what they count, and products, can be scaled as Hotrow's models do it."""

    def __init__(self, shape: Shape, scaled: bool = False) -> None:
        super().__init__(shape)
        self.weights = rows_of(shape.keys, 1, start=0.0)
        self.dense_weights = nn.Linear(shape.dense, 1, bias=False)
        self.deep = mlp(self.width, 128, 64)
        self.weight_scale = 1 / math.sqrt(shape.dim + 1) if scaled else 1.0
        vectors = len(shape.fields) + shape.dense
        self.pair_scale = min(1.0, math.sqrt(32 / (shape.dim * vectors))) if scaled else 1.0

    def forward(self, samples: Samples) -> Tensor:
        wide = self.weight_scale * self.means(self.weights, samples).sum(dim=(1, 2))
        return wide + self.dense_weights(samples.dense)[:, 0] + self.deep(self.side_by_side(samples))[:, 0]


class DeepFM(WideDeep):
    def __init__(self, shape: Shape, scaled: bool = False) -> None:
        super().__init__(shape, scaled)
        self.dense_vectors = nn.Parameter(torch.randn(shape.dense, shape.dim) * 0.01)

    def forward(self, samples: Samples) -> Tensor:
        dense = samples.dense[:, :, None] * self.dense_vectors
        vectors = torch.cat([self.means(self.rows, samples), dense], dim=1)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return super().forward(samples) + self.pair_scale * pairs


class Dice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.normal = nn.BatchNorm1d(width, affine=False, eps=1e-8)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.normal(x))
        return p * x + (1 - p) * self.alpha * x


class Attention(nn.Module):
    def __init__(self, dim: int, hidden: int = 36) -> None:
        super().__init__()
        self.of_history = nn.Linear(dim, hidden)
        self.of_target = nn.Linear(dim, hidden, bias=False)
        self.of_product = nn.Linear(dim, hidden, bias=False)
        self.activation = Dice(hidden)
        self.weigh = nn.Linear(hidden, 1)

    def forward(self, history: Tensor, there: Tensor, target: Tensor) -> Tensor:
        hidden = self.of_history(history) + self.of_target(target)[:, None] + self.of_product(history * target[:, None])
        weights = history.new_zeros(there.shape).masked_scatter(there, self.weigh(self.activation(hidden[there])))
        return (weights[:, :, None] * history).sum(dim=1)


class DIN(Twin):
    """The history is weighed against the item."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attentions = nn.ModuleList([Attention(shape.dim)])
        layers = [nn.Linear(self.width, 80), Dice(80), nn.Linear(80, 40), Dice(40), nn.Linear(40, 1)]
        self.deep = nn.Sequential(*layers)

    def asked(self, keys: Tensor, item: Tensor) -> Tensor:
        return self.attentions[0](self.rows(keys), keys > 0, self.rows(item))

    def forward(self, samples: Samples) -> Tensor:
        *others, history = self.shape.fields
        fields = self.means(self.rows, samples, tuple(others)).flatten(1)
        asked = self.asked(samples.keys[history], samples.keys["item"][:, 0])
        return self.deep(torch.cat([fields, asked, samples.dense], dim=1))[:, 0]


def turned(x: Tensor) -> Tensor:
    """RoPE: two neighbouring values of `x[B, heads, rows, d]` are turned by an angle that grows with the row."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        layers = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self.feedforward = nn.Sequential(*layers)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.norm(x)).chunk(3, dim=2)
        queries, keys, values = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(turned(queries), turned(keys), values, seen)
        x = x + self.mix(found.transpose(1, 2).flatten(2))
        return x + self.feedforward(x)


class Encoder(nn.Module):
    """A first row, the history and behind its last row the item: what has become of that.

    Rows see themselves and those before; the item sees only those before.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, dim) * dim**-0.5)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, last: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(tokens), 1, -1), tokens * tokens.shape[2] ** 0.5], dim=1)
        rows = torch.arange(x.shape[1])
        item = (rows == last[:, None] + 1)[:, :, None] & (rows == last[:, None] + 1)[:, None]
        seen = ((rows <= rows[:, None]) & ~item)[:, None]
        for block in self.blocks:
            x = block(x, seen)
        return self.norm(x[torch.arange(len(x)), last + 1])


class Transformer(DIN):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        del self.attentions
        self.encoders = nn.ModuleList([Encoder(shape.dim)])
        self.deep = mlp(self.width, 128, 64)

    def asked(self, keys: Tensor, item: Tensor) -> Tensor:
        last = (keys > 0).sum(dim=1)
        keys = F.pad(keys, (0, 1)).scatter(1, last[:, None], item[:, None])
        return self.encoders[0](self.rows(keys), last)


class GraphSAGE(Twin):
    """One layer on sampled neighbours of the first two fields, which are the last two."""

    def __init__(self, shape: Shape, width: int = 64) -> None:
        super().__init__(shape)
        self.own = nn.ModuleList(nn.Linear(shape.dim, width) for _ in range(2))
        self.around = nn.ModuleList(nn.Linear(shape.dim, width, bias=False) for _ in range(2))
        self.deep = mlp(3 * width, 64)

    def forward(self, samples: Samples) -> Tensor:
        rows = self.means(self.rows, samples)
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


def adagrad(rows: Tensor, rate: float) -> torch.optim.Optimizer:
    """An accumulator for every value."""
    return torch.optim.Adagrad([rows], lr=rate, eps=1e-10)


def trained(twin: Twin, batches: Iterable[Samples], rate: float, dense_rate: float, *, row_wise: bool = True) -> None:
    """Adagrad for rows, Adam for all other weights, cross entropy; the batches as they come."""
    rows = [module.weight for module in twin.modules() if isinstance(module, nn.Embedding)]
    others = [p for p in twin.parameters() if all(p is not weight for weight in rows)]
    of_rows = RowWiseAdagrad if row_wise else adagrad
    optimizers = [torch.optim.Adam(others, lr=dense_rate), *(of_rows(weight, rate) for weight in rows)]
    twin.train()
    for batch in batches:
        twin.zero_grad()
        F.binary_cross_entropy_with_logits(twin(batch), batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()


@torch.no_grad()
def scores(twin: Twin, batches: Iterable[Samples]) -> Tensor:
    twin.eval()
    return torch.cat([twin(batch) for batch in batches])
