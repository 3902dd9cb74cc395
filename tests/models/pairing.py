"""A run and its plain twin on the same batches in the same order, from the same start: no noise is between them."""

from dataclasses import dataclass

import numpy as np
import plain_twins as plain
import torch
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.synth import auc
from hotrow.run import Run
from hotrow.train.evaluate import Ranker
from hotrow.train.trainer import train

SCALES = {"weight_scale", "weight_scales", "pair_scale"}
"""Buffers of Hotrow's models that a twin has as plain numbers."""


def auc_of(scores: Tensor, labels: Tensor) -> float:
    found = auc(scores.double().numpy(), labels.numpy())
    assert found is not None
    return found


@dataclass(frozen=True)
class Numbers:
    """The keys of every table as numbers from 1 on."""

    keys: dict[str, np.ndarray]

    @property
    def count(self) -> int:
        return sum(len(keys) for keys in self.keys.values())

    def of(self, table: str, keys: np.ndarray) -> np.ndarray:
        names = list(self.keys)
        before = sum(len(self.keys[name]) for name in names[: names.index(table)])
        return np.searchsorted(self.keys[table], keys) + before + 1


class Pair:
    """What a run starts from and what it reads, in numbers for a twin."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ranker = Ranker(run)
        self.table_of = {feature.name: feature.table for feature in self.ranker.model.inputs.features}
        reader = self.ranker.reader("train", shuffle=True)
        learned = [batch.expand() for _ in range(run.train.epochs) for batch in reader]
        tested = [batch.expand() for batch in self.ranker.whole_reader("test")]
        self.numbers = self._numbers([*learned, *tested])
        self.learned = [self._samples(batch) for batch in learned]
        self.tested = [self._samples(batch) for batch in tested]

    def _numbers(self, batches: list[Batch]) -> Numbers:
        found: dict[str, list[np.ndarray]] = {table: [] for table in sorted(set(self.table_of.values()))}
        for batch in batches:
            for group in batch.groups:
                for name in group.features:
                    found[self.table_of[name]].append(np.unique(group[name].values.numpy()))
        return Numbers({table: np.unique(np.concatenate(keys)) for table, keys in found.items()})

    def _samples(self, batch: Batch) -> plain.Samples:
        keys = {}
        for group in batch.groups:
            for name in group.features:
                bags = group[name]
                there = torch.arange(int(bags.lengths.max())) < bags.lengths[:, None]
                numbers = torch.from_numpy(self.numbers.of(self.table_of[name], bags.values.numpy()))
                keys[name] = torch.zeros(there.shape, dtype=torch.int64).masked_scatter(there, numbers)
        assert batch.dense is not None and batch.labels is not None
        return plain.Samples(keys, batch.dense, batch.labels)

    @property
    def shape(self) -> plain.Shape:
        inputs = self.ranker.model.inputs
        dim = inputs.dims[inputs.names[0]] - self.run.model.extra_row_values
        return plain.Shape(self.numbers.count, inputs.names, inputs.dense, dim)

    @torch.no_grad()
    def start(self, twin: plain.Twin, without: tuple[str, ...] = ()) -> None:
        """Gives a twin the rows and weights that the run starts from, but those that begin as one of `without`."""
        rows = [self.ranker.embeddings.read(t, torch.from_numpy(keys)) for t, keys in self.numbers.keys.items()]
        state = dict(self.ranker.model.state_dict())
        dim = self.shape.dim
        none = torch.zeros(1, rows[0].shape[1])
        state["rows.weight"] = torch.cat([none, *rows])[:, :dim]
        if self.run.model.extra_row_values:
            state["weights.weight"] = torch.cat([none, *rows])[:, dim:]
        state = {name: value for name, value in state.items() if not name.startswith(without or ("-",))}
        missing, unknown = twin.load_state_dict(state, strict=False)
        missing = [name for name in missing if ".normal." not in name and not name.startswith(without or ("-",))]
        unknown = [n for n in unknown if n not in SCALES and not n.endswith((".mean", ".variance"))]
        assert not missing and not unknown, (missing, unknown)

    def of_twin(self, twin: plain.Twin, *, row_wise: bool = True) -> float:
        """The AUC of a twin that is trained on what the run is trained on."""
        run = self.run
        plain.trained(twin, self.learned, run.tables.optimizer.lr, run.optimizer.lr, row_wise=row_wise)
        return auc_of(plain.scores(twin, self.tested), torch.cat([batch.labels for batch in self.tested]))

    def of_run(self) -> float:
        return train(self.run).metrics["auc"]
