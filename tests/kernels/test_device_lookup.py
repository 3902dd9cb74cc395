"""Results of a batch by the kernels, from rows on the device and rows staged there, equal those of plain tables."""

import numpy as np
import pytest
import torch

from hotrow import Batch, Embeddings, Feature, Group, Table
from hotrow.plain import PlainEmbeddings
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD, Adagrad
from shapes import Case
from test_embeddings import assert_same_rows, initial, train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("pooling", ["mean", "sequence"])
@pytest.mark.parametrize("hot", [[], [0, 2]])
@pytest.mark.parametrize("dims", [(4, 8), (1, 2), (7, 16, 3)])
def test_tables_of_different_dims_equal_plain_ones(dims, hot, pooling):
    # Three rows of dim 4 are staged before those of dim 8, which are read 8 values at a time.
    rules = [SGD(lr=0.1), Adagrad(lr=0.1), SGD(lr=0.2)]
    tables = [Table(name=f"t{i}", dim=dim, optimizer=rules[i]) for i, dim in enumerate(dims)]
    features = [Feature(name=f"f{i}", table=table.name, pooling=pooling) for i, table in enumerate(tables)]
    plan = Plan({t.name: (Share("device", np.array(hot, np.int64)), Share("host")) for t in tables})
    ours = Embeddings(tables, features, seed=5, plan=plan, device=DEVICE)
    plain = PlainEmbeddings(tables, features, initial=initial, seed=5)
    names, keys = tuple(f.name for f in features), 3 * len(dims)
    batches = [
        Batch((Group(names, (torch.arange(keys) + step) % 5, torch.arange(keys + 1), None, None, None),))
        for step in range(2)
    ]
    case = Case(tables, features, batches)
    train(case, ours, plain)
    assert_same_rows(case, ours, plain)
