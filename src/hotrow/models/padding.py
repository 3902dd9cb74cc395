"""Ranges of rows padded to the longest of them, and back.

Padding repeats what is there, so that whoever looks at it sees numbers. What comes of it must not matter: it gets no
gradient and gives none. So each row counts once, and the gradient of `pad` is `unpad` and the other way round,
with no sum on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """`count` ranges of `size` rows in all, to be padded to the `longest`.

    `at` says what stands at each padded place and `kept` where each row stands; both are None where ranges are of one
    length and nothing is padded.
    """

    count: int
    longest: int
    size: int
    at: Tensor | None
    kept: Tensor | None

    def pad(self, x: Tensor) -> Tensor:
        """`[size, ...]` to `[count, longest, ...]`."""
        padded: Tensor = x if self.at is None else _Pad.apply(x, self.at, self.kept)  # type: ignore[no-untyped-call]
        return padded.view(self.count, self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`[count, longest, ...]` to `[size, ...]`."""
        rows = x.flatten(0, 1)
        return rows if self.kept is None else _Unpad.apply(rows, self.kept)  # type: ignore[no-untyped-call]


def padding(lengths: Tensor) -> Padding:
    """For ranges of these lengths that follow each other."""
    count, longest, size = len(lengths), int(lengths.max()), int(lengths.sum())
    if size == count * longest:
        return Padding(count, longest, size, None, None)
    step = torch.arange(longest, device=lengths.device)
    begins = lengths.cumsum(0) - lengths
    at = (begins[:, None] + step).clamp(max=size - 1).flatten()
    kept = (step < lengths[:, None]).flatten().nonzero().squeeze(1)
    return Padding(count, longest, size, at, kept)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return grad.index_select(0, kept), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.shape = rows.shape
        return rows.index_select(0, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, kept, grad), None
