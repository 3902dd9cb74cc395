"""`open_pipeline` and `Step` without a run: every policy, in a short loop or with every line written out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hotrow import Embeddings, Step, Table, open_pipeline
from hotrow.data import DataSet, Reader
from hotrow.errors import HotrowError
from hotrow.policy import Exact, Hybrid, Sync
from hotrow.store.optimizers import RowWiseAdagrad

POLICIES = [Sync(), Exact(), Exact(ahead=4), Hybrid(staleness=2, worst=True)]


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.over = nn.Linear(width, 1)

    def forward(self, rows, dense):
        return self.over(torch.cat([rows.vectors(), dense], dim=1)).squeeze(1)


class Loop:
    """A model with its rows, and a reader."""

    def __init__(self, data, batch_size=64):
        dataset = DataSet.open(data)
        names = ("user", "item")
        tables = [Table(name=name, dim=4, optimizer=RowWiseAdagrad(lr=0.1)) for name in names]
        self.embeddings = Embeddings(tables, dataset.schema.feature_settings())
        torch.manual_seed(0)
        self.model = Head(3 * 4 + 1)
        self.reader = Reader(dataset, "train", batch_size)

    def rows(self):
        tier = self.embeddings.router.tiers["host"]
        found = {}
        for name, store in tier.stores().items():
            for chunk in store.export():
                values = chunk["values"].reshape(len(chunk["keys"]), -1)
                found |= {(name, int(key)): tuple(row) for key, row in zip(chunk["keys"], values, strict=True)}
        return found, [p.detach().clone() for p in self.model.parameters()]


def short(data, policy):
    loop = Loop(data)
    step = Step(loop.embeddings, loop.model)
    with open_pipeline(loop.reader, loop.embeddings, policy) as pipeline:
        losses = [float(step(ready)) for ready in pipeline]
    return losses, loop


def written_out(data, policy):
    loop = Loop(data)
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.001)
    losses = []
    with open_pipeline(loop.reader, loop.embeddings, policy) as pipeline:
        for ready in pipeline:
            loss = F.binary_cross_entropy_with_logits(loop.model(ready.rows(), ready.batch.dense), ready.batch.labels)
            optimizer.zero_grad()
            loss.backward()
            loop.embeddings.step()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, loop


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_loop_written_out_has_the_bits_of_the_short_one(data, policy):
    (losses, one), (others, two) = short(data, policy), written_out(data, policy)
    assert losses == others and losses[-1] < losses[0]
    assert one.rows()[0] == two.rows()[0]
    assert all(torch.equal(a, b) for a, b in zip(one.rows()[1], two.rows()[1], strict=True))
    assert one.embeddings.steps == two.embeddings.steps == len(losses)


def test_fetching_ahead_changes_no_bit(data):
    (losses, one), (others, two) = short(data, Sync()), short(data, Exact(ahead=4))
    assert losses == others and one.rows()[0] == two.rows()[0]


def test_a_pipeline_that_is_closed_takes_no_more_steps(data):
    loop = Loop(data)
    batch = next(iter(Loop(data).reader))
    with open_pipeline([batch], loop.embeddings) as pipeline:
        Step(loop.embeddings, loop.model)(next(pipeline))
    loop.model(loop.embeddings(batch), batch.dense).sum().backward()
    loop.embeddings.step()
    assert loop.embeddings.steps == 2


@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
def test_a_batch_without_a_step_is_a_sentence_and_not_a_standstill(data, policy):
    loop = Loop(data)
    with (
        pytest.raises(HotrowError, match="has not been trained on"),
        open_pipeline(loop.reader, loop.embeddings, policy) as pipeline,
    ):
        list(pipeline)
