# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Stochastic rounding of updated rows to bfloat16 and float16.

A value goes up with the probability of its remainder, so that small updates are kept on average instead of lost each
time. The random bits are a hash of the step's seed, the row's slot and the column: a step repeated gives the same
bits, and no state is kept. The rows of the native store round with other bits, so tiers agree on average only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import constant, jit, tl

_SLOT = constant(0x9E3779B1)
_COLUMN = constant(0x85EBCA77)
_FIRST = constant(0x7FEB352D)
_SECOND = constant(0x846CA68B)


@jit
def _mix(x):
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@jit
def random_bits(seed, slot, columns):
    """32 random bits for each element of a tile of rows."""
    row = _mix(slot.to(tl.uint32) * _SLOT + seed.to(tl.uint32))
    return _mix(row[:, None] + (columns.to(tl.uint32) * _COLUMN)[None, :])


@jit
def rounded(x, random, to):
    """`x` (float32) in the element type of pointer `to`, up or down by chance."""
    if to.dtype.element_ty == tl.float32:
        result = x
    else:
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        if to.dtype.element_ty == tl.bfloat16:
            up = ((bits + (random >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            up = ((bits + (random >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
            # Below 2^-14 float16 has fixed steps of 2^-24.
            chance = (random >> 8).to(tl.float32) * 5.9604644775390625e-08
            small = tl.floor(x * 16777216.0 + chance) * 5.9604644775390625e-08
            up = tl.where(tl.abs(x) < 6.103515625e-05, small, up)
            up = tl.minimum(tl.maximum(up, -65504.0), 65504.0)
        result = tl.where(finite, up, x).to(to.dtype.element_ty)
    return result


def random_bits_twin(seed: int, slots: Tensor, dim: int) -> Tensor:
    """The bits of `random_bits`, as int64 `[n, dim]`."""
    row = _mix_twin((slots.long() * 0x9E3779B1 + (seed & 0xFFFFFFFF)) & 0xFFFFFFFF)
    columns = (torch.arange(dim, device=slots.device) * 0x85EBCA77) & 0xFFFFFFFF
    return _mix_twin((row[:, None] + columns[None, :]) & 0xFFFFFFFF)


def rounded_twin(x: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """What `rounded` computes."""
    if dtype == torch.float32:
        return x.float()
    x = x.float()
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        up = _float((bits + (random >> 16)) & 0xFFFF0000)
    else:
        up = _float((bits + (random >> 19)) & 0xFFFFE000)
        small = torch.floor(x * 2.0**24 + (random >> 8).float() * 2.0**-24) * 2.0**-24
        up = torch.where(x.abs() < 2.0**-14, small, up).clamp(-65504.0, 65504.0)
    return torch.where(x.isfinite(), up, x).to(dtype)


def _mix_twin(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _float(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
