"""DLRM learns over Hotrow's tables what it learns over torch's own: within 0.1% AUC of `nn.EmbeddingBag`.

Both sides have the same batches, dense weights, optimizers and starting rows. The torch side shares nothing of the
way in between: keys become numbers of a fixed vocabulary, samples are spelled out, gradients are torch's own
sparse ones.

They agree to 1e-6 until rounding puts some ReLU's input on the other side of zero; from then on they part as two
seeds would, slowly. One short epoch keeps that below 0.02% (16 seeds on each log); losing every fourth update, or
taking Adagrad's sums from 0.1 instead of 0, costs more than 0.5%.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow import Batch, Embedded, Embeddings, Feature, JaggedRows, Table
from hotrow.data import DataSet, Reader, prepare
from hotrow.data.synth import SynthSettings, write_log
from hotrow.embedded import PooledGroup
from hotrow.models import DLRMSettings, ModelInputs, build
from hotrow.objectives.binary_metrics import BinaryMetrics
from hotrow.store.optimizers import Adagrad
from hotrow.store.store import RowStore
from hotrow.table import Uniform

DIM = 8
INIT = Uniform(scale=0.01)
ADAGRAD = Adagrad(lr=0.05)


class EmbeddingBags(nn.Module):
    """A module of `nn.EmbeddingBag` for pooled features and `nn.Embedding` for sequences; features of a table share
    its weight. `keys` are each table's distinct keys, sorted: a key's place among them is its number.
    """

    def __init__(
        self, tables: Sequence[Table], features: Sequence[Feature], keys: Mapping[str, np.ndarray], seed: int
    ) -> None:
        super().__init__()
        self.features, self.keys = features, keys
        rows = {t.name: nn.Parameter(torch.from_numpy(RowStore(t, seed).initial(keys[t.name]))) for t in tables}
        self.lookups = nn.ModuleDict({f.name: _torch_lookup(f, rows[f.table]) for f in features})

    def forward(self, batch: Batch) -> Embedded:
        batch = batch.expand()
        pooled: dict[str, Tensor] = {}
        sequences: dict[str, JaggedRows] = {}
        for feature in self.features:
            bags, lookup = batch[feature.name], self.lookups[feature.name]
            numbers = torch.from_numpy(np.searchsorted(self.keys[feature.table], bags.values.numpy()))
            if feature.pooling == "sequence":
                sequences[feature.name] = JaggedRows(lookup(numbers), bags.offsets, None)
            else:
                pooled[feature.name] = lookup(numbers, bags.offsets)
        side_by_side = torch.cat(tuple(pooled.values()), dim=1)
        return Embedded([PooledGroup(tuple(pooled), (DIM,) * len(pooled), side_by_side, None)], sequences)


def _torch_lookup(feature: Feature, rows: nn.Parameter) -> nn.Module:
    if feature.pooling == "sequence":
        lookup: nn.Module = nn.Embedding(*rows.shape, sparse=True)
    else:
        lookup = nn.EmbeddingBag(*rows.shape, mode=feature.pooling, sparse=True, include_last_offset=True)
    lookup.weight = rows
    return lookup


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small gain nothing from more threads, and sums keep one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both_aucs(data: DataSet) -> tuple[float, float]:
    """Test AUC after one epoch of DLRM over Hotrow's tables, and over torch's."""
    train = list(Reader(data, "train", 1024, seed=1))
    test = list(Reader(data, "test", 1024, shuffle=False))
    features = data.schema.feature_settings()
    tables = [
        Table(name=name, dim=DIM, optimizer=ADAGRAD, init=INIT) for name in dict.fromkeys(f.table for f in features)
    ]
    inputs = ModelInputs(features, {f.name: DIM for f in features}, len(data.schema.dense))

    hotrow = Embeddings(tables, features, seed=7)
    ours = trained_auc(hotrow, hotrow.step, inputs, train, test)

    bags = EmbeddingBags(tables, features, distinct_keys(features, train + test), seed=7)
    adagrad = torch.optim.Adagrad(bags.parameters(), lr=ADAGRAD.lr, eps=ADAGRAD.eps)

    def step() -> None:
        adagrad.step()
        adagrad.zero_grad()

    return ours, trained_auc(bags, step, inputs, train, test)


def distinct_keys(features: Sequence[Feature], batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """The keys of each table in all the batches, sorted."""
    return {
        table: np.unique(
            np.concatenate([batch[f.name].values.numpy() for f in features if f.table == table for batch in batches])
        )
        for table in {f.table for f in features}
    }


def trained_auc(
    embeddings: nn.Module,
    step: Callable[[], None],
    inputs: ModelInputs,
    train: Sequence[Batch],
    test: Sequence[Batch],
) -> float:
    """The test AUC of a fresh DLRM over `embeddings`, trained on each batch once; `step` updates the tables."""
    torch.manual_seed(3)
    model = build(DLRMSettings(), inputs)
    dense = torch.optim.Adam(model.parameters(), lr=0.002)
    for batch in train:
        loss = F.binary_cross_entropy_with_logits(model(embeddings(batch), batch.dense), batch.labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        step()

    metrics = BinaryMetrics()
    embeddings.eval()
    with torch.no_grad():
        for batch in test:
            metrics.update(model(embeddings(batch), batch.dense), batch.labels)
    return metrics.compute()["auc"]


def test_dlrm_on_the_criteo_sample_is_within_a_thousandth_of_its_auc_with_embedding_bags(
    shared_data: Path, tmp_path: Path
) -> None:
    log = shared_data / "criteo.tsv.zst"
    data = prepare(log, tmp_path / "data", format="criteo", split="samples:64000", validation=0, bad="missing")

    ours, torchs = both_aucs(data)

    assert min(ours, torchs) > 0.75
    assert ours == pytest.approx(torchs, rel=1e-3)


def test_dlrm_on_the_demos_log_is_within_a_thousandth_of_its_auc_with_embedding_bags(tmp_path: Path) -> None:
    write_log(SynthSettings(samples=60_000), tmp_path / "log")
    data = prepare(tmp_path / "log", tmp_path / "data", split="last:0.2", validation=0)

    ours, torchs = both_aucs(data)

    assert min(ours, torchs) > 0.68
    assert ours == pytest.approx(torchs, rel=1e-3)
