"""Rows that change their tier when the plan of one process does: each moves with its state and clock, named or not.

Rows that either plan names are taken aside before any tier changes, since a device makes new room for its own: so much
host memory it costs. Where the last tier of a table changes, which has all other keys, those follow some at a time.
They are listed before anything moves, so what cannot be listed, as while a snapshot is being written, is refused
with every row still in its place. Counts for admission stay behind: a key that has no row yet is counted anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hotrow.store.store import Columns, Cut, Rows
from hotrow.tiers.device_rows import DeviceRows
from hotrow.tiers.router import Router

MOVED = 1 << 17  # keys that move at a time: what bounds the memory of a change of plan

Keys = npt.NDArray[np.int64]


def move_alone(old: Router, new: Router, steps: int) -> None:
    """Moves rows from where `old` has them to where `new` has them; all tiers have made `steps` updates."""
    for tier in old.tiers.values():
        tier.flush()
    others = {table: _unnamed(table, old, new) for table in new.plan.shares}
    aside = {table: list(_taken(table, old, new)) for table in new.plan.shares}
    for name, tier in new.tiers.items():
        tier.replan(new.plan.keys_on(name))
    for table, keys in others.items():
        before = {share.tier for share in old.plan.shares[table]}
        for share in new.plan.shares[table]:
            if share.tier not in before:  # it was not asked for this table, so it did not count
                new.tiers[share.tier].stores()[table].set_steps(steps)
        for columns in aside[table]:
            new.give(table, columns)
        for at in range(0, len(keys), MOVED):
            new.give(table, _last(table, old).take(keys[at : at + MOVED]))


def named(table: str, *routers: Router) -> Keys:
    """The keys of a table that any of the plans names."""
    shares = [share.keys for router in routers for share in router.plan.shares[table] if share.keys is not None]
    return np.unique(np.concatenate([np.empty(0, np.int64), *shares]))


def all_keys(rows: Rows) -> Keys:
    """Of every row that is there, or that there is room for on a device."""
    if isinstance(rows, DeviceRows):
        return rows.keys
    found, ended = [np.empty(0, np.int64)], False
    moment = rows.begin_cut(Cut.PEEK)
    try:
        while len((columns := moment.read_snapshot(MOVED))["keys"]):
            found.append(columns["keys"])
        ended = True
    finally:
        moment.end_snapshot(ended)
    return np.concatenate(found)


def _taken(table: str, old: Router, new: Router) -> Iterator[Columns]:
    """The rows that a plan names, of each tier that has some."""
    for tier, (part,) in old.route([table], [named(table, old, new)], [0]):
        if len(part.keys):
            yield tier.stores()[table].take(part.keys)


def _unnamed(table: str, old: Router, new: Router) -> Keys:
    """The keys that no plan names, if their rows are to leave the tier that has them."""
    if old.plan.shares[table][-1].tier == new.plan.shares[table][-1].tier:
        return np.empty(0, np.int64)
    return np.setdiff1d(all_keys(_last(table, old)), named(table, old, new))


def _last(table: str, router: Router) -> Rows:
    return router.tiers[router.plan.shares[table][-1].tier].stores()[table]
