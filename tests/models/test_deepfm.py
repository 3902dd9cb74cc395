"""DeepFM's pairwise products, written out."""

import pytest
import torch

from hotrow.embedded import Embedded, PooledGroup
from hotrow.errors import SettingsError
from hotrow.models import DeepFMSettings, ModelInputs
from hotrow.table import Feature


@pytest.mark.parametrize("dense_inputs", [0, 2])
def test_a_logit_is_linear_terms_and_all_scaled_products_and_the_mlp(dense_inputs: int) -> None:
    torch.manual_seed(0)
    inputs = ModelInputs([Feature(name=name) for name in "abc"], dict.fromkeys("abc", 21), dense=dense_inputs)
    model = DeepFMSettings(deep=(4,)).build(inputs)
    if dense_inputs:
        torch.nn.init.normal_(model.dense_weights.weight)
        torch.nn.init.normal_(model.dense_vectors)
    rows, dense = torch.randn(5, 63), torch.randn(5, dense_inputs)
    got = model(Embedded([PooledGroup(("a", "b", "c"), (21, 21, 21), rows, None)], {}), dense)
    for b in range(5):
        (*vectors,) = (row[:20] for row in rows[b].view(3, 21))
        expected = model.deep(torch.cat([*vectors, dense[b]])).squeeze() + rows[b, 20::21].sum() / 21**0.5
        for i in range(dense_inputs):
            expected = expected + dense[b, i] * model.dense_weights.weight[0, i]
            vectors.append(dense[b, i] * model.dense_vectors[i])
        products = sum(v @ w for i, v in enumerate(vectors) for w in vectors[i + 1 :])
        expected = expected + products * (32 / (20 * len(vectors))) ** 0.5
        torch.testing.assert_close(got[b], expected)


def test_what_is_added_up_starts_near_zero_for_dense_inputs_well_above_one() -> None:
    torch.manual_seed(0)
    names = [f"f{i}" for i in range(20)]
    model = DeepFMSettings().build(ModelInputs([Feature(name=name) for name in names], dict.fromkeys(names, 17), 13))
    rows, dense = torch.empty(100, 20 * 17).uniform_(-0.05, 0.05), torch.rand(100, 13) * 8
    embedded = Embedded([PooledGroup(tuple(names), (17,) * 20, rows, None)], {})
    with torch.no_grad():
        mlp = model.deep(torch.cat([rows.view(100, 20, 17)[..., :16].flatten(1), dense], dim=1)).squeeze(1)
        assert (model(embedded, dense) - mlp).abs().max() < 0.5


def test_few_and_short_vectors_have_their_products_unscaled() -> None:
    model = DeepFMSettings().build(ModelInputs([Feature(name=name) for name in "abc"], dict.fromkeys("abc", 3)))
    assert model.pair_scale == 1


def test_rows_without_room_for_a_vector_are_refused() -> None:
    with pytest.raises(SettingsError, match="at least 2 values"):
        DeepFMSettings().build(ModelInputs([Feature(name="a")], {"a": 1}))
