"""DCN v2's cross layers, written out."""

import pytest
import torch

from hotrow.embedded import Embedded, PooledGroup
from hotrow.models import DCNv2Settings, ModelInputs
from hotrow.models.dcnv2 import Cross
from hotrow.table import Feature


@pytest.mark.parametrize("rank", [None, 2])
def test_a_cross_layer_multiplies_the_first_input_into_a_projection(rank: int | None) -> None:
    torch.manual_seed(0)
    cross = Cross(3, rank)
    first, x = torch.randn(4, 3), torch.randn(4, 3)
    got = cross(first, x)
    if rank is None:
        matrix, bias = cross.project[0].weight, cross.project[0].bias
    else:
        down, up = cross.project
        assert down.weight.shape == (2, 3)
        matrix, bias = up.weight @ down.weight, up.bias
    for b in range(4):
        torch.testing.assert_close(got[b], first[b] * (matrix @ x[b] + bias) + x[b])


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_the_mlp_stands_beside_or_on_top_of_the_crosses(structure: str) -> None:
    torch.manual_seed(0)
    settings = DCNv2Settings(layers=2, deep=(5,), structure=structure)
    model = settings.build(ModelInputs([Feature(name="a")], {"a": 2}, dense=1))
    rows, dense = torch.randn(4, 2), torch.randn(4, 1)
    first = torch.cat([rows, dense], dim=1)
    crossed = model.crosses[1](first, model.crosses[0](first, first))
    last = torch.cat([crossed, model.deep(first)], dim=1) if structure == "parallel" else model.deep(crossed)
    got = model(Embedded([PooledGroup(("a",), (2,), rows, None)], {}), dense)
    torch.testing.assert_close(got, model.out(last).squeeze(1))
