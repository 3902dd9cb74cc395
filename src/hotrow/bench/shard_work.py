"""What the ranks of `hotrow bench shard` train on: histories of keys by Zipf's law, or a real log, and a light model.

A sample is `tables` histories of `length` keys each, and a label. Every key is drawn for itself by Zipf's law, so
nothing repeats but what is popular; a key's number says nothing of how often it is used, for whoever cuts tables by
numbers would have all hot rows on one rank else. Each batch is drawn anew, from its rank and number alone.

The model weighs each row of a history by a learned score, adds them up and scores the sums by a small MLP: as little
as a sequence model can do, so that what is seen is the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hotrow import Batch, Feature, Table
from hotrow.data.batch import Jagged
from hotrow.plan.cost import HOT, TableUse
from hotrow.plan.topology import Topology
from hotrow.plan.zipf import Zipf
from hotrow.store.optimizers import RowWiseAdagrad

LR = 0.02
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """How much a step takes: `batch` samples of each rank, each with a history of `length` keys in every table."""

    tables: int
    rows: int
    dim: int
    batch: int
    length: int
    zipf: float

    def told(self) -> dict[str, Any]:
        """For the report's workload."""
        return asdict(self)

    @property
    def lookups(self) -> int:
        """Of one table, a rank and a step."""
        return self.batch * self.length

    @cached_property
    def settings(self) -> list[Table]:
        return [Table(name=f"t{i}", dim=self.dim, optimizer=RowWiseAdagrad(lr=LR)) for i in range(self.tables)]

    @cached_property
    def features(self) -> list[Feature]:
        return [Feature(name=t.name, table=t.name, pooling="sequence") for t in self.settings]

    @cached_property
    def keys(self) -> Ints:
        """The key of each row, the most used first."""
        return np.random.default_rng(7).permutation(self.rows)

    def drawn(self, rank: int, number: int) -> list[Ints]:
        """The keys of one batch of a rank, table by table: the histories of its samples one behind the other."""
        random, law = np.random.default_rng((rank, number)), Zipf(self.zipf, self.rows)
        return [self.keys[law.draw(random, self.lookups)] for _ in range(self.tables)]

    def batch_of(self, keys: Sequence[Ints]) -> Batch:
        offsets = torch.arange(0, self.lookups + 1, self.length)
        return Batch.plain(
            {f.name: Jagged(torch.from_numpy(k), offsets) for f, k in zip(self.features, keys, strict=True)}
        )

    def used(self, topology: Topology) -> list[TableUse]:
        """How ranks use the tables, as the law has it."""
        law = Zipf(self.zipf, self.rows)
        found = [law.use(table, self.lookups, topology) for table in self.settings]
        return [TableUse(u.table, u.row_bytes, u.counts, u.keys, u.use, hot=self.keys[:HOT]) for u in found]


class LightModel(nn.Module):
    """Histories of rows to a logit."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.score = nn.ModuleList(nn.Linear(dim, 1) for _ in range(tables))
        self.deep = nn.Sequential(nn.Linear(tables * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, histories: Sequence[Tensor]) -> Tensor:
        """`histories[table]` is `[batch, length, dim]`."""
        sums = [
            torch.bmm(torch.softmax(score(rows_BLD), dim=1).transpose(1, 2), rows_BLD).squeeze(1)
            for score, rows_BLD in zip(self.score, histories, strict=True)
        ]
        logits: Tensor = self.deep(torch.cat(sums, dim=1)).squeeze(1)
        return logits
