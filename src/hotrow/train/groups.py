"""`Group`: dense parameters with a rate or weight decay of their own, or frozen: [[optimizer.groups]] of a run file.

A group names its parameters by a pattern of their names in the model, as in "deep.*" (`*`, `?` and `[...]` as in a
shell). A parameter belongs to the first group that matches it; all others learn as [optimizer] says. A pattern that
finds no parameter is refused before anything starts. Frozen parameters take no gradient, so they cost no backward and
are not sent among ranks; buffers, such as a batch norm's means, move all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from torch import nn

from hotrow.errors import SettingsError, nearest
from hotrow.settings import Settings


class Group(Settings):
    """Dense parameters that learn in another way than the rest: the first group that matches a parameter has it."""

    parameters: str = Field(min_length=1, description='a pattern of their names in the model, as in "deep.*"')
    lr: float | None = Field(None, gt=0, description="learning rate, under the same schedule; as the rest if not given")
    weight_decay: float | None = Field(None, ge=0, description="as the rest if not given")
    frozen: bool = Field(False, description="they keep the values they start with")

    @model_validator(mode="after")
    def _says_something(self) -> Group:
        own = self.lr is not None or self.weight_decay is not None
        if own and self.frozen:
            raise PydanticCustomError("sentence", "frozen parameters have no lr and no weight_decay. Take them away.")
        if not own and not self.frozen:
            raise PydanticCustomError("sentence", "a group needs lr, weight_decay or frozen = true.")
        return self

    def options(self) -> dict[str, Any]:
        """What its parameters have of their own, as a torch optimizer takes it."""
        return {k: v for k, v in (("lr", self.lr), ("weight_decay", self.weight_decay)) if v is not None}


def freeze(model: nn.Module, groups: Sequence[Group]) -> None:
    """Takes the frozen groups' parameters out of training."""
    for group, found in members(groups, dict(model.named_parameters())).items():
        if groups[group].frozen:
            for parameter in found.values():
                parameter.requires_grad_(False)


def parameter_groups(groups: Sequence[Group], learning: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """What a torch optimizer is given: first the parameters that no group names, then each group that learns."""
    of_groups = members([group for group in groups if not group.frozen], learning)
    named = {name for found in of_groups.values() for name in found}
    rest = [parameter for name, parameter in learning.items() if name not in named]
    own = [group for group in groups if not group.frozen]
    return [
        {"params": rest},
        *({"params": list(found.values()), **own[i].options()} for i, found in of_groups.items()),
    ]


def members(groups: Sequence[Group], parameters: Mapping[str, nn.Parameter]) -> dict[int, dict[str, nn.Parameter]]:
    """For each group its parameters; `SettingsError` for one without."""
    found: dict[int, dict[str, nn.Parameter]] = {i: {} for i in range(len(groups))}
    for name, parameter in parameters.items():
        first = next((i for i, group in enumerate(groups) if fnmatchcase(name, group.parameters)), None)
        if first is not None:
            found[first][name] = parameter
    for i, group in enumerate(groups):
        if not found[i]:
            raise SettingsError(f"optimizer.groups: {_why_empty(group.parameters, parameters)}")
    return found


def _why_empty(pattern: str, names: Iterable[str]) -> str:
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if matched:
        return f'every parameter that "{pattern}" matches belongs to a group before it, as {matched[0]}. Put it first.'
    return f'no parameter of the model matches "{pattern}".{nearest(pattern, _patterns(names))}'


def _patterns(names: Iterable[str]) -> list[str]:
    """The names, and for each module a pattern of all below it."""
    known: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        known |= dict.fromkeys([*(".".join([*parts[:n], "*"]) for n in range(1, len(parts))), name])
    return list(known)
