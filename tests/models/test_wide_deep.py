"""Wide & Deep's two parts, written out."""

import pytest
import torch

from hotrow.embedded import Embedded, PooledGroup
from hotrow.errors import SettingsError
from hotrow.models import ModelInputs, WideDeepSettings
from hotrow.table import Feature


def test_the_last_value_of_a_row_is_its_scaled_linear_weight_and_a_row_of_one_is_wide_only() -> None:
    torch.manual_seed(0)
    inputs = ModelInputs([Feature(name=name) for name in "abc"], {"a": 3, "b": 1, "c": 2}, dense=2)
    model = WideDeepSettings(deep=(4,)).build(inputs)
    torch.nn.init.normal_(model.dense_weights.weight)
    rows, dense = torch.randn(5, 6), torch.randn(5, 2)
    got = model(Embedded([PooledGroup(("a", "b", "c"), (3, 1, 2), rows, None)], {}), dense)
    wide = rows[:, 2] / 3**0.5 + rows[:, 3] + rows[:, 5] / 2**0.5 + dense @ model.dense_weights.weight[0]
    deep = model.deep(torch.cat([rows[:, :2], rows[:, 4:5], dense], dim=1)).squeeze(1)
    torch.testing.assert_close(got, wide + deep)


def test_a_deep_part_without_inputs_is_refused() -> None:
    with pytest.raises(SettingsError, match="nothing for its deep part"):
        WideDeepSettings().build(ModelInputs([Feature(name="a")], {"a": 1}))
