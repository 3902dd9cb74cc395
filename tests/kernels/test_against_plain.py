"""A few steps on the kernels are a few steps of a plain PyTorch table, for every optimizer they know."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic")

from hotrow import Batch, Feature, Table
from hotrow.kernels import BatchShape, FeatureSpec, GroupSpec, Rule, Tables, TableSpec, group_numbers, lookup, update
from hotrow.plain import PlainEmbeddings
from hotrow.store.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad

ROWS, DIM = 20, 12
COMMON = {"lr": 0.1, "weight_decay": 0.02}
CLIPPED = {"clip_value": 0.9, "clip_norm": 1.5, "bound": 0.8}


def initial(table: Table, seed: int, keys: Tensor) -> Tensor:
    return torch.sin(keys[:, None] * 1.7 + torch.arange(table.dim))


@pytest.mark.parametrize("clips", [{}, CLIPPED])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(**COMMON), Adagrad(**COMMON, initial=0.1), RowWiseAdagrad(**COMMON), Adam(**COMMON)],
    ids=lambda o: o.name,
)
def test_steps_equal_those_of_a_plain_table(device: str, optimizer: Optimizer, clips: dict[str, float]) -> None:
    optimizer = optimizer.model_copy(update=clips)
    table = Table(name="t", dim=DIM, optimizer=optimizer)
    plain = PlainEmbeddings(
        [table], [Feature(name="a", table="t", pooling="mean"), Feature(name="b", table="t")], initial=initial
    )
    has = {"eps", "beta1", "beta2", "initial"} & set(type(optimizer).model_fields)
    own = {name: getattr(optimizer, name) for name in has}
    tables = Tables([TableSpec(ROWS, DIM, Rule(optimizer.name, **COMMON, **clips, **own))], device)
    tables.rows_of(0).copy_(initial(table, 0, torch.arange(ROWS)))
    for step in range(1, 4):
        a = [torch.randint(0, ROWS, (n,)).tolist() for n in (3, 0, 1, 7)]
        b = [torch.randint(0, ROWS, (n,)).tolist() for n in (1, 2, 0, 4)]
        batch = Batch.plain({"a": a, "b": b})
        (group,) = batch.groups
        grad = torch.randn(4, 2 * DIM)
        expected = plain(batch).vectors()
        expected.backward(grad)
        plain.step()

        shape = BatchShape(tables, [GroupSpec([FeatureSpec(0, "mean"), FeatureSpec(0, "sum")], 4, len(group.values))])
        numbers, offsets = group.values.to(device), group.offsets.to(device)
        slots, grouping = group_numbers(tables, shape, numbers, offsets)
        (results,) = shape.views(lookup(tables, shape, slots, offsets))
        tables.set_step(step)
        update(tables, shape, grouping, grad.reshape(-1).to(device))
        torch.testing.assert_close(results.cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tables.rows_of(0).cpu(), plain.read("t", torch.arange(ROWS)), rtol=1e-5, atol=1e-5)
