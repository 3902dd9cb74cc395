"""The router: splits a batch's unique keys over the tiers of the plan, and asks each tier for its part.

A table that is wholly on one tier costs nothing to route. A split one costs a look into the key map of every share
but the last: about 20 ns a unique key and core, and 15 to 18 bytes for each key that the plan names. Tiers whose rows
come over a network are asked at the same time, each in a thread, while the local ones work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import SettingsError, nearest
from hotrow.plan import Plan
from hotrow.tiers.tier import Floats, Gradients, Part, Tier, Wait

Keys = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]
Routed = list[tuple[Tier, list[Part]]]

_CALLS_AT_ONCE = 4  # a pipeline fetches one batch, updates another and reads a third at the same time


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
        holders = {share.tier for shares in plan.shares.values() for share in shares}
        one_each = all(len(shares) == 1 for shares in plan.shares.values())
        self._holder = holders.pop() if one_each and len(holders) == 1 else None  # who has all rows, if one has
        holder = None if self._holder is None else self.tiers[self._holder]
        self.pooling = holder if holder is not None and holder.pools else None  # who has them all, and pools them
        self._threads: ThreadPoolExecutor | None = None  # made when tiers are first asked at the same time

    @property
    def wants_lookups(self) -> bool:
        """Whether a tier wants to know how often keys are looked up."""
        return any(tier.wants_lookups for tier in self.tiers.values())

    def route(
        self,
        tables: Iterable[str],
        keys: Sequence[Keys],
        starts: Sequence[int],
        lookups: Sequence[Counts] | None = None,
    ) -> Routed:
        """The parts each tier answers; every tier with a table in the batch gets one for it, maybe an empty one."""
        if self._holder is not None:
            every = enumerate(zip(tables, keys, starts, strict=False))
            whole = [Part(name, i, k, None, at, lookups[i] if lookups else None) for i, (name, k, at) in every]
            return [(self.tiers[self._holder], whole)] if whole else []
        parts: dict[str, list[Part]] = {name: [] for name in self.tiers}
        for index, (table, unique, start) in enumerate(zip(tables, keys, starts, strict=False)):
            shares = self._shares[table]
            times = None if lookups is None else lookups[index]
            if len(shares) == 1:
                parts[shares[0][0]].append(Part(table, index, unique, None, start, times))
                continue
            left = np.arange(len(unique))
            for tier, held in shares:
                here = np.ones(len(left), np.bool_) if held is None else held.find(unique[left]) >= 0
                mine, left = left[here], left[~here]
                of_mine = None if times is None else times[mine]
                parts[tier].append(Part(table, index, unique[mine], mine, start, of_mine))
        return [(self.tiers[name], p) for name, p in parts.items() if p]

    def name_of(self, tier: Tier) -> str:
        """What the plan calls a tier."""
        return next(name for name, held in self.tiers.items() if held is tier)

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
            if table in tier.stores():  # or another rank gives them to it
                tier.stores()[table].import_(mine)

    def prefetch(self, routed: Routed, step: int) -> None:
        """Says what a coming fetch of the same parts will ask for; returns when those that can have brought it."""
        self._at_once(routed, lambda i, tier, parts: tier.prefetch(parts, step))

    def fetch(self, routed: Routed, rows: Floats, step: int) -> list[Any]:
        """Rows to train on, from every tier; a ticket from each for the update."""
        return self._at_once(routed, lambda i, tier, parts: tier.fetch(parts, rows, step))

    def read(self, routed: Routed, rows: Floats, step: int) -> None:
        """Rows as they are, from every tier."""
        self._at_once(routed, lambda i, tier, parts: tier.read(parts, rows, step))

    def update(self, routed: Routed, grads: Gradients, step: int, tickets: Sequence[Any] | None = None) -> None:
        """Hands each tier the gradients of its part."""
        if sum(tier.remote for tier, _ in routed) > 1:
            _ = grads.flat  # summed once, before several threads ask for it
        ticket_of = [None] * len(routed) if tickets is None else tickets
        self._at_once(routed, lambda i, tier, parts: tier.update(parts, grads, step, ticket_of[i]))

    def fetch_late(self, routed: Routed, rows: Floats, step: int) -> None:
        """Writes rows that were left out of a fetch and are waited for now."""
        self._at_once(routed, lambda _, tier, parts: tier.fetch_late(parts, rows, step))

    def update_then_fetch(
        self, routed: Routed, grads: Gradients, step: int, tickets: Sequence[Any], wanted: Routed, rows: Floats
    ) -> list[Wait]:
        """Hands each tier gradients; those that are in `wanted` also give rows of the next batch, in the same go."""
        late = {tier.name: parts for tier, parts in wanted}
        begun = [
            tier.update_then_fetch(parts, grads, step, late.get(tier.name, []), rows)
            for tier, parts in routed
            if tier.remote
        ]
        for (tier, parts), ticket in zip(routed, tickets, strict=True):
            if not tier.remote:
                tier.update(parts, grads, step, ticket)
        return begun

    def update_behind(self, routed: Routed, grads: Gradients, step: int) -> list[Wait]:
        """Begins to hand each tier gradients that nobody is waiting for."""
        return [tier.update_behind(parts, grads, step) for tier, parts in routed]

    def _at_once(self, routed: Routed, ask: Callable[[int, Tier, list[Part]], Any]) -> list[Any]:
        """Asks every tier; remote ones in threads, while the local ones are asked here. Returns when all have ended."""
        remote = [i for i, (tier, _) in enumerate(routed) if tier.remote]
        if len(routed) == 1 or not remote:
            return [ask(i, tier, parts) for i, (tier, parts) in enumerate(routed)]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_CALLS_AT_ONCE * len(self.tiers), thread_name_prefix="tier")
        asked = {i: self._threads.submit(ask, i, *routed[i]) for i in remote}
        try:
            here = {i: ask(i, *routed[i]) for i in range(len(routed)) if i not in asked}
        finally:
            wait(asked.values())
        return [asked[i].result() if i in asked else here[i] for i in range(len(routed))]
