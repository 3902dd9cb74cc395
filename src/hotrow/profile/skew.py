"""How unequal the keys of a feature are: what the hottest take, and the exponent of Zipf's law that fits best.

The exponent s is the likeliest one if the r-th of n keys had a chance in proportion to r^-s, ranks being those
of the counts themselves. Ranking by the counts flatters the top, so few accesses a key give an s above
the true one; with ten accesses a key or more it is right within some hundredths.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hotrow.profile.counts import KeyCounts

Floats = NDArray[np.float64]


def top_share(counts: KeyCounts, top: float = 0.01) -> float:
    """The share of accesses that the hottest `top` of the distinct keys take; at least one key is looked at."""
    if not counts.total:
        return 0.0
    curve = counts.curve()
    rows = max(counts.distinct * top, 1.0)
    share = np.interp(rows, np.append(0, curve.rows), np.append(0.0, curve.share))  # keys of a class count the same
    return float(share)


def zipf_exponent(counts: KeyCounts, most: float = 5.0) -> float:
    """The likeliest exponent of Zipf's law for these counts, from 0 (uniform) to `most`."""
    classes = counts.histogram()
    keys = int(classes.keys.sum())
    if keys < 2:
        return 0.0
    lasts = np.cumsum(classes.keys).astype(np.float64)
    logs = _log_factorial(lasts) - _log_factorial(lasts - classes.keys)
    total = float((classes.counts * classes.keys).sum())
    mean_log = float((classes.counts * logs).sum()) / total
    low, high = 0.0, most  # the likelihood has one peak: where the expected log of a rank is the mean one
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected_log(keys, middle) > mean_log else (low, middle)
    return (low + high) / 2


def _expected_log(keys: int, exponent: float) -> float:
    """The mean of log r where rank r of `keys` has a chance in proportion to r ** -exponent."""
    head = np.arange(1, min(keys, 4096) + 1, dtype=np.float64)
    tail = np.exp(np.linspace(math.log(len(head) + 0.5), math.log(keys + 0.5), 2049)) if keys > len(head) else head[:0]
    ranks, widths = head, np.ones(len(head))
    if len(tail):  # beyond the first ranks a sum is an integral
        ranks = np.append(head, np.sqrt(tail[1:] * tail[:-1]))
        widths = np.append(widths, np.diff(tail))
    chances = widths * ranks**-exponent
    return float((chances * np.log(ranks)).sum() / chances.sum())


def _log_factorial(n: Floats) -> Floats:
    n = np.maximum(n, 1.0)
    stirling: Floats = n * np.log(n) - n + 0.5 * np.log(2 * np.pi * n) + 1 / (12 * n) - 1 / (360 * n**3)
    return np.where(n == 1, 0.0, stirling)
