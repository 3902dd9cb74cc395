"""A step as one CUDA graph computes what the same step computes kernel by kernel."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import DataError, SettingsError
from hotrow.models import DLRMSettings, ModelInputs
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD
from hotrow.table import Eviction, Fill
from hotrow.train.dense import DenseSGD, DenseStep
from hotrow.train.graph import GraphStep, _Captured

evicting = pytest.mark.parametrize("settings", [{}, {"eviction": Eviction(capacity=40)}], ids=["", "evicting"])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def made(device: str, **settings) -> tuple[Embeddings, torch.nn.Module, DenseStep]:
    tables = [Table(name="a", dim=8), Table(name="b", dim=8, **settings)]
    features = [Feature(name="a"), Feature(name="b")]
    plan = Plan({"a": (Share("device", np.arange(20)), Share("host")), "b": (Share("host"),)})
    torch.manual_seed(0)
    model = DLRMSettings().build(ModelInputs(features, {"a": 8, "b": 8}, 3)).to(device)
    return Embeddings(tables, features, plan=plan, device=device), model, DenseStep(model, DenseSGD(lr=0.1))


def batches(count: int, size: int = 64) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        Batch.plain(
            {name: torch.randint(0, 50, (size,), generator=draw) for name in ("a", "b")},
            dense=torch.randn(size, 3, generator=draw),
            labels=torch.randint(0, 2, (size,), generator=draw).float(),
        )
        for _ in range(count)
    ]


class Stepwise(GraphStep):
    """The same steps kernel by kernel, for machines without a GPU."""

    def __init__(self, embeddings, model, dense):
        self._embeddings, self._model, self._dense = embeddings, model, dense

    def _begin(self, lookup):
        logits = self._model(self._embeddings.embed(lookup), lookup.batch.dense)
        loss = F.binary_cross_entropy_with_logits(logits, lookup.batch.labels)
        loss.backward()
        self._dense.step()
        return loss.detach(), np.empty(0, np.float32)

    def _end(self, lookup, handed):
        self._embeddings.step()


@evicting
def test_on_a_cpu_too_fetching_the_next_batch_meanwhile_changes_nothing(settings):
    one, other = made("cpu", **settings), made("cpu", **settings)
    step = Stepwise(*other)
    expected = []
    for batch in batches(9):
        loss, handed = step._begin(lookup := other[0].fetch(other[0].group(batch)))
        step._end(lookup, handed)
        expected.append(float(loss))
    assert [float(loss) for loss in Stepwise(*one).each(batches(9))] == expected
    for table in ("a", "b"):
        keys = torch.arange(60)
        assert torch.equal(one[0].read(table, keys), other[0].read(table, keys))
    assert one[0].stats() == other[0].stats()
    assert list(Stepwise(*one).each([])) == []


def test_an_error_of_a_batch_comes_after_the_batches_before_it():
    def failing():
        yield from batches(3)
        raise DataError("no more")

    made_up, seen = made("cpu"), []
    with pytest.raises(DataError, match="no more"):
        for loss in Stepwise(*made_up).each(failing()):
            seen.append(float(loss))
    assert len(seen) == made_up[0].steps == 3


@on_gpu
@evicting
def test_fetching_the_next_batch_meanwhile_changes_nothing(settings):
    one, other = made("cuda", **settings), made("cuda", **settings)
    steps = [GraphStep(*each, F.binary_cross_entropy_with_logits) for each in (one, other)]
    given = [b for size in (64, 32) for b in batches(8, size)]
    losses = [float(loss) for loss in steps[0].each(given)]
    expected = [float(steps[1](other[0].fetch(other[0].group(batch)))) for batch in given]
    assert losses == expected
    for table in ("a", "b"):
        keys = torch.arange(60)
        assert torch.equal(one[0].read(table, keys), other[0].read(table, keys))
    assert one[0].stats() == other[0].stats()
    assert list(steps[0].each([])) == []


@on_gpu
def test_a_graph_trains_as_single_kernels_do():
    one, other = made("cuda"), made("cuda")
    graph = GraphStep(*one, F.binary_cross_entropy_with_logits)
    sizes = [64] * 8 + [32] * 5  # another shape in mid-run
    for batch in (b for size in (64, 32) for b in batches(sizes.count(size), size)):
        embeddings, model, dense = other
        moved = batch.to("cuda")
        loss = F.binary_cross_entropy_with_logits(model(embeddings(batch), moved.dense), moved.labels)
        loss.backward()
        dense.step()
        embeddings.step()
        torch.testing.assert_close(graph(one[0].fetch(one[0].group(batch))), loss.detach(), rtol=1e-5, atol=1e-6)
    for table in ("a", "b"):
        keys = torch.arange(60)
        torch.testing.assert_close(one[0].read(table, keys), other[0].read(table, keys), rtol=1e-4, atol=1e-6)
    assert one[0].stats() == other[0].stats()


class Summed(torch.nn.Module):
    """Whose gradient is 1 everywhere, and that has a weight for the dense optimizer."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, embedded, dense):
        return embedded.vectors().sum(1) + self.bias


def rounded(device: str, keys: int) -> tuple[Embeddings, torch.nn.Module, DenseStep]:
    """A table in bfloat16 with all rows on the device; each step takes a sixteenth of their spacing off values at 1."""
    table = Table(name="a", dim=8, dtype="bfloat16", init=Fill(value=1.0), optimizer=SGD(lr=2.0**-12))
    plan = Plan({"a": (Share("device", np.arange(keys)), Share("host"))})
    model = Summed().to(device)
    embeddings = Embeddings([table], [Feature(name="a")], plan=plan, device=device)
    return embeddings, model, DenseStep(model, DenseSGD(lr=0.1))


def every_key(keys: int) -> Batch:
    return Batch.plain({"a": torch.arange(keys)}, dense=torch.zeros(keys, 1), labels=torch.zeros(keys))


def test_what_is_captured_rounds_rows_as_single_kernels_do_with_other_bits_at_each_step():
    one, other = rounded("cpu", 500), rounded("cpu", 500)
    step = Stepwise(*one)
    step._tier, step._loss = one[0].device_tier, lambda logits, labels: logits.sum()
    one[0].prepare = step._pack
    captured = None
    for number in range(3):  # the steps before the capture, which is of the same work
        lookup = one[0].fetch(one[0].group(every_key(500)))
        captured = captured or _Captured(step, lookup)
        step._tier.begin_step(number)
        captured.run(lookup, number)
        embeddings, model, _ = other
        model(embeddings(every_key(500)), None).sum().backward()
        embeddings.step()
        seen = [each[0].read("a", torch.arange(500)) for each in (one, other)]
        assert torch.equal(*seen)
    assert len(seen[0].unique()) > 2  # with the same bits each time a value would have moved at every step, or at none


@on_gpu
def test_a_graph_rounds_rows_with_other_bits_at_each_step():
    one = rounded("cuda", 500)
    graph = GraphStep(*one, lambda logits, labels: logits.sum())
    for _ in range(64):
        graph(one[0].fetch(one[0].group(every_key(500))))
    moved = (1.0 - one[0].read("a", torch.arange(500))) * 256  # in the spacing of bfloat16 below 1
    assert 3.5 < moved.mean() < 4.5 and moved.max() < 32


def test_a_graph_is_refused_where_there_is_no_gpu():
    with pytest.raises(SettingsError, match="CUDA device"):
        GraphStep(*made("cpu"), F.binary_cross_entropy_with_logits)
