"""The sides of `hotrow bench hot`: the same DLRM on the same batches, with rows in four places.

Everything on a GPU that can be a CUDA graph is one, on every side: with hot rows or staged ones the whole step, with
tables on the host or with FBGEMM's cache the dense part (`DenseGraph`), whose input and its gradient are then copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded, PooledGroup
from hotrow.embeddings import Embeddings
from hotrow.models import ModelInputs
from hotrow.models.dlrm import DLRM, DLRMSettings
from hotrow.plan import Plan
from hotrow.table import Feature, Table
from hotrow.tiers import DeviceTier
from hotrow.train.dense import DenseAdam, DenseStep
from hotrow.train.graph import GraphStep
from hotrow.train.pipeline import Pipeline

MODEL = DLRMSettings(bottom=(512, 256, 64), top=(512, 256))
DENSE = 13
_loss = F.binary_cross_entropy_with_logits


class Drawn(NamedTuple):
    """One batch: row numbers a table, and the same as keys with dense inputs and labels."""

    numbers: list[npt.NDArray[np.int64]]
    batch: Batch


Trains = Callable[[Sequence[Drawn]], None]


class OnDevice:
    """Pooling and dense part on the GPU; rows there as the plan has it, the others staged for each step."""

    def __init__(self, tables: Sequence[Table], plan: Plan | None) -> None:
        self.embeddings = Embeddings(tables, _features(tables), plan=plan, device="cuda")
        model = _model(tables, "cuda")
        self._step = GraphStep(self.embeddings, model, DenseStep(model, DenseAdam()), _loss)

    def __call__(self, batches: Sequence[Drawn]) -> None:
        with _threads(1):
            for _ in self._step.each(drawn.batch for drawn in batches):
                pass

    @property
    def tier(self) -> DeviceTier:
        tier = self.embeddings.router.tiers["device"]
        assert isinstance(tier, DeviceTier)
        return tier


class OnHost:
    """Tables on the host: rows are looked up, pooled and updated there. The dense part on `device`."""

    def __init__(self, tables: Sequence[Table], device: str, batch: int) -> None:
        self.embeddings = Embeddings(tables, _features(tables))
        self._model = _model(tables, device)
        self._dense = DenseStep(self._model, DenseAdam())
        self._graph = DenseGraph(self._model, self._dense, tables, batch) if device == "cuda" else None

    def __call__(self, batches: Sequence[Drawn]) -> None:
        threads = torch.get_num_threads() if self._graph is None else 1
        with _threads(threads), Pipeline((drawn.batch for drawn in batches), self.embeddings, ahead=4) as pipeline:
            for fetched in pipeline:
                embedded = self.embeddings.embed(fetched.lookup)
                if self._graph is None:
                    assert fetched.batch.labels is not None
                    loss = _loss(self._model(embedded, fetched.batch.dense), fetched.batch.labels)
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._dense.step()
                else:
                    rows = embedded.groups[0].rows
                    grad = self._graph(rows.detach(), fetched.batch)
                    rows.backward(self._graph.to_host(grad))  # type: ignore[no-untyped-call]
                pipeline.update()


def fbgemm(tables: Sequence[Table], cardinalities: Sequence[int], memory: int, batch: int, lr: float) -> Trains:
    """Tables in managed memory, with FBGEMM's cache on the device."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    dim = tables[0].dim
    managed = (EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)
    embeddings: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *managed) for rows in cardinalities],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=lr,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        cache_load_factor=min(1.0, memory / (4 * dim) / sum(cardinalities)),
    )
    embeddings.init_embedding_weights_uniform(-0.05, 0.05)
    model = _model(tables, "cuda")
    graph = DenseGraph(model, DenseStep(model, DenseAdam()), tables, batch)
    offsets = torch.arange(len(tables) * batch + 1, device="cuda")

    def train(batches: Sequence[Drawn]) -> None:
        with _threads(1):
            for drawn in batches:
                values = torch.from_numpy(np.concatenate(drawn.numbers)).pin_memory().to("cuda", non_blocking=True)
                rows = embeddings(values, offsets)
                rows.backward(graph(rows.detach(), drawn.batch))

    return train


class DenseGraph:
    """Forward, backward and optimizer of the dense part as one CUDA graph: pooled rows in, their gradient out."""

    def __init__(self, model: nn.Module, dense: DenseStep, tables: Sequence[Table], batch: int) -> None:
        self._model, self._dense = model, dense
        dense.on_device(torch.device("cuda"))
        self._names, self._dims = tuple(t.name for t in tables), tuple(t.dim for t in tables)
        self._rows = torch.zeros(batch, sum(self._dims), device="cuda")
        self._inputs = torch.zeros(batch, DENSE, device="cuda")
        self._labels = torch.zeros(batch, device="cuda")
        self._pinned = [torch.empty(t.shape, pin_memory=True) for t in (self._rows, self._inputs, self._labels)]
        self._back = torch.empty(self._rows.shape, pin_memory=True)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._grad = self._run()

    def __call__(self, rows: Tensor, batch: Batch) -> Tensor:
        """The gradient of the pooled rows, on the device."""
        assert batch.dense is not None and batch.labels is not None
        torch.cuda.current_stream().synchronize()  # the pinned memory is free again
        into = (self._rows, self._inputs, self._labels)
        for there, pinned, given in zip(into, self._pinned, (rows, batch.dense, batch.labels), strict=True):
            there.copy_(given if given.is_cuda else pinned.copy_(given), non_blocking=True)
        self._dense.begin_step()
        self._graph.replay()
        return self._grad

    def to_host(self, grad: Tensor) -> Tensor:
        """The gradient of the pooled rows, on the host."""
        self._back.copy_(grad, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._back

    def _run(self) -> Tensor:
        rows = self._rows.detach().requires_grad_()
        embedded = Embedded([PooledGroup(self._names, self._dims, rows, None)], {})
        self._dense.optimizer.zero_grad(set_to_none=True)
        _loss(self._model(embedded, self._inputs), self._labels).backward()  # type: ignore[no-untyped-call]
        self._dense.apply()
        assert rows.grad is not None
        return rows.grad


class _threads:
    """So many torch threads on the host: where a GPU computes, more would only take the row store's cores."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._before)


def _features(tables: Sequence[Table]) -> list[Feature]:
    return [Feature(name=table.name) for table in tables]


def _model(tables: Sequence[Table], device: str) -> DLRM:
    torch.manual_seed(0)
    return MODEL.build(ModelInputs(_features(tables), {t.name: t.dim for t in tables}, DENSE)).to(device)
