"""What a new plan asks to be moved: the rows whose tier changes, and the bytes that go over each link.

A row that moves is taken from the rank that gives it and sent to all others with its optimizer state and clock, who
keep what is theirs (`tiers.ranks.move_rows`): simple, and dear only where many rows move, which a plan made from
yesterday's and today's accesses seldom asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow.errors import SettingsError
from hotrow.plan.plan import Plan, row_bytes
from hotrow.plan.topology import Topology
from hotrow.table import Table

Ints = npt.NDArray[np.int64]
_COLUMNS = 20
"""What is sent beside values and state: key (8), clock, uses and last use (4 each)."""


@dataclass(frozen=True)
class Move:
    """Keys of one table that leave a tier for another, sorted."""

    table: str
    source: str
    target: str
    keys: Ints


def moves(old: Plan, new: Plan) -> tuple[Move, ...]:
    """What must move for `new` to hold where `old` did, of the keys that either names: others stay open."""
    if set(old.shares) != set(new.shares):
        raise SettingsError("The plans are for different tables, so nothing can be moved from one to the other.")
    found = []
    for table in old.shares:
        before, after = old.shares[table], new.shares[table]
        named = [s.keys for s in (*before, *after) if s.keys is not None]
        if before[-1].tier != after[-1].tier:
            raise SettingsError(f"Table {table} goes from {before[-1].tier} to {after[-1].tier} whole; load it anew.")
        keys = np.unique(np.concatenate([np.empty(0, np.int64), *named]))
        was, will = _tiers(old, table, keys), _tiers(new, table, keys)
        for source in sorted(set(was)):
            for target in sorted(set(will[was == source]) - {source}):
                found.append(Move(table, str(source), str(target), keys[(was == source) & (will == target)]))
    return tuple(found)


def moved_bytes(found: Sequence[Move], topology: Topology, tables: Sequence[Table]) -> tuple[int, int]:
    """Bytes that moves send within nodes and between them, all ranks together: key, values, state, clock and uses."""
    widths = {table.name: row_bytes(table, index=_COLUMNS) for table in tables}
    total = sum(len(move.keys) * widths[move.table] for move in found)
    return total * (topology.ranks - 1), total * (topology.size - topology.ranks)


def _tiers(plan: Plan, table: str, keys: Ints) -> npt.NDArray[np.str_]:
    tiers = np.full(len(keys), plan.shares[table][-1].tier, dtype="U32")
    for share in reversed(plan.shares[table][:-1]):
        assert share.keys is not None  # only the last share leaves its keys open
        tiers[np.isin(keys, share.keys)] = share.tier
    return tiers
