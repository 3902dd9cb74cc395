"""Losses scaled by `torch.amp.GradScaler`: rows have no parameters, so the scaler does not find their gradients.

`Embeddings.step(scaler)` shows them to it, as `scaler.step(optimizer)` does for an optimizer's. A gradient does not say
that it is scaled, and a scaler leaves no trace but itself: so a `step()` without one makes sure that the process has
none that is enabled. Every object counts as a reference to its class, so it looks through the objects of the process,
some tenths of a second for a million, only where there are other references than when it last found none.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from itertools import chain, starmap
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from hotrow.errors import HotrowError
from hotrow.lookup import Lookup

_free_at: int | None = None
"""How many references there were when the process was last found to have no scaler that is enabled."""
_off: list[weakref.ref[GradScaler]] = []
"""Those that it had, not enabled: another may take the place of one that is gone."""


def unscale(lookups: Sequence[Lookup], scaler: GradScaler, shown: torch.optim.Optimizer) -> bool:
    """Divides the gradients by the scale, and says whether all are finite; the scaler notes it under `shown`."""
    grads = []
    for lookup in lookups:
        assert lookup.grads is not None
        lookup.grads = [None if g is None else g.to(torch.float32, copy=True) for g in lookup.grads]
        grads += [g for g in lookup.grads if g is not None]
    if not grads:
        return True
    shown.param_groups[0]["params"] = [_with_grad(grad) for grad in grads]
    scaler.unscale_(shown)
    shown.param_groups[0]["params"] = []
    return all(bool(grad.isfinite().all()) for grad in grads)


def refuse_scaled() -> None:
    """Raises where a scaler is at work that `step` was not told of."""
    global _free_at, _off
    if _references() == _free_at and all(scaler() is not None for scaler in _off):
        return
    if any(scaler.is_enabled() for scaler in _scalers()):
        gc.collect()  # it may be one that nobody can reach any more
    found = _scalers()
    _off = [weakref.ref(scaler) for scaler in found]
    scaler = next((scaler for scaler in found if scaler.is_enabled()), None)
    del found
    if scaler is None:
        _free_at = _references()
    else:
        _free_at = None
        raise HotrowError(
            f"A GradScaler is at work in this process, with scale {scaler.get_scale():g}: gradients of rows come "
            f"scaled with the loss, and rows would move so many times too far. Call step(scaler) where you call "
            f"scaler.step(optimizer), before scaler.update(). If no scaled loss reaches these rows, call "
            f"finish().apply() instead."
        )


def _with_grad(grad: torch.Tensor) -> torch.Tensor:
    """What an optimizer would have for this gradient; it takes no memory of its own."""
    parameter = grad.detach().requires_grad_()
    parameter.grad = grad
    return parameter


def _references() -> int:
    return sum(sys.getrefcount(kind) for kind in _kinds())


def _kinds() -> list[type[GradScaler]]:
    """The classes that scalers may be of."""
    kinds = [GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


def _scalers() -> list[GradScaler]:
    kinds = set(_kinds())
    # One call of C, which no other thread interrupts: to hold a tuple that another thread is about to fill breaks it.
    objects = chain.from_iterable(starmap(gc.get_objects, [()]))
    if kinds.isdisjoint(map(type, objects)):
        return []
    found: list[Any] = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return found
