# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One step of each optimizer on some rows of one segment, and its twin: what `native/optimizer.hpp` does on a row.

A row's summed gradient is clipped, decay is added, the row moves and is bounded; the state moves on in place. State is
float32 and lies apart from the rows, with as many floats a row as the optimizer has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import jit, tl
from hotrow.kernels.pooling import within
from hotrow.kernels.rounding import random_bits, rounded
from hotrow.kernels.tables import (
    ADAGRAD,
    ADAM,
    BETA1,
    BETA2,
    BOUND,
    CLIP_NORM,
    CLIP_VALUE,
    DECAY,
    EPS,
    HOT,
    HYPER_COLUMNS,
    LAYOUT_COLUMNS,
    RATE,
    REST1,
    REST2,
    ROWWISE,
    SGD,
)


@jit
def state_of(state, local, hot, columns, dim, KIND: tl.constexpr, FULL: tl.constexpr):
    """The optimizer state of some rows: up to two tensors, by the kind of optimizer."""
    if KIND == SGD:
        one = 0.0
        two = 0.0
    elif KIND == ROWWISE:
        one = tl.load(state + local, mask=hot, other=0.0)
        two = 0.0
    elif KIND == ADAGRAD:
        at = state + (local.to(tl.int64) * dim)[:, None] + columns[None, :]
        one = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0)
        two = 0.0
    else:
        tl.static_assert(KIND == ADAM)
        at = state + (local.to(tl.int64) * (2 * dim))[:, None] + columns[None, :]
        one = tl.load(at, mask=within(hot, columns, dim, FULL), other=0.0)
        two = tl.load(at + dim, mask=within(hot, columns, dim, FULL), other=0.0)
    return one, two


@jit
def decayed(grad, row, hyper, segment, PLAIN: tl.constexpr):
    """Weight decay added, unless clipping comes first.

    Also where it is zero: a row that is needed here is asked for together with its gradient. Left for later, the
    assembler moves its load behind the sums, to save registers, and every row waits for memory twice.
    """
    if PLAIN:
        grad += tl.load(hyper + segment * HYPER_COLUMNS + DECAY) * row
    return grad


@jit
def _prepared(grad, row, hyper):
    """The gradient clipped, and decay added."""
    most = tl.load(hyper + CLIP_VALUE)
    most = tl.where(most > 0.0, most, float("inf"))
    grad = tl.minimum(tl.maximum(grad, -most), most)
    longest = tl.load(hyper + CLIP_NORM)
    longest = tl.where(longest > 0.0, longest, float("inf"))
    norm = tl.sqrt(tl.sum(grad * grad, 1))
    scale = tl.where(norm > longest, longest / tl.maximum(norm, 1e-30), 1.0)
    return grad * scale[:, None] + tl.load(hyper + DECAY) * row


@jit
def _moved(
    grad, row, state, one, two, local, hot, columns, dim, hyper, BLOCK: tl.constexpr, KIND: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The rows after one step of their optimizer; writes the state on."""
    rate = tl.load(hyper + RATE)
    if KIND == SGD:
        moved = row - rate * grad
    elif KIND == ROWWISE:
        squares = one + tl.sum(grad * grad, 1) / (BLOCK if FULL else dim.to(tl.float32))
        tl.store(state + local, squares, mask=hot)
        moved = row - (rate / (tl.sqrt(squares) + tl.load(hyper + EPS)))[:, None] * grad
    elif KIND == ADAGRAD:
        squares = one + grad * grad
        at = state + (local.to(tl.int64) * dim)[:, None] + columns[None, :]
        tl.store(at, squares, mask=within(hot, columns, dim, FULL))
        moved = row - rate * grad / (tl.sqrt(squares) + tl.load(hyper + EPS))
    else:
        moment = tl.load(hyper + BETA1) * one + tl.load(hyper + REST1) * grad
        squares = tl.load(hyper + BETA2) * two + tl.load(hyper + REST2) * grad * grad
        at = state + (local.to(tl.int64) * (2 * dim))[:, None] + columns[None, :]
        tl.store(at, moment, mask=within(hot, columns, dim, FULL))
        tl.store(at + dim, squares, mask=within(hot, columns, dim, FULL))
        moved = row - rate * moment / (tl.sqrt(squares) + tl.load(hyper + EPS))
    return moved


@jit
def finish(
    grad, row, one, two, slot, local, whole, columns, dim, base, state, values, handed, staged_at, segment, layout,
    hyper, seed, BLOCK: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Uses the summed gradients of some rows of one segment: in place, or handed out where the row is staged."""
    hot = whole
    if STAGED:
        here = tl.load(layout + segment * LAYOUT_COLUMNS + HOT).to(tl.int32)
        hot = whole & (local < here)
        cold = within(whole & (local >= here), columns, dim, FULL)
        to = handed + tl.load(staged_at + segment) // VECTOR * VECTOR
        tl.store(to + ((local - here).to(tl.int64) * dim)[:, None] + columns[None, :], grad, mask=cold)
    hyper += segment * HYPER_COLUMNS
    if not PLAIN:
        grad = tl.where(within(hot, columns, dim, FULL), _prepared(grad, row, hyper), 0.0)
    moved = _moved(grad, row, state, one, two, local, hot, columns, dim, hyper, BLOCK, KIND, FULL)
    if not PLAIN:
        bound = tl.load(hyper + BOUND)
        bound = tl.where(bound > 0.0, bound, float("inf"))
        moved = tl.minimum(tl.maximum(moved, -bound), bound)
    random = 0 if values.dtype.element_ty == tl.float32 else random_bits(tl.load(seed), slot, columns)
    place = (base + local.to(tl.int64) * dim)[:, None] + columns[None, :]
    tl.store(values + place, rounded(moved, random, values), mask=within(hot, columns, dim, FULL))


def step_twin(
    row: Tensor, grad: Tensor, state: Tensor, base: int, local: Tensor, hyper: list[float], kind: int
) -> Tensor:
    """The rows after one step; `local` are their numbers in a segment whose state begins at `base`."""
    rate, eps, decay, clip_value, clip_norm, bound, beta1, beta2, rest1, rest2, *_ = hyper
    dim = row.shape[1]
    columns = torch.arange(dim, device=row.device)
    if clip_value:
        grad = grad.clamp(-clip_value, clip_value)
    if clip_norm:
        norm = grad.norm(dim=1, keepdim=True)
        grad = torch.where(norm > clip_norm, grad * (clip_norm / norm), grad)
    grad = grad + decay * row
    if kind == 0:
        row = row - rate * grad
    elif kind == 2:
        squares = state[base + local].to(row.dtype) + grad.square().mean(dim=1)
        state[base + local] = squares.float()
        row = row - (rate / (squares.sqrt() + eps))[:, None] * grad
    elif kind == 1:
        at = (base + local * dim)[:, None] + columns
        squares = state[at].to(row.dtype) + grad.square()
        state[at] = squares.float()
        row = row - rate * grad / (squares.sqrt() + eps)
    else:
        at = (base + local * 2 * dim)[:, None] + columns
        moment = beta1 * state[at].to(row.dtype) + rest1 * grad
        squares = beta2 * state[at + dim].to(row.dtype) + rest2 * grad.square()
        state[at], state[at + dim] = moment.float(), squares.float()
        row = row - rate * moment / (squares.sqrt() + eps)
    return row.clamp(-bound, bound) if bound else row
