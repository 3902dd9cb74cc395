"""An optimizer's state as named tensors, whatever optimizer it is: what a checkpoint keeps, with nothing pickled.

What torch keeps for each parameter goes under `parameter/what`, and what an optimizer has changed in a group of
parameters under `#groups/0/what`: tensors as they are, numbers as tensors whose name says what they were
(`step#int`), so that they come back as they went. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import CheckpointError

_GROUPS = "#groups/"
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}

Groups = Sequence[Mapping[str, Any]]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups say now, but for their parameters and rates, which follow from the run."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def named(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], given: Groups) -> dict[str, Tensor]:
    """A copy of all that is not as it was `given`."""
    out: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            out |= dict(_kept(f"{name}/{key}", value))
    known = {id(parameter) for parameter in parameters.values()}
    for strange in (key for key in optimizer.state if id(key) not in known):
        raise CheckpointError(f"The optimizer keeps state under {strange!r}, which is no parameter of the model.")
    for i, (now, before) in enumerate(zip(settings_of(optimizer), given, strict=True)):
        for key, value in now.items():
            if isinstance(value, Tensor) or key not in before or value != before[key]:
                out |= dict(_kept(f"{_GROUPS}{i}/{key}", value))
    return out


def take(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]) -> None:
    """Takes over what `named` gave; `CheckpointError` for a parameter or group that there is not."""
    per_parameter: dict[str, dict[str, Any]] = {}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        key, _, number = key.partition("#")
        if path.startswith(_GROUPS):
            _group(optimizer, int(name.removeprefix(_GROUPS)))[key] = _back(value, number)
        elif name:
            per_parameter.setdefault(name, {})[key] = _back(value, number)
    for name, values in per_parameter.items():
        if name not in parameters:
            raise CheckpointError(f'The checkpoint has optimizer state for "{name}", which this model lacks.')
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
            for key, value in values.items()
        }


def _kept(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value.detach().cpu().clone()
        return
    for name, (kind, dtype) in _NUMBERS.items():
        if type(value) is kind:
            yield f"{path}#{name}", torch.tensor(value, dtype=dtype)
            return
    if value is not None:
        raise CheckpointError(
            f"The optimizer keeps {path} as a {type(value).__name__}, and a checkpoint holds tensors and numbers only."
        )


def _back(value: Tensor, number: str) -> Any:
    return _NUMBERS[number][0](value.item()) if number else value.clone()


def _group(optimizer: torch.optim.Optimizer, i: int) -> dict[str, Any]:
    if i >= len(optimizer.param_groups):
        raise CheckpointError(f"The checkpoint has optimizer state for group {i} of parameters, which there is not.")
    group: dict[str, Any] = optimizer.param_groups[i]
    return group
