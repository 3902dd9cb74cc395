"""The budget planner: which rows of all tables are worth their place in a small fast memory.

A row is worth its accesses a byte, so all tables compete for one budget. Rows are chosen by their density, hottest
first; what one table's next row no longer fits into may still hold rows of a narrower table. No other choice within
the budget holds more accesses, but for less than those of the first row that did not fit; with rows of one size,
none does.

Nothing is sorted row by row: tables are histograms of counts, a few thousand classes each, and the keys are picked
in one pass once the cut is known. 10^8 rows take seconds. Where counts are a summary, those that were kept compete,
with the counts they surely have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotrow.capabilities import kept_in_words, refused
from hotrow.errors import SettingsError
from hotrow.plan.plan import INDEX_BYTES, Plan, Share, row_bytes
from hotrow.profile.counts import Histogram, KeyCounts
from hotrow.profile.sample import Interval
from hotrow.table import Table


class Cut(NamedTuple):
    """Where a table is cut: keys used more often than `threshold` are hot, and `extra` of the `among` used so often."""

    threshold: int
    extra: int
    among: int
    rows: int
    accesses: int


NOTHING = Cut(np.iinfo(np.int64).max, 0, 0, 0, 0)
NO_KEYS = np.empty(0, np.int64)


class Curve(NamedTuple):
    """The best `bytes` of rows take `share` of all accesses; a point for each class of count there is."""

    bytes: npt.NDArray[np.int64]
    share: npt.NDArray[np.float64]


@dataclass(frozen=True)
class HotTable:
    """What the plan holds of one table; `share` is of the table's accesses."""

    table: Table
    row_bytes: int
    rows: int
    bytes: int
    known: int
    share: Interval
    cut: Cut


@dataclass(frozen=True)
class HotRows:
    """A choice of hot rows within `memory` bytes, and the plan that says so; `kept` are tables without any, and why."""

    memory: int
    bytes: int
    share: Interval
    tables: dict[str, HotTable]
    curve: Curve
    plan: Plan
    kept: dict[str, str]


def hot_rows(
    tables: Sequence[Table],
    counts: Mapping[str, KeyCounts],
    memory: int,
    *,
    hot: str = "device",
    cold: str = "host",
    index: int = INDEX_BYTES,
) -> HotRows:
    """The rows worth most within `memory` bytes, on tier `hot`, and all others on tier `cold`.

    Of a table that a device cannot hold none is (`capabilities`).
    """
    for table in tables:
        if table.name not in counts:
            raise SettingsError(f"The profile says nothing of table {table.name}: it is of another data set.")
    widths = {table.name: row_bytes(table, index) for table in tables}
    classes = {table.name: counts[table.name].histogram() for table in tables}
    kept = refused(tables)
    if len(kept) == len(tables):
        raise SettingsError(f"{kept_in_words(kept)} So there is nothing to plan. Take the plan away, or change that.")
    able = {name: of for name, of in classes.items() if name not in kept}
    cuts = {**dict.fromkeys(kept, NOTHING), **choose(able, widths, memory)}
    found: dict[str, HotTable] = {}
    shares: dict[str, tuple[Share, ...]] = {}
    for table in tables:
        name, cut, known = table.name, cuts[table.name], counts[table.name]
        found[name] = HotTable(
            table, widths[name], cut.rows, cut.rows * widths[name], known.distinct, held([cut], [known]), cut
        )
        keys = NO_KEYS if name in kept else known.chosen(cut.threshold, cut.extra)
        shares[name] = (Share(hot, keys), Share(cold)) if len(keys) else (Share(cold),)
    total = sum(counts[table.name].total for table in tables)
    return HotRows(
        memory,
        sum(t.bytes for t in found.values()),
        held([cuts[t.name] for t in tables], [counts[t.name] for t in tables]),
        found,
        curve(able, widths, total),
        Plan(shares, widths),
        kept,
    )


def choose(classes: Mapping[str, Histogram], widths: Mapping[str, int], memory: int) -> dict[str, Cut]:
    """Where each table is cut. `classes` are its counts, `widths` the bytes of its rows."""
    _refuse_too_little(classes, widths, memory)
    count, keys, width, owner = _by_density(classes, widths)
    taken = np.zeros_like(keys)
    whole = int(np.searchsorted(np.cumsum(keys * width), memory, side="right"))
    taken[:whole] = keys[:whole]
    room, at = memory - int((keys * width)[:whole].sum()), whole
    while at < len(keys):  # few turns: what is left is less than one row of the widest table, or the last class
        fits = np.flatnonzero(width[at:] <= room)
        if len(fits) == 0:
            break
        at += int(fits[0])
        taken[at] = min(int(keys[at]), room // int(width[at]))
        room -= int(taken[at]) * int(width[at])
        at += 1
    by_table = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=len(classes)))[:-1])
    return {name: _cut(count[of], keys[of], taken[of]) for name, of in zip(classes, by_table, strict=True)}


def curve(classes: Mapping[str, Histogram], widths: Mapping[str, int], total: int) -> Curve:
    """What share of all accesses each budget would take."""
    count, keys, width, _ = _by_density(classes, widths)
    return Curve(np.cumsum(keys * width), np.cumsum(keys * count) / max(total, 1))


def held(cuts: Sequence[Cut], counts: Sequence[KeyCounts]) -> Interval:
    """The share of accesses that hot rows take in what was counted; between its bounds where counts are a summary."""
    total = max(sum(known.total for known in counts), 1)
    accesses = sum(cut.accesses for cut in cuts)
    most = accesses + sum(cut.rows * known.error for cut, known in zip(cuts, counts, strict=True))
    return Interval(accesses / total, accesses / total, min(1.0, most / total), 1.0)


def _by_density(
    classes: Mapping[str, Histogram], widths: Mapping[str, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count, keys, row bytes and table of every class, the most accesses a byte first."""
    count = np.concatenate([np.empty(0, np.int64), *(h.counts for h in classes.values())])
    keys = np.concatenate([np.empty(0, np.int64), *(h.keys for h in classes.values())])
    owner = np.repeat(np.arange(len(classes)), [len(h.counts) for h in classes.values()])
    width = np.array([widths[name] for name in classes], np.int64)[owner]
    by = np.argsort(-(count / width), kind="stable")  # stable: a table's classes stay in falling order
    return count[by], keys[by], width[by], owner[by]


def _cut(count: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], taken: npt.NDArray[np.int64]) -> Cut:
    rows, accesses = int(taken.sum()), int((taken * count).sum())
    short = np.flatnonzero(taken < keys)
    if len(short) == 0:
        return Cut(0, 0, 0, rows, accesses)
    at = int(short[0])
    return Cut(int(count[at]), int(taken[at]), int(keys[at]), rows, accesses)


def _refuse_too_little(classes: Mapping[str, Histogram], widths: Mapping[str, int], memory: int) -> None:
    used = {name: widths[name] for name, histogram in classes.items() if len(histogram.counts)}
    if not used:
        raise SettingsError("The profile has counted no access, so there is nothing to plan.")
    least = min(used, key=lambda name: used[name])
    if memory < used[least]:
        raise SettingsError(
            f"A budget of {memory:,} bytes holds no row: the smallest, of table {least}, takes {used[least]:,} with "
            f"its optimizer state and index. Give more memory."
        )
