"""`Changes`: for a sample of the samples, which columns changed: enough to find what changes together.

Which samples are looked at is decided by a hash of session and step, those below a bound: so any division of
a log among tasks, merged in any order, ends with the same ones, without bias. The bound is halved until at most
`LOOKED` are left: a share of changed samples is then known within about 0.6% (two deviations), whatever
the size of the log, at one bit a sample and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrow.data.mix import mix64

LOOKED = 1 << 15
"""The most samples that are kept."""

Hashes = NDArray[np.uint64]
Bits = NDArray[np.uint8]


def hash_of(sessions: NDArray[np.int64], steps: NDArray[np.int64]) -> Hashes:
    """The same for the same sample of a session, wherever it is met."""
    return mix64(mix64(sessions.astype(np.int64).view(np.uint64)) + steps.astype(np.uint64))


@dataclass(frozen=True)
class Changes:
    """`bits[c]`, packed: whether column c of each looked-at sample differs from the sample before, or there is none."""

    hashes: Hashes
    bits: Bits
    halvings: int = 0

    @staticmethod
    def of(hashes: Hashes, changed: NDArray[np.bool_], halvings: int = 0) -> Changes:
        """From [columns, samples]; only what is below the bound is kept, and the bound lowered if need be."""
        below = _below(hashes, halvings)
        while np.count_nonzero(below) > LOOKED:
            halvings += 1
            below = _below(hashes, halvings)
        order = np.flatnonzero(below)
        order = order[np.argsort(hashes[order], kind="stable")]
        return Changes(hashes[order], np.packbits(changed[:, order], axis=1), halvings)

    def __len__(self) -> int:
        return len(self.hashes)

    def merge(self, other: Changes) -> Changes:
        """The looked-at samples of both, as if they had been met together."""
        changed = np.concatenate([self.unpacked(), other.unpacked()], axis=1)
        return Changes.of(np.append(self.hashes, other.hashes), changed, max(self.halvings, other.halvings))

    def unpacked(self) -> NDArray[np.bool_]:
        """[columns, samples]"""
        return np.unpackbits(self.bits, axis=1, count=len(self)).astype(bool)

    def share(self, columns: Sequence[int]) -> float:
        """The share of samples in which any of these columns changed."""
        changed = np.bitwise_or.reduce(self.bits[list(columns)], axis=0)
        return int(np.bitwise_count(changed).sum(dtype=np.int64)) / max(len(self), 1)

    def words(self) -> Hashes:
        """The bits in words of 64, [columns, words]; what is beyond the last sample is 0."""
        padded = np.zeros((len(self.bits), -(-len(self) // 64) * 8), dtype=np.uint8)
        padded[:, : self.bits.shape[1]] = self.bits
        return padded.view(np.uint64)


def _below(hashes: Hashes, halvings: int) -> NDArray[np.bool_]:
    if halvings == 0:
        return np.ones(len(hashes), dtype=bool)
    below: NDArray[np.bool_] = hashes >> np.uint64(64 - halvings) == 0
    return below
