"""How many distinct keys there were, from HyperLogLog registers: 2^14 of them, 16 KiB, whatever was counted.

The estimator is Ertl's ("New cardinality estimation algorithms for HyperLogLog sketches", 2017): one formula from
no key to 2^60, without tables of corrections. Its relative standard error is 1.04 / sqrt(2^14) = 0.8%. Registers
are made by `native/counts.hpp`; those of two streams together are the larger of each pair.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

BITS = 14
RELATIVE_ERROR = 1.04 / math.sqrt(1 << BITS)
"""One standard deviation of the estimate, as a share of it."""


def distinct(registers: npt.NDArray[np.uint8]) -> float:
    """The estimated number of distinct keys behind `registers`."""
    size, top = 1 << BITS, 64 - BITS
    tally = np.bincount(registers, minlength=top + 2)
    z = size * _tau(1 - tally[top + 1] / size)
    for value in range(top, 0, -1):
        z = 0.5 * (z + tally[value])
    z += size * _sigma(tally[0] / size)
    return 0.0 if math.isinf(z) else size * size / (2 * math.log(2)) / z


def _sigma(x: float) -> float:
    """What registers that saw nothing stand for: x + the sum over k of x^(2^k) 2^(k-1)."""
    if x == 1:
        return math.inf
    y, z, before = 1.0, x, -1.0
    while z != before:
        x, before = x * x, z
        z += x * y
        y += y
    return z


def _tau(x: float) -> float:
    """What full registers stand for."""
    if x in (0, 1):
        return 0.0
    y, z, before = 1.0, 1 - x, -1.0
    while z != before:
        x, before, y = math.sqrt(x), z, 0.5 * y
        z -= (1 - x) ** 2 * y
    return z / 3
