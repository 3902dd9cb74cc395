"""What compilers and tracers see of a module that looks rows up: one call, into which they do not look.

A lookup is native code on keys of its own, so `torch.compile` breaks its graph around it, and `torch.fx` records it as
a call of the module, whatever its tracer takes for a leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def opaque(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's `forward` as one call in any graph."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, fx.Proxy):
                tracer: Any = given.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    disabled: Callable[..., Any] = torch.compiler.disable(call, reason="native code looks rows up")  # type: ignore[no-untyped-call]
    return disabled
