"""`OwnOptimizer`: a class made from `torch.optim.Optimizer` in place of a built-in name, for the dense part.

    [optimizer]
    name = "torch.optim:RAdam"          # or "package.module:Class"
    lr = 0.001                          # what else the class takes stands beside its name
    betas = [0.9, 0.99]

It is made as `Class(groups of parameters, lr=..., ...)`. Before anything starts a copy makes one step of a parameter of
2 by 2, is saved and loaded: one that needs a closure or sparse gradients, or keeps what a checkpoint cannot hold, is
refused then. Classes of `torch.optim` are torch's, so they need no trust.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from torch import nn

from hotrow.errors import SettingsError, nearest
from hotrow.own import OwnClass
from hotrow.schedule import Constant, Schedule
from hotrow.train.groups import Group


class OwnOptimizer(OwnClass):
    """A class made from `torch.optim.Optimizer`. What its constructor takes besides `lr` stands beside its name."""

    what: ClassVar[str] = "optimizer"
    base: ClassVar[type] = torch.optim.Optimizer

    lr: float | None = Field(None, gt=0, description="learning rate; the class's own if not given")
    schedule: Schedule = Field(Constant(), description="how the learning rate changes over the steps")
    clip_norm: float | None = Field(None, gt=0, description="the norm of all gradients together is held to this")
    groups: tuple[Group, ...] = Field((), description="parameters that learn in another way: [[optimizer.groups]]")

    @model_validator(mode="after")
    def _folder_of_its_own(self) -> Self:
        if self.of_torch and self.folder is not None:
            raise PydanticCustomError("sentence", "folder: classes of torch.optim come with torch. Take it away.")
        return self

    @property
    def of_torch(self) -> bool:
        """Whether the class is torch's own, and imported without a word."""
        module = self.name.partition(":")[0]
        return module == "torch.optim" or module.startswith("torch.optim.")

    @staticmethod
    def place(own: type) -> tuple[str, Path | None]:
        if getattr(torch.optim, own.__name__, None) is own:
            return f"torch.optim:{own.__name__}", None
        return OwnClass.place(own)

    def trusted(self, folder: Path | None = None) -> Self:
        return self if self.of_torch else super().trusted(folder)

    def load(self) -> type:
        return self._imported() if self.of_torch and self._given is None else super().load()

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer, over groups of parameters."""
        own = self.load()
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in self.own_settings.items()}
        if self.lr is not None:
            given["lr"] = self.lr
        self._check_names(own, given)
        try:
            made = own(groups, **given)
        except Exception as error:
            raise SettingsError(
                f"optimizer: {self.name} cannot be made for the model's parameters: {type(error).__name__}: {error}."
            ) from error
        assert isinstance(made, torch.optim.Optimizer)
        for name in ("lr", *(name for group in groups for name in group if name != "params")):
            if name not in made.defaults:
                raise SettingsError(f'optimizer: {self.name} has no "{name}" that groups of parameters could have.')
        return made

    def _check_names(self, own: type, given: dict[str, Any]) -> None:
        known = inspect.signature(own).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
            return
        for name in given:
            if name not in known:
                raise SettingsError(
                    f'optimizer.{name}: {self.name} has no setting "{name}".{nearest(name, list(known)[1:])}'
                )

    def alone(self) -> Self:
        """The same without groups."""
        return self.model_copy(update={"groups": ()})


def tried_on() -> nn.Module:
    """What an optimizer is tried on before anything starts."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    return nn.ParameterList([parameter])
