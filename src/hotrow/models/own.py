"""`OwnModel`: a model of the user's in place of a built-in one.

Any `torch.nn.Module` whose `forward(rows, dense)` takes the rows of a batch (`hotrow.Embedded`) and its dense inputs
`[B, n]`, or None, and gives what the objective reads: for `binary` a logit a sample, `[B]`. It is made as
`Class(settings, inputs)` where it has a `Settings`, a pydantic model or a dataclass that [model] fills, and as
`Class(inputs)` otherwise; `inputs` is a `hotrow.ModelInputs`. A class may also say:

    extra_row_values = 1      values behind each row's dim, as a linear weight (0 if it does not say)
    static_shapes = False     shapes that depend on the samples: it is not exported
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from hotrow.models.model import ModelInputs
from hotrow.own import OwnClass


class OwnModel(OwnClass):
    """A class of your own, a `torch.nn.Module`. Its own settings stand beside its name."""

    what: ClassVar[str] = "model"
    base: ClassVar[type] = nn.Module

    @property
    def extra_row_values(self) -> int:
        return int(getattr(self.load(), "extra_row_values", 0))

    def build(self, inputs: ModelInputs) -> nn.Module:
        """The model, with fresh weights."""
        made: Any = self.make(inputs)
        assert isinstance(made, nn.Module)
        return made
