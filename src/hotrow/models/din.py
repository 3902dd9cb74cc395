"""DIN (Zhou et al., 2018): a history is summed with weights that depend on the item to be scored.

A weight is a small network on (h, t, h * t) for each history row h and target t; the authors' h - t is a
linear combination of the first two, so leaving it out loses nothing. The first layer splits into a part of
h, computed once for each unique history row, a part of t, once for each unique target, and a part of h * t,
which alone needs each distinct pair of history and target. Samples that share both are computed once; a row
that several windows of a sliding history share counts as one. Nothing is padded: attention runs on the rows
there are. As in the paper the weights are not normalized.

Dice's statistics count a row as often as the batch has it, so deduplication does not change them; with
several trainers they are each trainer's own.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hotrow.data.batch import ranges
from hotrow.embedded import Embedded, JaggedRows, PooledGroup, pairs
from hotrow.models.histories import targets_of
from hotrow.models.joint import Joint
from hotrow.models.model import ModelInputs, ModelSettings, RankingModel, Widths, linear


class DINSettings(ModelSettings):
    """`targets` says which pooled feature each history is weighted against, history = "target".

    If it is empty, a sequence is a history if exactly one pooled feature looks up the same table: its target.
    Other sequences are averaged. `attention` is the hidden width of the weighing network, `deep` are the
    hidden layers of the MLP.
    """

    name: Literal["din"] = "din"
    targets: dict[str, str] = Field(default_factory=dict)
    attention: int = Field(36, ge=1)
    deep: Widths = (80, 40)
    activation: Literal["dice", "prelu"] = "dice"

    def build(self, inputs: ModelInputs) -> DIN:
        return DIN(self, inputs)


class Dice(nn.Module):
    """PReLU whose turning point follows the data: p x + (1 - p) alpha x, p the sigmoid of x normalized."""

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-8) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(width))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.mean: Tensor
        self.variance: Tensor

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """`counts` says how many samples of the batch each row of x stands for; one if not given.

        Statistics of bfloat16 values are taken, kept and used in float32.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance = self.mean, self.variance
        if self.training and len(x):
            weight = x.new_ones(len(x)) if counts is None else counts.to(x.dtype)
            weight = (weight / weight.sum())[:, None]
            mean = (weight * x).sum(dim=0)
            variance = (weight * (x - mean).square()).sum(dim=0)
            self.mean.lerp_(mean.detach(), self.momentum)
            self.variance.lerp_(variance.detach(), self.momentum)
        p = torch.sigmoid((x - mean) * torch.rsqrt(variance + self.eps))
        return p * x + (1 - p) * self.alpha * x


class Attention(nn.Module):
    """The local activation unit: the weighted sum of a history's rows."""

    def __init__(self, dim: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.of_history = linear(dim, hidden)
        self.of_target = linear(dim, hidden, bias=False)
        self.of_product = linear(dim, hidden, bias=False)
        self.activation = _activation(activation, hidden)
        self.weigh = linear(hidden, 1)

    def forward(
        self, history: JaggedRows, targets: Tensor, target_inverse: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`[P, D]` for the distinct pairs of history and target there are, and the inverse that expands it.

        Histories and targets `[S, D]` are on the unique samples of their groups.
        """
        histories, device = history.offsets.shape[0] - 1, history.offsets.device
        history_P, target_P, inverse = pairs((histories, history.inverse), (targets.shape[0], target_inverse), device)
        lengths_P = history.lengths.index_select(0, history_P)
        count = lengths_P.shape[0]  # not `len`, which torch.export would take for a constant
        row_N, _ = ranges(history.starts.index_select(0, history_P), lengths_P)
        pair_N = torch.repeat_interleave(torch.arange(count, device=device), lengths_P, output_size=row_N.shape[0])

        rows_ND = history.values.index_select(0, row_N)
        target_N = target_P.index_select(0, pair_N)
        hidden = self.of_history(history.values).index_select(0, row_N)
        hidden = hidden + self.of_target(targets).index_select(0, target_N)
        hidden = hidden + self.of_product(rows_ND * targets.index_select(0, target_N))
        counts_N = None
        if inverse is not None:
            counts_N = torch.bincount(inverse, minlength=count).index_select(0, pair_N)
        weight_N1 = self.weigh(_activate(self.activation, hidden, counts_N))
        attended = rows_ND.new_zeros(count, rows_ND.shape[1]).index_add(0, pair_N, weight_N1 * rows_ND)
        return attended, inverse


class DIN(RankingModel):
    """Attended histories beside all other features and dense inputs, and an MLP on them."""

    def __init__(self, settings: DINSettings, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self.targets = targets_of("din", settings.targets, inputs)
        self.others = tuple(name for name in inputs.names if name not in self.targets)
        self.attentions = nn.ModuleList(
            Attention(inputs.dims[history], settings.attention, settings.activation) for history in self.targets
        )
        width = inputs.width + inputs.dense
        layers: list[nn.Module] = []
        for hidden in settings.deep:
            layers += [linear(width, hidden), _activation(settings.activation, hidden)]
            width = hidden
        self.deep = nn.Sequential(*layers, linear(width, inputs.outputs))

    def forward(self, embedded: Embedded, dense: Tensor | None = None) -> Tensor:
        groups = self.unique_groups(embedded, self.others)
        for attention, (history, target) in zip(self.attentions, self.targets.items(), strict=True):
            attended, inverse = attention(embedded.sequence(history), *embedded.unique(target))
            groups.append(PooledGroup((history,), (attended.shape[1],), attended, inverse))
        joint = Joint((*self.others, *self.targets), groups, self.dense_inputs(dense))
        return self.given(joint.through(self.deep))


def _activation(name: str, width: int) -> nn.Module:
    return Dice(width) if name == "dice" else nn.PReLU(width)


def _activate(activation: nn.Module, x: Tensor, counts: Tensor | None) -> Tensor:
    y: Tensor = activation(x, counts) if isinstance(activation, Dice) else activation(x)
    return y
