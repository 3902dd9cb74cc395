"""`mix64`, a bijection of 64-bit integers that looks random (SplitMix64's last step), and `Randoms` of it.

Being functions of their input alone, they give the same numbers whatever order or chunks they are asked in.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: U64) -> U64:
    """Each 64-bit value goes to another, no two to the same."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Randoms:
    """Random numbers by name and counters: the same question has the same answer."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._zipf: dict[tuple[int, float], Floats] = {}

    def uniform(self, name: str, *counters: Ints) -> Floats:
        """In [0, 1), one for each set of counters."""
        state = np.full(1, self._salt(name))
        for counter in counters:
            state = mix64((state ^ counter.astype(np.uint64)) + _GOLDEN)
        return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normals(self, name: str, rows: int, columns: int) -> Floats:
        """Standard normal, [rows, columns]; a row does not depend on how many there are."""
        made = np.empty((rows, columns))
        at = np.arange(rows, dtype=np.int64)
        for i in range(columns):
            radius = np.sqrt(-2 * np.log1p(-self.uniform(f"{name} radius {i}", at)))
            made[:, i] = radius * np.cos(2 * np.pi * self.uniform(f"{name} angle {i}", at))
        return made

    def zipf(self, count: int, exponent: float, uniform: Floats) -> Ints:
        """Ordinals below `count`; the r-th (from 1) with a chance in proportion to r ** -exponent."""
        if (count, exponent) not in self._zipf:
            total = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
            self._zipf[count, exponent] = total / total[-1]
        found: Ints = np.searchsorted(self._zipf[count, exponent], uniform, side="right")
        return np.minimum(found, count - 1)

    def key_of(self, name: str, ordinals: Ints) -> Ints:
        """A key for each ordinal, no two the same, spread over all of int64."""
        return mix64(ordinals.astype(np.uint64) + self._salt(name)).view(np.int64)

    def keys(self, name: str, count: int) -> Ints:
        """The keys of the first `count` ordinals."""
        return self.key_of(name, np.arange(count, dtype=np.int64))

    def _salt(self, name: str) -> np.uint64:
        digest = blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))
