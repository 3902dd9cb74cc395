# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""One step of each optimizer on some rows of one segment, and its twin: what `native/optimizer.hpp` does on a row.

A row's summed gradient is clipped, decay is added, the row moves and is bounded; the state moves on in place. State is
float32 and lies apart from the rows, with as many floats a row as the optimizer has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.backend import jit, tl
from hotrow.kernels.pooling import take, within
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
    HYPER_COLUMNS,
    RATE,
    REST1,
    REST2,
    ROWWISE,
    SGD,
)


@jit
def state_of(state, local, hot, columns, dim, KIND: tl.constexpr, FULL: tl.constexpr, ALL: tl.constexpr):
    """The optimizer state of some rows: up to two tensors, by the kind of optimizer; `ALL` if all rows have one."""
    if KIND == SGD:
        one = 0.0
        two = 0.0
    elif KIND == ROWWISE:
        one = take(state + local, hot, ALL)
        two = 0.0
    elif KIND == ADAGRAD:
        at = state + (local.to(tl.int64) * dim)[:, None] + columns[None, :]
        one = take(at, within(hot, columns, dim, FULL), ALL and FULL)
        two = 0.0
    else:
        tl.static_assert(KIND == ADAM)
        at = state + (local.to(tl.int64) * (2 * dim))[:, None] + columns[None, :]
        one = take(at, within(hot, columns, dim, FULL), ALL and FULL)
        two = take(at + dim, within(hot, columns, dim, FULL), ALL and FULL)
    return one, two


@jit
def settings_of(hyper, segment):
    """A segment's row of `Tables.hyper`, asked for at once; the compiler drops what an optimizer does not use."""
    hyper += segment * HYPER_COLUMNS
    return (
        tl.load(hyper + RATE), tl.load(hyper + EPS), tl.load(hyper + DECAY), tl.load(hyper + CLIP_VALUE),
        tl.load(hyper + CLIP_NORM), tl.load(hyper + BOUND), tl.load(hyper + BETA1), tl.load(hyper + BETA2),
        tl.load(hyper + REST1), tl.load(hyper + REST2),
    )  # fmt: skip


@jit
def decayed(grad, row, settings, PLAIN: tl.constexpr):
    """Weight decay added, unless clipping comes first.

    Also where it is zero: a row that is needed here is asked for together with its first gradients. Left for later, the
    assembler moves its load behind the sums, to save registers, and every row waits for memory twice.
    """
    if PLAIN:
        grad += settings[DECAY] * row
    return grad


@jit
def _prepared(grad, row, settings):
    """The gradient clipped, and decay added."""
    most = settings[CLIP_VALUE]
    most = tl.where(most > 0.0, most, float("inf"))
    grad = tl.minimum(tl.maximum(grad, -most), most)
    longest = settings[CLIP_NORM]
    longest = tl.where(longest > 0.0, longest, float("inf"))
    norm = tl.sqrt(tl.sum(grad * grad, 1))
    scale = tl.where(norm > longest, longest / tl.maximum(norm, 1e-30), 1.0)
    return grad * scale[:, None] + settings[DECAY] * row


@jit
def _moved(
    grad, row, state, one, two, local, hot, columns, dim, settings, BLOCK: tl.constexpr, KIND: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The rows after one step of their optimizer; writes the state on."""
    rate = settings[RATE]
    if KIND == SGD:
        moved = row - rate * grad
    elif KIND == ROWWISE:
        squares = one + tl.sum(grad * grad, 1) / (BLOCK if FULL else dim.to(tl.float32))
        tl.store(state + local, squares, mask=hot)
        moved = row - (rate / (tl.sqrt(squares) + settings[EPS]))[:, None] * grad
    elif KIND == ADAGRAD:
        squares = one + grad * grad
        at = state + (local.to(tl.int64) * dim)[:, None] + columns[None, :]
        tl.store(at, squares, mask=within(hot, columns, dim, FULL))
        moved = row - rate * grad / (tl.sqrt(squares) + settings[EPS])
    else:
        moment = settings[BETA1] * one + settings[REST1] * grad
        squares = settings[BETA2] * two + settings[REST2] * grad * grad
        at = state + (local.to(tl.int64) * (2 * dim))[:, None] + columns[None, :]
        tl.store(at, moment, mask=within(hot, columns, dim, FULL))
        tl.store(at + dim, squares, mask=within(hot, columns, dim, FULL))
        moved = row - rate * moment / (tl.sqrt(squares) + settings[EPS])
    return moved


@jit
def finish(
    grad, row, one, two, slot, local, whole, columns, dim, base, here, handed_base, state, values, handed, settings,
    seed, BLOCK: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr, PLAIN: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Uses the summed gradients of some rows of one segment: in place, or handed out where the row is staged."""
    hot = whole
    if STAGED:
        hot = whole & (local < here)
        cold = within(whole & (local >= here), columns, dim, FULL)
        to = handed + handed_base
        tl.store(to + ((local - here).to(tl.int64) * dim)[:, None] + columns[None, :], grad, mask=cold)
    if not PLAIN:
        grad = tl.where(within(hot, columns, dim, FULL), _prepared(grad, row, settings), 0.0)
    moved = _moved(grad, row, state, one, two, local, hot, columns, dim, settings, BLOCK, KIND, FULL)
    if not PLAIN:
        bound = settings[BOUND]
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
