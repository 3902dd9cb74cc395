"""DLRM's interactions, written out."""

import torch

from hotrow.embedded import Embedded, PooledGroup
from hotrow.models import DLRM, DLRMSettings, ModelInputs
from hotrow.table import Feature


def model_of(dense: int) -> DLRM:
    features = [Feature(name=name) for name in "abc"]
    return DLRM(DLRMSettings(bottom=(), top=()), ModelInputs(features, dict.fromkeys("abc", 2), dense))


def test_interactions_are_the_dot_products_of_all_pairs() -> None:
    rows = torch.randn(5, 4 * 2)
    got = model_of(dense=1).interact(rows)
    vectors = rows.view(5, 4, 2)
    expected = [[float(v[i] @ v[j]) for i in range(4) for j in range(i + 1, 4)] for v in vectors]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_a_logit_is_the_top_layer_on_the_bottom_vector_and_the_products() -> None:
    model = model_of(dense=1)
    bottom, top = model.bottom[0], model.top[0]
    with torch.no_grad():
        bottom.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        top.weight.copy_(torch.tensor([[1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7]]))
        top.bias.fill_(0.5)
    rows = torch.tensor([[1.0, 2.0, 0.0, 1.0, 3.0, 0.0]])
    embedded = Embedded([PooledGroup(("a", "b", "c"), (2, 2, 2), rows, None)], {})
    # the bottom vector is relu(2, -2) = (2, 0), times a, b, c it is 2, 0, 6; a.b = 2, a.c = 3, b.c = 0
    expected = 0.5 + 2 + 0 + 2e2 + 0 + 6e4 + 2e5 + 3e6 + 0
    torch.testing.assert_close(model(embedded, torch.tensor([[2.0]])), torch.tensor([expected]))


def test_without_dense_inputs_a_learned_constant_stands_in() -> None:
    model = model_of(dense=0)
    rows = torch.randn(3, 6)
    embedded = Embedded([PooledGroup(("a", "b", "c"), (2, 2, 2), rows, None)], {})
    together = torch.cat([model.constant.expand(3, -1), rows], dim=1)
    expected = model.top(torch.cat([model.constant.expand(3, -1), model.interact(together)], dim=1)).squeeze(1)
    torch.testing.assert_close(model(embedded), expected)
