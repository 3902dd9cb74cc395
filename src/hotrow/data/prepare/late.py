"""Samples that come late: they stand in the log after a sample of their session with a later time.

Clustering puts them where they belong, so by default they are only counted. A log of which that is a sign of damage
can have them refused, or set aside (`late = "skip"`), as a trainer that had read the log as it came would not have seen
them in time either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.spool import SHIFT, slices_of
from hotrow.errors import DataError

Ints = NDArray[np.int64]


def late_rows(firsts: Ints, rows: Ints) -> NDArray[np.bool_]:
    """Which samples are late. They come session by session, each in order of (time, row).

    `firsts` tells sessions apart. A sample is late if one that comes after it here, so at a later time, has a smaller
    row.
    """
    if not len(rows):
        return np.zeros(0, dtype=bool)
    ends = np.append(firsts[1:] != firsts[:-1], True)
    rank = np.empty(len(rows), np.int64)
    rank[np.argsort(rows, kind="stable")] = np.arange(len(rows))
    # From the end: each session lies below those after it, so that the running minimum never looks past its end.
    level = rank[::-1] - np.cumsum(ends[::-1]) * len(rows)
    after = np.minimum.accumulate(level)
    late: NDArray[np.bool_] = np.append(False, after[:-1] < level[1:])[::-1]
    return late


def refuse_late(work: Work, late: Ints) -> None:
    """Raises `DataError` for the first of these rows."""
    row = int(late.min())
    raise DataError(
        f"{slices_of(work)[row >> SHIFT].shown}: time runs backwards: {len(late):,} samples, the first of them sample "
        f"{(row & ((1 << SHIFT) - 1)) + 1:,} of slice {(row >> SHIFT) + 1}, stand after a later one of their session. "
        f"Let such samples be sorted with late = sort, or set them aside with late = skip."
    )
