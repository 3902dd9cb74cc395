"""The router: splits a batch's unique keys over the tiers of the plan, and asks each tier for its part.

A table that is wholly on one tier costs nothing to route. A split one costs a look into the key map of every share
but the last: about 20 ns a unique key and core, and 15 to 18 bytes for each key that the plan names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import SettingsError, nearest
from hotrow.plan import Plan
from hotrow.tiers.tier import Floats, Gradients, Part, Tier

Keys = npt.NDArray[np.int64]
Routed = list[tuple[Tier, list[Part]]]


class Router:
    """The tiers there are, by name, and the plan that says who holds what."""

    def __init__(self, tiers: Mapping[str, Tier], plan: Plan) -> None:
        self.tiers = dict(tiers)
        self.plan = plan
        for table, shares in plan.shares.items():
            for share in shares:
                if share.tier not in self.tiers:
                    raise SettingsError(
                        f'The plan puts table {table} on tier "{share.tier}", which there is not.'
                        f"{nearest(share.tier, self.tiers)}"
                    )
        self._shares = {
            table: [(s.tier, None if s.keys is None else _native.KeyMap(np.unique(s.keys))) for s in shares]
            for table, shares in plan.shares.items()
        }

    def route(self, tables: Iterable[str], keys: Sequence[Keys], starts: Sequence[int]) -> Routed:
        """The parts each tier answers; every tier with a table in the batch gets one for it, maybe an empty one."""
        parts: dict[str, list[Part]] = {name: [] for name in self.tiers}
        for index, (table, unique, start) in enumerate(zip(tables, keys, starts, strict=False)):
            shares = self._shares[table]
            if len(shares) == 1:
                parts[shares[0][0]].append(Part(table, index, unique, None, start))
                continue
            left = np.arange(len(unique))
            for tier, held in shares:
                here = np.ones(len(left), np.bool_) if held is None else held.find(unique[left]) >= 0
                mine, left = left[here], left[~here]
                parts[tier].append(Part(table, index, unique[mine], mine, start))
        return [(self.tiers[name], p) for name, p in parts.items() if p]

    def without(self, name: str) -> Router:
        """The same with nothing on one tier: how keys are routed that it does not hold."""
        shares = {t: tuple(s for s in shares if s.tier != name) for t, shares in self.plan.shares.items()}
        return Router({n: tier for n, tier in self.tiers.items() if n != name}, Plan(shares))

    def give(self, table: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Rows of one table, as a row store exports them, to the tiers that hold them."""
        n = len(columns["keys"])
        if n == 0:
            return
        for tier, (part,) in self.route([table], [columns["keys"]], [0]):
            at = part.positions
            mine = columns if at is None else {name: c.reshape(n, -1)[at] for name, c in columns.items()}
            tier.stores()[table].import_(mine)

    def fetch(self, routed: Routed, rows: Floats, step: int) -> list[Any]:
        """Rows to train on, from every tier; a ticket from each for the update."""
        return [tier.fetch(parts, rows, step) for tier, parts in routed]

    def read(self, routed: Routed, rows: Floats, step: int) -> None:
        """Rows as they are, from every tier."""
        for tier, parts in routed:
            tier.read(parts, rows, step)

    def update(self, routed: Routed, grads: Gradients, step: int, tickets: Sequence[Any] | None = None) -> None:
        """Hands each tier the gradients of its part."""
        for i, (tier, parts) in enumerate(routed):
            tier.update(parts, grads, step, None if tickets is None else tickets[i])
