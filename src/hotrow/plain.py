"""`PlainEmbeddings`: what every tier, plan and kernel must equal. One process, plain PyTorch, no native code.

A table is one float32 tensor and a dictionary from key to its row in it; lookups are torch's own
`embedding_bag` and `embedding`, and an update is a few tensor operations on the touched rows. It costs a
Python loop over keys, and is the specification for all that the fast parts leave open:

- A row is touched by a step if a training forward since the last step looked it up and `backward` came
  through that forward, be the gradient of this row, or of its whole table, zero. Several forwards before one
  step make one update with the sum of their gradients.
- With weights, "sum" is the sum of weight x row; "mean" divides it by the sum of weights, 0 where that is 0.
- A bfloat16 table computes in float32 and rounds to the nearest each time a row is written. The store rounds
  updates up or down by chance, so for such tables it equals this one on average and not bit by bit.

Admission and eviction are the store's own and are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data.batch import Batch, Jagged
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError, SettingsError, nearest
from hotrow.store.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer, RowWiseAdagrad
from hotrow.table import Feature, Table

Initial = Callable[[Table, int, Tensor], Tensor]
"""The values rows start from, `[n, dim]`, for a table, a seed and keys `[n]`."""


class PlainEmbeddings(nn.Module):
    """Looks batches up in plain tables; `step` applies the gradients that `backward` left."""

    def __init__(
        self, tables: Sequence[Table], features: Sequence[Feature], *, initial: Initial, seed: int = 0
    ) -> None:
        super().__init__()
        _check(tables, features)
        self._features = {feature.name: feature for feature in features}
        self._tables = {table.name: _PlainTable(table, seed, initial) for table in tables}
        self._pending: list[dict[str, _Read]] = []

    def forward(self, batch: Batch) -> Embedded:
        """The rows of a batch. In training mode, with gradients on, keys not seen before get rows here."""
        learn = self.training and torch.is_grad_enabled()
        bags = {name: batch[name] for name in self._features}
        reads: dict[str, _Read] = {}
        at_of: dict[str, Tensor] = {}
        for table in self._tables.values():
            mine = [name for name, feature in self._features.items() if feature.table == table.settings.name]
            if mine:
                read = table.read(torch.cat([bags[name].values for name in mine]), learn)
                reads[table.settings.name] = read
                at_of |= zip(mine, torch.split(read.at, [len(bags[name].values) for name in mine]), strict=True)
        if learn:
            self._pending.append(reads)

        pooled: list[PooledGroup] = []
        sequences: dict[str, JaggedRows] = {}
        for group in batch.groups:
            side_by_side: dict[str, Tensor] = {}
            for name in group.features:
                if name not in self._features:
                    continue
                feature = self._features[name]
                values, at = reads[feature.table].values, at_of[name]
                if feature.pooling == "sequence":
                    sequences[name] = _sequence(name, values, at, bags[name], group.inverse)
                else:
                    side_by_side[name] = _pool(values, at, bags[name], feature.pooling == "mean")
            if side_by_side:
                dims = tuple(rows.shape[1] for rows in side_by_side.values())
                rows = torch.cat(tuple(side_by_side.values()), dim=1)
                pooled.append(PooledGroup(tuple(side_by_side), dims, rows, group.inverse))
        return Embedded(pooled, sequences)

    def step(self) -> None:
        """Applies every table's optimizer to the rows touched since the last step."""
        done = [reads for reads in self._pending if any(r.values.grad is not None for r in reads.values())]
        self._pending = []
        for name, table in self._tables.items():
            table.step([reads[name] for reads in done if name in reads])

    def read(self, table: str, keys: Tensor) -> Tensor:
        """The rows of `keys` as they are now, `[n, dim]`; a key without a row reads as it would start."""
        if table not in self._tables:
            raise SettingsError(f'There is no table "{table}".{nearest(table, self._tables)}')
        read = self._tables[table].read(keys, learn=False)
        return read.values[read.at]


class _Read(NamedTuple):
    """A table's rows as a forward found them, and for each key looked up which of them is its own."""

    values: Tensor
    at: Tensor


class _PlainTable:
    """One table: rows `values[n, dim]` in the order their keys came, with state and clock beside them."""

    def __init__(self, settings: Table, seed: int, initial: Initial) -> None:
        optimizer = settings.optimizer
        self.settings, self._seed, self._initial = settings, seed, initial
        self._row_of: dict[int, int] = {}
        self._values = torch.zeros(0, settings.dim)
        self._state = torch.zeros(0, optimizer.state_dim(settings.dim))
        self._clocks = torch.zeros(0, dtype=torch.int64)
        self._steps = 0

    def read(self, keys: Tensor, learn: bool) -> _Read:
        """The rows of `keys`. With `learn`, new keys get rows, and the values take gradients."""
        wanted: list[int] = keys.tolist()
        new = [key for key in dict.fromkeys(wanted) if key not in self._row_of]
        count = len(self._row_of)
        row_of_new = {key: count + i for i, key in enumerate(new)}
        values = torch.cat([self._values, self._start(new)])
        if learn:
            self._values = values
            self._state = torch.cat([self._state, self._start_state(len(new))])
            self._clocks = torch.cat([self._clocks, torch.zeros(len(new), dtype=torch.int64)])
            self._row_of |= row_of_new
        at = torch.tensor([self._row_of[k] if k in self._row_of else row_of_new[k] for k in wanted], dtype=torch.int64)
        return _Read(values.detach().requires_grad_(learn), at)

    def step(self, reads: Sequence[_Read]) -> None:
        """One step of the optimizer on the rows of `reads`, with the sum of their gradients."""
        optimizer = self.settings.optimizer
        lr = optimizer.lr_at(self._steps)
        self._steps += 1
        if not reads:
            return
        touched = torch.unique(torch.cat([read.at for read in reads]))
        grad = torch.zeros(len(touched), self.settings.dim)
        for sparse in (read.values.grad for read in reads):
            if sparse is not None:
                sparse = sparse.coalesce()
                grad.index_add_(0, torch.searchsorted(touched, sparse.indices()[0]), sparse.values())

        rows, state = self._values[touched], self._state[touched]
        first = self._clocks[touched] == 0
        grad = _clipped(grad, optimizer) + optimizer.weight_decay * rows
        rows = rows - lr * _direction(optimizer, grad, state, first, self._steps)
        if optimizer.bound is not None:
            rows = rows.clamp(-optimizer.bound, optimizer.bound)
        self._values[touched] = self._rounded(rows)
        self._state[touched] = state
        self._clocks[touched] += 1

    def _start(self, keys: list[int]) -> Tensor:
        if not keys:
            return torch.zeros(0, self.settings.dim)
        return self._rounded(self._initial(self.settings, self._seed, torch.tensor(keys, dtype=torch.int64)))

    def _start_state(self, count: int) -> Tensor:
        optimizer = self.settings.optimizer
        start = optimizer.initial if isinstance(optimizer, Adagrad | RowWiseAdagrad) else 0.0
        return torch.full((count, optimizer.state_dim(self.settings.dim)), start)

    def _rounded(self, rows: Tensor) -> Tensor:
        return rows.to(getattr(torch, self.settings.dtype)).to(torch.float32)


def _pool(values: Tensor, at: Tensor, bags: Jagged, mean: bool) -> Tensor:
    """The sum or mean of each bag's rows, `[S, dim]`; zeros for an empty bag."""
    if bags.weights is None:
        mode = "mean" if mean else "sum"
        return F.embedding_bag(at, values, bags.offsets, mode=mode, sparse=True, include_last_offset=True)
    pooled = F.embedding_bag(
        at,
        values,
        bags.offsets,
        mode="sum",
        sparse=True,
        include_last_offset=True,
        per_sample_weights=bags.weights,
    )
    if not mean:
        return pooled
    bag_of = torch.repeat_interleave(torch.arange(len(bags.lengths)), bags.lengths)
    total = torch.zeros(len(bags.lengths)).index_add_(0, bag_of, bags.weights)[:, None]
    return torch.where(total == 0, 0.0, pooled / torch.where(total == 0, 1.0, total))


def _sequence(name: str, values: Tensor, at: Tensor, bags: Jagged, inverse: Tensor | None) -> JaggedRows:
    if bags.weights is not None:
        raise BatchError(
            f"Feature {name} is a sequence, which has no use for the weights the batch brings; "
            f"put it in a group without weights."
        )
    return JaggedRows(F.embedding(at, values, sparse=True), bags.offsets, inverse)


def _clipped(grad: Tensor, optimizer: Optimizer) -> Tensor:
    """First each value, then each row's norm."""
    if optimizer.clip_value is not None:
        grad = grad.clamp(-optimizer.clip_value, optimizer.clip_value)
    if optimizer.clip_norm is not None:
        norm = grad.norm(dim=1, keepdim=True)
        grad = torch.where(norm > optimizer.clip_norm, grad * (optimizer.clip_norm / norm), grad)
    return grad


def _direction(optimizer: Optimizer, grad: Tensor, state: Tensor, first: Tensor, step: int) -> Tensor:
    """What times the learning rate is taken off the rows; `state` moves on in place.

    `first` says which rows were never updated; `step` is the table's count of steps, this one included.
    """
    match optimizer:
        case SGD():
            return grad
        case Momentum(momentum=momentum, dampening=dampening):
            state.copy_(torch.where(first[:, None], grad, momentum * state + (1 - dampening) * grad))
            return grad + momentum * state if optimizer.nesterov else state
        case Adagrad(eps=eps):
            state += grad.square()
            return grad / (state.sqrt() + eps)
        case RowWiseAdagrad(eps=eps):
            state += grad.square().mean(dim=1, keepdim=True)
            return grad / (state.sqrt() + eps)
        case Adam(beta1=beta1, beta2=beta2, eps=eps):
            moment, square = state.chunk(2, dim=1)
            moment.mul_(beta1).add_((1 - beta1) * grad)
            square.mul_(beta2).add_((1 - beta2) * grad.square())
            correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
            direction: Tensor = correction * moment / (square.sqrt() + eps)
            return direction


def _check(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Refuses names that stand twice, tables that are not there, and what plain tables do not have."""
    names = [table.name for table in tables]
    for what, given in (("Table", names), ("Feature", [feature.name for feature in features])):
        for name in given:
            if given.count(name) > 1:
                raise SettingsError(f"{what} {name} is given twice; each name must be its own.")
    for feature in features:
        if feature.table not in names:
            raise SettingsError(
                f'Feature {feature.name} looks up table "{feature.table}", which is not there.'
                f"{nearest(feature.table, names)}"
            )
    for table in tables:
        if table.admission is not None or table.eviction is not None:
            raise SettingsError(f"Table {table.name}: plain tables keep every row; take away admission and eviction.")
