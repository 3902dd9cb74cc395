"""A sequence transformer: the item to be scored is the last token of a causal transformer over its history.

As in BST (Chen et al., 2019) the target attends to the history in every layer. Because attention is causal, as in
SASRec (Kang and McAuley, 2018), no history row ever sees the target: a history is encoded once, however many samples
share it, and each distinct pair of history and target costs one row more. All targets of a history ask its keys and
values in one product, so nothing of the history is repeated for them. The last layer computes only the keys and
values of history rows, for nobody asks for more. Histories that begin at the same stored row, as one that grows
does, are prefixes of each other and are encoded once together.

Positions turn queries and keys (RoPE, Su et al., 2021): what counts is how far back a row lies from the one that
asks, and so from the target, not its place in the list. A learned first row stands before every history, so that an
empty one is no special case. Layers run on the rows there are; only attention pads, histories of a like length
together, to at most twice their length. Dropout draws once for a history and all its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data.batch import ranges
from hotrow.embedded import Embedded, JaggedRows, PooledGroup, pairs
from hotrow.errors import SettingsError
from hotrow.models.histories import targets_of
from hotrow.models.joint import Joint
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, linear, mlp
from hotrow.models.padding import Padding, padding


class TransformerSettings(ModelSettings):
    """`targets` says which pooled feature each history is encoded for, history = "target"; found as din finds them.

    `width` is that of the encoder, the dim of the history's rows if not given. `deep` are the hidden layers of the
    MLP on the encoded target and all other features; other sequences are averaged.
    """

    name: Literal["transformer"] = "transformer"
    targets: dict[str, str] = Field(default_factory=dict)
    layers: int = Field(2, ge=1)
    heads: int = Field(2, ge=1)
    width: int | None = Field(None, ge=2, description="of the encoder; the dim of the history's rows if not given")
    feedforward: int = Field(4, ge=1, description="how many times wider the hidden layer of a block is")
    length: int = Field(64, ge=1, description="how many of a history's last rows are seen")
    dropout: float = Field(0.0, ge=0, lt=1)
    deep: Widths = (128, 64)

    def build(self, inputs: ModelInputs) -> Transformer:
        return Transformer(self, inputs)


class Bucket(NamedTuple):
    """Histories of a like length, and their targets, each padded to the longest of them.

    `visible[histories, 1, targets, rows]` is True where a target's history has a row.
    """

    rows: Padding
    targets: Padding
    visible: Tensor


class Layout(NamedTuple):
    """Where the rows of histories and targets stand while they are encoded; made once for all layers.

    Histories stand bucket after bucket, each its first row and then its own, `row_N` being 0 or one more than the
    number of the stored row. Targets stand in the order of their histories.
    """

    row_N: Tensor
    row_position_N: Tensor
    target_P: Tensor
    target_position_P: Tensor
    inverse: Tensor
    buckets: list[Bucket]


def lay_out(history: JaggedRows, targets: int, target_inverse: Tensor | None, length: int) -> Layout:
    """The last `length` rows of every history, and its targets."""
    device = history.offsets.device
    seen_S = history.lengths.clamp(max=length)
    begin_E, encoded_S = torch.unique(history.starts + history.lengths - seen_S, return_inverse=True)
    rows_E = torch.zeros_like(begin_E).scatter_reduce(0, encoded_S, seen_S, "amax") + 1
    pair = pairs((len(seen_S), history.inverse), (targets, target_inverse), device)
    encoded_P = encoded_S.index_select(0, pair.first)
    targets_E = torch.bincount(encoded_P, minlength=len(begin_E))

    # Lengths in one bucket differ at most twofold, numbers of targets fourfold.
    bucket_E = rows_E.float().log2().ceil() * 64 + (targets_E.clamp(min=1).float().log2() / 2).ceil()
    bucket_E, order_E = torch.sort(bucket_E, stable=True)
    begin_E, rows_E, targets_E = begin_E[order_E], rows_E[order_E], targets_E[order_E]
    _, order_P = torch.sort(_inverted(order_E).index_select(0, encoded_P), stable=True)
    place_P = _inverted(order_P)

    row_N, _ = ranges(begin_E, rows_E)
    position_N, _ = ranges(torch.zeros_like(rows_E), rows_E)
    position_P = seen_S.index_select(0, pair.first[order_P]) + 1
    sizes = torch.unique_consecutive(bucket_E, return_counts=True)[1].tolist()
    return Layout(
        row_N.masked_fill(position_N == 0, 0),
        position_N,
        pair.second[order_P],
        position_P,
        place_P if pair.inverse is None else place_P.index_select(0, pair.inverse),
        list(_buckets(torch.split(rows_E, sizes), torch.split(targets_E, sizes), position_P)),
    )


def _buckets(rows: Sequence[Tensor], targets: Sequence[Tensor], position_P: Tensor) -> Iterator[Bucket]:
    at = 0
    for rows_E, targets_E in zip(rows, targets, strict=True):
        of_rows, of_targets = padding(rows_E), padding(targets_E)
        seen = of_targets.pad(position_P[at : at + of_targets.size])
        at += of_targets.size
        yield Bucket(of_rows, of_targets, torch.arange(of_rows.longest, device=seen.device) < seen[:, None, :, None])


def _inverted(order: Tensor) -> Tensor:
    """Where each thing stands in an order."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Block(nn.Module):
    """Attention and a feed-forward layer, each on what is normalized before and added after."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = linear(width, 3 * width)
        self.mix = linear(width, width)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width), linear(width, hidden), nn.GELU(), linear(hidden, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, rows: Tensor, targets: Tensor, turn_N: Tensor, turn_P: Tensor, buckets: list[Bucket], last: bool
    ) -> tuple[Tensor, Tensor]:
        """Rows `[N, width]` of histories and of targets `[P, width]`; the last block gives no rows of histories."""
        width = self.width
        of_rows = self._project(self.norm(rows), width if last else 0, 3 * width)
        turned, values = of_rows[:, :-width], of_rows[:, -width:]
        asked = _turned(self._project(self.norm(targets), 0, width), turn_P)
        of_rows, of_targets = self._attend(_turned(turned, turn_N), values, asked, buckets)
        targets = targets + self.dropout(self.mix(of_targets))
        targets = targets + self.feedforward(targets)
        if last:
            return of_rows, targets
        rows = rows + self.dropout(self.mix(of_rows))
        return rows + self.feedforward(rows), targets

    def _project(self, normed: Tensor, first: int, last: int) -> Tensor:
        layer = self.queries_keys_values
        return F.linear(normed, layer.weight[first:last], layer.bias[first:last])

    def _attend(self, turned: Tensor, values: Tensor, asked: Tensor, buckets: list[Bucket]) -> tuple[Tensor, Tensor]:
        """Each history row to those before it and itself, each target to its history.

        `turned` are keys, and before them queries where history rows ask too. Right of a causal row there is only
        padding, so history rows need no mask.
        """
        rows, targets = [b.rows.size for b in buckets], [b.targets.size for b in buckets]
        of_rows, of_targets = [values.new_empty(0, self.width)], [values.new_empty(0, self.width)]
        for b, turned_b, values_b, asked_b in zip(
            buckets, torch.split(turned, rows), torch.split(values, rows), torch.split(asked, targets), strict=True
        ):
            *queries, keys = torch.split(self._heads(b.rows.pad(turned_b)), self.heads, dim=1)
            values_b = self._heads(b.rows.pad(values_b))
            for asking in queries:
                out = F.scaled_dot_product_attention(asking, keys, values_b, is_causal=True)
                of_rows.append(b.rows.unpad(out.transpose(1, 2).flatten(2)))
            if b.targets.size:
                asking = self._heads(b.targets.pad(asked_b))
                out = F.scaled_dot_product_attention(asking, keys, values_b, b.visible)
                of_targets.append(b.targets.unpad(out.transpose(1, 2).flatten(2)))
        return torch.cat(of_rows), torch.cat(of_targets)

    def _heads(self, x: Tensor) -> Tensor:
        """From `[histories, rows, heads * d]` to `[histories, heads, rows, d]`."""
        return x.view(*x.shape[:2], -1, self.width // self.heads).transpose(1, 2)


class Encoder(nn.Module):
    """Histories and their targets: for each distinct pair what the target has become after asking the history."""

    def __init__(self, dim: int, settings: TransformerSettings) -> None:
        super().__init__()
        width = settings.width or dim
        self.length = settings.length
        self.scale = dim**0.5
        self.project = nn.Identity() if settings.width is None else linear(dim, width)
        self.first = nn.Parameter(torch.randn(1, width) * width**-0.5)
        self.blocks = nn.ModuleList(
            Block(width, settings.heads, settings.feedforward * width, settings.dropout) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(width)
        half = width // settings.heads // 2
        self.register_buffer("speeds", 10_000.0 ** (-torch.arange(half) / half), persistent=False)
        self.speeds: Tensor

    def forward(self, history: JaggedRows, targets: Tensor, target_inverse: Tensor | None) -> tuple[Tensor, Tensor]:
        """`[P, width]` and for each sample of the batch which of them is its own."""
        with torch.no_grad():
            layout = lay_out(history, len(targets), target_inverse, self.length)
            turn_N, turn_P = self._turns(layout.row_position_N), self._turns(layout.target_position_P)
        stored = torch.cat([self.first, self.project(history.values * self.scale)])
        rows = stored.index_select(0, layout.row_N)
        asking = self.project(targets * self.scale).index_select(0, layout.target_P)
        for number, block in enumerate(self.blocks, 1):
            rows, asking = block(rows, asking, turn_N, turn_P, layout.buckets, number == len(self.blocks))
        return self.norm(asking), layout.inverse

    def _turns(self, position: Tensor) -> Tensor:
        """The turns of queries and keys at these positions, `[N, 1, dim of a head / 2]`."""
        angles = position[:, None, None] * self.speeds
        return torch.polar(torch.ones_like(angles), angles)


class Transformer(RankingModel):
    """Targets that asked their histories, beside all other features and dense inputs, and an MLP on them."""

    static_shapes = False

    def __init__(self, settings: TransformerSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self.targets = targets_of("transformer", settings.targets, inputs)
        self.others = tuple(name for name in inputs.names if name not in self.targets)
        widths = {history: settings.width or inputs.dims[history] for history in self.targets}
        for history, width in widths.items():
            if width % (2 * settings.heads):
                raise SettingsError(
                    f"transformer: {settings.heads} heads do not divide the width {width} of the encoder of {history} "
                    f"into even parts; choose a width or a dim of its table that 2 x heads divides."
                )
        self.encoders = nn.ModuleList(Encoder(inputs.dims[history], settings) for history in self.targets)
        width = sum(inputs.dims[name] for name in self.others) + sum(widths.values()) + inputs.dense
        self.deep = mlp(width, settings.deep, inputs.outputs, settings.dropout)

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        groups = self.unique_groups(embedded, self.others)
        for encoder, (history, target) in zip(self.encoders, self.targets.items(), strict=True):
            rows, inverse = encoder(embedded.sequence(history), *embedded.unique(target))
            groups.append(PooledGroup((history,), (rows.shape[1],), rows, inverse))
        joint = Joint((*self.others, *self.targets), groups, self.dense_inputs(dense))
        return self.given(joint.through(self.deep))


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Queries and keys turned by their positions, each two neighbouring values as one complex number.

    PyTorch has no complex numbers of bfloat16: such values are turned in float32.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    as_complex = torch.view_as_complex(exact.view(len(x), -1, turn.shape[2], 2))
    return torch.view_as_real(as_complex * turn).flatten(1).to(x.dtype)
