"""The optimizer of a collection's tables, as TorchRec's `KeyedOptimizer`: a group a table, whose `lr` may be set.

Rows are no parameters. A collection has an empty one for each table instead, under TorchRec's name, for whatever goes
by names; it takes no gradient. `apply_optimizer_in_backward` would wait for one for ever, so it is refused there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrow.embeddings import Embeddings
from hotrow.errors import SettingsError
from hotrow.tiers.host import HostTier


class TableParameter(nn.Parameter):
    """Stands for a table among a module's parameters: empty, and without gradients."""

    def view_as(self, other: torch.Tensor) -> NoReturn:
        """What `apply_optimizer_in_backward` begins with."""
        raise SettingsError(
            "Hotrow's tables take no apply_optimizer_in_backward: give the collection their optimizer, as in "
            "EmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(lr=0.02)) with hotrow.store.optimizers, and call "
            "its step() after backward. For the other parameters apply it to those that require gradients."
        )


class TableOptimizer(KeyedOptimizer):  # type: ignore[misc]
    """Steps the tables that `parameters` stand for; state dicts hold no state, which `rows.snapshot` keeps."""

    _step_supports_amp_scaling = True

    def __init__(self, rows: Embeddings, parameters: Mapping[str, TableParameter]) -> None:
        self._rows = rows
        tables = zip(rows.tables.values(), parameters.values(), strict=True)
        groups = [{"params": [p], "lr": table.optimizer.lr, "table": table.name} for table, p in tables]
        super().__init__(dict(parameters), {}, groups)

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        """Applies the gradients of every forward since the last step, with each group's learning rate."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        host = self._rows.router.tiers["host"]
        assert isinstance(host, HostTier)
        host.lr = {group["table"]: _rate(group) for group in self.param_groups}
        self._rows.step(grad_scaler)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are gone with the step that applied them."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Rows have their state from the first."""


def _rate(group: Mapping[str, Any]) -> float:
    lr = float(group["lr"])
    if not (math.isfinite(lr) and lr >= 0):
        raise SettingsError(f"Table {group['table']}: the learning rate was set to {lr}; it must be 0 or more.")
    return lr
