"""A batch with every form of feature, and the model inputs and tables that go with it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hotrow.data.batch import Batch, Group
from hotrow.models import ModelInputs, ModelSettings
from hotrow.plain import PlainEmbeddings
from hotrow.store.optimizers import Adagrad
from hotrow.table import Feature, Table

DIM = 4


def initial(table: Table, seed: int, keys: Tensor) -> Tensor:
    phase = torch.arange(1, table.dim + 1) * (1.3 + seed + len(table.name))
    return 0.5 * torch.sin((keys % 1009).to(torch.float32)[:, None] * phase)


@dataclass(frozen=True)
class Case:
    """What a test of a whole model needs."""

    inputs: ModelInputs
    embeddings: Callable[[], PlainEmbeddings]
    batch: Batch


@pytest.fixture
def case_of() -> Callable[[ModelSettings], Case]:
    """Builds a `Case` whose rows fit a model: users with their histories repeat, items and tags do not."""

    def build(settings: ModelSettings) -> Case:
        features = (
            Feature(name="item", table="items"),
            Feature(name="user", table="users", pooling="mean"),
            Feature(name="tags", table="tags", pooling="mean"),
            Feature(name="clicked", table="items", pooling="sequence"),
            Feature(name="read", table="pages", pooling="sequence"),
        )
        dim = DIM + settings.extra_row_values
        names = ("items", "users", "tags", "pages")
        tables = [Table(name=name, dim=dim, optimizer=Adagrad(lr=0.1)) for name in names]
        inputs = ModelInputs(features, {f.name: dim for f in features}, dense=2)
        return Case(inputs, lambda: PlainEmbeddings(tables, features, initial=initial), a_batch())

    return build


def a_batch() -> Batch:
    """Seven samples of three users, whose histories have 2, 0 and 3 clicks and 0, 1 and 1 pages."""
    users = Group(
        ("user", "clicked", "read"),
        torch.tensor([10, 11, 12, 3, 4, 5, 3, 6, 70, 71]),
        torch.tensor([0, 1, 2, 3, 5, 5, 8, 8, 9, 10]),
        torch.tensor([0, 0, 1, 2, 2, 2, 0]),
    )
    items = Batch.plain(
        {"item": torch.tensor([3, 4, 3, 5, 6, 5, 3]), "tags": [[1], [], [1, 2], [3], [2, 3], [1], [1, 1]]}
    ).groups[0]
    dense = torch.linspace(-1, 1, 14).view(7, 2)
    labels = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    return Batch((users, items), dense, labels)
