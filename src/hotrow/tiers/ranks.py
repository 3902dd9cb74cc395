"""The tiers that a plan names for several ranks, and rows that move between them when the plan changes.

Who owns a row follows from plan and number of ranks, so ranks with different plans would each train rows of their own
without a word: before a plan is used they compare its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotrow.errors import RankError, SettingsError
from hotrow.peers import Peers
from hotrow.plan import Plan
from hotrow.store.store import Columns, RowStore
from hotrow.table import Table
from hotrow.tiers.collective import CollectiveTier
from hotrow.tiers.lanes import Lane, Lanes
from hotrow.tiers.moving import MOVED, all_keys, named
from hotrow.tiers.owned import OwnedRows
from hotrow.tiers.replicated import ReplicatedTier
from hotrow.tiers.router import Router
from hotrow.tiers.sharded import Dedup, Scope, ShardedTier
from hotrow.tiers.tier import Tier
from hotrow.world import World

COLLECTIVE = ("replicated", "node", "world")  # hottest first
_ALONE = ("host", "device")  # tiers whose rows other ranks know nothing of

Keys = npt.NDArray[np.int64]


def with_collective(
    tiers: Mapping[str, Tier],
    plan: Plan,
    tables: Sequence[Table],
    world: World,
    seed: int,
    device: torch.device | None = None,
    timeout: float | None = None,
) -> dict[str, Tier]:
    """The tiers, and those that the plan names for several ranks and that are not there; all travel as it says.

    A plan from `hotrow plan --topology` is chosen for one way of deduplicating keys and one format on the wire, so
    what it predicts holds for those only. One that says nothing leaves tiers as they are, new ones as their defaults.
    With a `device`, new tiers whose every key the plan names have their rows there. `timeout` is that of new tiers.
    """
    named = {share.tier for shares in plan.shares.values() for share in shares}
    last = {shares[-1].tier: table for table, shares in plan.shares.items()}
    wire, dedup = plan.facts.get("wire"), plan.facts.get("dedup")
    out = dict(tiers)
    for name in COLLECTIVE:
        if name not in named:
            continue
        tier = out.get(name)
        rows: dict[str, Any] = {} if name in last else {"device": device, "keys": plan.keys_on(name)}
        if timeout is not None:
            rows["timeout"] = timeout
        if isinstance(tier, CollectiveTier):
            if tier.on_device and name in last:
                raise SettingsError(
                    f'The plan puts all other keys of table {last[name]} on tier "{name}", whose rows are on a device, '
                    f"where those are only that a plan names. Put them on a tier in host memory."
                )
            tier.travel_as(wire=wire or tier.wire, dedup=dedup if name == "world" else None)
        elif tier is None and name == "replicated":
            out[name] = ReplicatedTier(tables, world, wire=wire or "float32", seed=seed, **rows)
        elif tier is None:
            scope: Scope = "node" if name == "node" else "world"
            way: Dedup = dedup if dedup and scope == "world" else "node"
            out[name] = ShardedTier(tables, world, scope, dedup=way, wire=wire or "float32", seed=seed, **rows)
    return out


def tiers_on_devices(plan: Plan, device_rows: bool) -> tuple[str, ...]:
    """The tiers whose rows lie on a device; with `device_rows` those of several ranks that hold named keys only."""
    last = {shares[-1].tier for shares in plan.shares.values()}
    return ("device", *(name for name in COLLECTIVE if device_rows and name not in last))


def check_ranks(plan: Plan, tables: Sequence[Table], peers: Peers) -> None:
    """Refuses a plan that leaves rows where each of several ranks would train its own, and plans that differ."""
    if peers.world.size == 1:
        return
    for table, shares in plan.shares.items():
        for share in shares:
            if share.tier in _ALONE:
                raise SettingsError(
                    f'The plan puts rows of table {table} on tier "{share.tier}", where each of the {peers.world.size} '
                    f"ranks would train rows of its own. Put them on replicated, node or world."
                )
    digests = peers.agree("plan", _digest(plan, tables))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RankError(
                f"Rank {rank} has another plan, or other tables, than rank 0. Give all the same run file and plan."
            )


def move_rows(old: Router, new: Router, world: World, steps: int) -> None:
    """Moves rows from where `old` has them to where `new` has them, with state and clocks, on all ranks together."""
    lanes = Lanes(world, {"move": ("world",)}, timeout=300.0)
    try:
        aside = {
            name: _set_aside(name, tier, new)
            for name, tier in old.tiers.items()
            if isinstance(tier, CollectiveTier) and tier.on_device
        }
        lane = lanes.of("move", "world")
        for table in new.plan.shares:
            last = old.plan.shares[table][-1].tier
            leaving = new.plan.shares[table][-1].tier != last
            others = _unnamed(table, old, new, lane) if leaving else iter(())
            for keys in _moving(table, old, new):
                for tier, (part,) in old.route([table], [keys], [0]):
                    rows = aside.get(old.name_of(tier), tier.stores())[table]
                    new.give(table, _gathered(rows.take(part.keys), lane, steps))
            for keys in others:
                new.give(table, _gathered(old.tiers[last].stores()[table].take(keys), lane, steps))
        # Where nothing moves nobody has waited for anybody: who closes now may cut off one that is still connecting.
        lane.counts("move", steps, np.zeros(lane.size, np.int64))
    finally:
        lanes.close()


def _set_aside(name: str, tier: CollectiveTier, new: Router) -> dict[str, OwnedRows]:
    """Has a tier on a device hold the rows of the new plan; its own that go elsewhere are then in host memory."""
    keys = new.plan.keys_on(name)
    aside = {}
    for table, rows in tier.stores().items():
        aside[table] = RowStore(tier.tables[table].model_copy(update={"admission": None, "eviction": None}))
        aside[table].import_(rows.store.take(all_keys(rows.store)))
    tier.replan(keys)
    for table, theirs in keys.items():
        tier.stores()[table].import_(aside[table].take(theirs))
    return {table: tier.owned(store) for table, store in aside.items()}


def gather_columns(columns: Columns, world: World) -> Columns:
    """Every rank's columns, one rank's behind another's, on all ranks; none may be exchanging anything else."""
    lanes = Lanes(world, {"move": ("world",)}, timeout=300.0)
    try:
        return _gathered(columns, lanes.of("move", "world"), 0)
    finally:
        lanes.close()


def _moving(table: str, old: Router, new: Router) -> Iterator[Keys]:
    """The keys of a table that a plan names and that change their tier, some at a time: the same on every rank."""
    keys = named(table, old, new)
    keys = keys[_places(table, old, keys) != _places(table, new, keys)]
    for at in range(0, len(keys), MOVED):
        yield keys[at : at + MOVED]


def _unnamed(table: str, old: Router, new: Router, lane: Lane) -> Iterator[Keys]:
    """This rank's keys on the last tier that neither plan names, some at a time: as often on every rank."""
    rows = old.tiers[old.plan.shares[table][-1].tier].stores()[table]
    keys = np.setdiff1d(all_keys(rows.store if isinstance(rows, OwnedRows) else rows), named(table, old, new))
    most = int(lane.counts("move", 0, np.full(lane.size, len(keys), np.int64)).max())
    for at in range(0, most, MOVED):
        yield keys[at : at + MOVED]


def _places(table: str, router: Router, keys: Keys) -> npt.NDArray[np.int64]:
    """A number for the tier of each key, the same in every router."""
    names = sorted(COLLECTIVE)
    out = np.full(len(keys), -1, np.int64)
    for tier, (part,) in router.route([table], [keys], [0]):
        name = router.name_of(tier)
        out[slice(None) if part.positions is None else part.positions] = names.index(name) if name in names else -1
    return out


def _gathered(columns: Columns, lane: Lane, steps: int) -> Columns:
    """Every rank's rows of a table, one behind the other."""
    if lane.size == 1:
        return columns
    flat: dict[str, npt.NDArray[Any]] = {name: np.ascontiguousarray(c).reshape(-1) for name, c in columns.items()}
    sizes = np.array([column.nbytes for column in flat.values()], np.int64)
    coming = lane.counts("move", steps, np.tile(sizes, lane.size))
    message = np.concatenate([column.view(np.uint8) for column in flat.values()])
    got = lane.swap(np.tile(message, lane.size), np.full(lane.size, len(message)), coming.sum(1))
    bounds = np.cumsum([0, *coming.reshape(-1).tolist()]).reshape(-1)
    out = {}
    for c, (name, column) in enumerate(flat.items()):
        pieces = [got[bounds[m * len(flat) + c] : bounds[m * len(flat) + c + 1]] for m in range(lane.size)]
        out[name] = np.concatenate(pieces).view(column.dtype)
    return out


def _digest(plan: Plan, tables: Sequence[Table]) -> str:
    found = hashlib.sha256(f"{plan.facts.get('dedup')} {plan.facts.get('wire')}".encode())
    for table in tables:
        found.update(table.model_dump_json().encode())
        for share in plan.shares[table.name]:
            found.update(share.tier.encode())
            found.update(b"" if share.keys is None else np.unique(share.keys).tobytes())
    return found.hexdigest()
