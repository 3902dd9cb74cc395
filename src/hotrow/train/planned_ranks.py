"""`PlannedRanks`: a plan for several ranks in force, and a new one from live counts between two steps.

`plan.path` names what `hotrow plan --topology` wrote: which rows are copied to every rank or node, and how keys travel.
With `plan.replan_every` each rank counts in how many of its batches a key is used. When a new plan is due the counts
of all ranks are put together, so that all choose alike; the topology, the memory for copies and the way keys travel
stay those of the saved plan, and rows that change their tier move with state and clock: no update is lost. Training
stands still meanwhile, and the metrics say how long.

Ranks are taken to use rows independently of each other, which live counts cannot tell. Each new plan halves the
counts, so the batches of i plans ago weigh 2^-i. A resumed run goes on with the plan in force and counts anew.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from hotrow.capabilities import held_by_devices
from hotrow.data.batch import Batch
from hotrow.plan import Plan, Share, row_bytes
from hotrow.plan.cost import HOT, UNUSED, TableUse
from hotrow.plan.replan import moves
from hotrow.plan.shard import TIERS, Sharding, shard
from hotrow.plan.topology import Topology
from hotrow.plan.uses import Use
from hotrow.profile.counts import KeyCounts
from hotrow.run import PlanSection
from hotrow.settings import parse
from hotrow.table import Table
from hotrow.tiers.ranks import gather_columns, tiers_on_devices
from hotrow.train.evaluate import Ranker
from hotrow.train.feed import Feed, Line
from hotrow.train.logs import RunFolder
from hotrow.train.ready import Ready
from hotrow.world import World

_COPIES = TIERS[:2]


class LiveUses:
    """In how many of a rank's batches each key was used, and the plan that all ranks make of it together."""

    def __init__(self, tables: list[Table]) -> None:
        self.tables = tables
        self._counts = {table.name: KeyCounts() for table in tables}
        self._batches = 0.0

    def see(self, lookup: Any) -> None:
        """Counts the unique keys of a lookup."""
        for number, table in enumerate(lookup.layout.tables):
            self._counts[table].add(lookup.grouping.keys(number))
        self._batches += 1

    def choose(self, topology: Topology, world: World, plan: Plan) -> Sharding | None:
        """What to copy, from what all ranks saw; None if they saw nothing. Collective."""
        everyone = self._together(world)
        batches = self._batches * world.size  # ranks make steps together
        if not batches or not any(len(c.histogram().counts) for c in everyone.values()):
            return None
        self._known = everyone
        used = [_used(table, everyone[table.name], batches, topology) for table in self.tables]
        extra = int(plan.facts["memory"]["extra"])
        return shard(used, topology, extra=extra, wire=plan.facts["wire"], dedups=(plan.facts["dedup"],))

    def plan(self, chosen: Sharding, facts: Mapping[str, Any]) -> Plan:
        """The plan that names the chosen rows."""
        return chosen.plan(lambda name, rows: self._known[name].hottest(rows)[0], facts)

    def forget(self) -> None:
        """What was counted so far weighs half from now on."""
        self._counts = {name: counts.halved() for name, counts in self._counts.items()}
        self._batches /= 2

    def _together(self, world: World) -> dict[str, KeyCounts]:
        """The counts of all ranks, the same on each of them."""
        out = {}
        for table in self.tables:
            mine = self._counts[table.name].arrays()
            whole = gather_columns({name: mine[name] for name in ("keys", "counts")}, world)
            out[table.name] = KeyCounts()
            out[table.name].add(whole["keys"], whole["counts"])
        return out


def _used(table: Table, counts: KeyCounts, batches: float, topology: Topology) -> TableUse:
    """How ranks use a table of which each key was in so many of `batches` batches."""
    found = counts.histogram()
    times, keys = found if len(found.counts) else UNUSED
    rank = np.minimum(times / batches, 1.0)
    node, world = (
        -np.expm1(ranks * np.log1p(-np.minimum(rank, 1 - 1e-12))) for ranks in (topology.ranks, topology.size)
    )
    hot, _ = counts.hottest(HOT)
    return TableUse(table, row_bytes(table), times, keys, Use(rank, rank, node, world), hot=hot)


class PlannedRanks(Feed):
    """A feed with a plan for several ranks."""

    def __init__(self, ranker: Ranker, settings: PlanSection) -> None:
        super().__init__(ranker)
        self.settings = settings
        self.plan = ranker.embeddings.router.plan
        self._live: LiveUses | None = None
        self._lookup: Any = None
        if settings.replan_every is not None:
            topology = parse(Topology, self.plan.facts["topology"], f"the topology of {settings.path}")
            self._topology = topology.model_copy(update={"memory": 1 << 62})  # only copies are limited
            self._live = LiveUses(list(ranker.embeddings.tables.values()))

    def start(self) -> list[str]:
        return [f"Rows over {self.ranker.ranks.world.size} ranks as planned: {_said(self.plan)}."]

    def write(self, folder: RunFolder) -> None:
        """Keeps the plan that the run began with."""
        self.plan.save(folder.plan, overwrite=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "facts": self.plan.facts, "row_bytes": self.plan.row_bytes}

    def arrays(self) -> dict[str, Tensor]:
        found = {}
        for number, shares in enumerate(self.plan.shares.values()):
            for share in shares:
                if share.keys is not None:
                    found[f"feed/plan/{number}/{share.tier}"] = from_numpy(share.keys.copy())
        return found

    def restore(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        super().restore(step, state, arrays)
        if "facts" not in state:  # the checkpoint is of a run without a plan; this one's holds
            return
        shares = {}
        for number, table in enumerate(self.plan.shares):
            named = [(tier, arrays.get(f"feed/plan/{number}/{tier}")) for tier in _COPIES]
            kept = tuple(Share(tier, keys.numpy()) for tier, keys in named if keys is not None)
            shares[table] = (*kept, self.plan.shares[table][-1])
        now = {name: self.plan.facts[name] for name in ("wire",) if name in self.plan.facts}  # free to change
        self._put_in_force(Plan(shares, dict(state["row_bytes"]), {**state["facts"], **now}))

    def __next__(self) -> Ready:
        fetched = super().__next__()
        self._lookup = fetched.lookup
        return fetched

    def hold(self, batch: Batch, samples: int) -> None:
        super().hold(batch, samples)
        if self._live is not None:
            self._live.see(self._lookup)

    def update(self, batch: Batch) -> None:
        super().update(batch)
        if self._live is not None:
            self._live.see(self._lookup)

    def between_steps(self) -> list[Line]:
        every = self.settings.replan_every
        ended = self.step % self.steps_an_epoch == 0
        due = ended if every == "epoch" else every is not None and self.step % every == 0
        return [self._replan()] if due else []

    def _put_in_force(self, plan: Plan) -> None:
        self.ranker.embeddings.replan(plan)
        self.plan = plan

    def _replan(self) -> Line:
        """Makes a plan of what was trained on and moves rows to where it has them."""
        began = time.monotonic()
        assert self._live is not None
        with self.paused():
            chosen = self._live.choose(self._topology, self.ranker.ranks.world, self.plan)
            plan = self.plan
            if chosen is not None:
                kept = {name: self.plan.facts[name] for name in ("memory", "topology")}
                plan = self._live.plan(chosen, {**kept, "counted": "live", "step": self.step})
                on_devices = tiers_on_devices(plan, self.settings.device_rows)
                plan, _ = held_by_devices(plan, self._live.tables, on_devices)  # said when the run began
            moved = sum(len(move.keys) for move in moves(self.plan, plan))
            if moved:
                self._put_in_force(plan)
        self._live.forget()
        return "plan", {
            "rows": {tier: sum(map(len, plan.keys_on(tier).values())) for tier in _COPIES},
            "moved": moved,
            "stopped_training_for": time.monotonic() - began,
        }


def _said(plan: Plan) -> str:
    copies = {tier: sum(map(len, plan.keys_on(tier).values())) for tier in _COPIES}
    travel = {"node": "each key of a node once", "rank": "each key of a rank once", "none": "every lookup"}
    way = travel.get(plan.facts.get("dedup", "node"), "each key of a node once")
    return f"{copies['replicated']:,} on every rank, {copies['node']:,} on every node; {way} to the others"
