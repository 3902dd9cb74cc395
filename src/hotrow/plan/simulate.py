"""Simulation: the same plan replayed over real or drawn batches on a cluster there need not be, every entry counted.

`count_step` takes the keys that each rank looks up in one step and says what the ranks would exchange, exactly: the
tier of each key, its owner by the same hash as in training, distinct keys of ranks and nodes. So a real run can be
compared byte for byte, and clusters of 2 to 4096 ranks can be compared with each other. It does not touch rows. A step
takes about 50 ns for each distinct key of a rank, so 4096 ranks with 10,000 each are counted in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import SettingsError
from hotrow.plan.plan import Plan
from hotrow.plan.topology import Topology
from hotrow.plan.traffic import WAYS, Dedup, Exchange, Leg, Route, Traffic, Wire, count_bytes, legs, owners, wire_bytes
from hotrow.table import Table

Ints = npt.NDArray[np.int64]
Step = Sequence[Mapping[str, Ints]]
"""For each rank the keys it looks up in each table; a key may stand there several times."""


class _Places:
    """How many entries each rank sends and takes within its node, and each node over the link to others."""

    def __init__(self, topology: Topology) -> None:
        self.rank_out, self.rank_in = np.zeros(topology.size), np.zeros(topology.size)
        self.node_out, self.node_in = np.zeros(topology.nodes), np.zeros(topology.nodes)

    def add(self, other: _Places, bytes_each: float, back: bool) -> None:
        """Adds another's entries as bytes; `back` turns them round."""
        mine = (self.rank_in, self.rank_out, self.node_in, self.node_out)
        theirs = (other.rank_out, other.rank_in, other.node_out, other.node_in)
        for into, of in zip(mine if back else (mine[1], mine[0], mine[3], mine[2]), theirs, strict=True):
            into += bytes_each * of

    def exchange(self, tier: str, leg: Leg, tables: int, topology: Topology) -> Exchange:
        within, between = float(self.rank_out.sum()), float(self.node_out.sum())
        rank = float(max(self.rank_out.max(), self.rank_in.max()))
        node = float(max(self.node_out.max(), self.node_in.max()))
        if leg.counts:
            within, between = count_bytes(leg.route, tables, topology)
            rank, node = within / topology.size, between / topology.nodes
        return Exchange(tier, leg.name, leg.lane, within, between, rank, node)


def count_step(
    plan: Plan,
    topology: Topology,
    step: Step,
    tables: Sequence[Table],
    *,
    wire: Wire = "float32",
    dedup: Dedup | None = None,
) -> Traffic:
    """What the ranks exchange in one step; how the world's keys are deduplicated is the plan's, unless given."""
    if len(step) != topology.size:
        raise SettingsError(f"A step has a batch for each of {topology.size} ranks, not for {len(step)}.")
    mode = dedup or plan.facts.get("dedup", "node")
    if f"world/{mode}" not in WAYS:
        raise SettingsError(f'Keys are deduplicated by "node", "rank" or "none", not by "{mode}".')
    loads: dict[tuple[str, int], _Places] = {}
    users: dict[str, int] = {}
    for table in tables:
        row = wire_bytes(table, wire)
        for tier, keys in _by_tier(plan, table.name, [batch[table.name] for batch in step], mode).items():
            users[tier] = users.get(tier, 0) + 1
            routes = _routes(keys, {leg.route for leg in legs(tier, topology)}, topology)
            for at, leg in enumerate(legs(tier, topology)):
                load = loads.setdefault((tier, at), _Places(topology))
                load.add(routes[leg.route], leg.entry_bytes(row), leg.back)
    return Traffic(
        tuple(
            loads[tier, at].exchange(tier, leg, users[tier], topology)
            for tier in WAYS
            for at, leg in enumerate(legs(tier, topology) if tier in users else ())
        )
    )


def _by_tier(plan: Plan, table: str, ranks: Sequence[Ints], dedup: str) -> dict[str, list[Ints]]:
    """For each tier of the table the keys of every rank; distinct ones but where lookups travel as they are."""
    shares = plan.shares[table]
    if len(shares) == 1 and dedup == "none":
        return {"world/none": list(ranks)}
    found: dict[str, list[Ints]] = {}
    for keys in ranks:
        distinct = keys if dedup == "none" else _native.unique(np.ascontiguousarray(keys, np.int64))[0]
        left = distinct
        for share in shares:
            here = np.ones(len(left), np.bool_) if share.keys is None else np.isin(left, share.keys)
            name = f"world/{dedup}" if share.tier == "world" else share.tier
            if name not in WAYS:
                raise SettingsError(f'The plan puts table {table} on tier "{share.tier}", which no ranks share.')
            mine = left[here]
            if dedup == "none" and share.tier != "world":
                mine = np.unique(mine)
            found.setdefault(name, []).append(mine)
            left = left[~here]
    return found


def _routes(ranks: Sequence[Ints], wanted: set[Route], topology: Topology) -> dict[Route, _Places]:
    """Entries on each route. Ranks of a node stand side by side, and so they are gone through."""
    g, size = topology.ranks, topology.size
    out = {route: _Places(topology) for route in wanted}
    anyone: list[Ints] = []
    for node in range(topology.nodes):
        here = ranks[node * g : (node + 1) * g]
        for number, keys in enumerate(here):
            owner, rank = owners(keys, size), node * g + number
            for route in wanted & {"lookups", "ranks"}:
                _send(out[route], rank, owner, topology)
            if "mates" in wanted:
                _send(out["mates"], rank, node * g + owner % g, topology)
        if wanted & {"owners", "sums", "copies", "spread"}:
            met = _native.unique(np.concatenate(here))[0]
            anyone.append(met)
            if "sums" in wanted:
                out["sums"].node_out[node] += len(met) * (topology.nodes - 1)
                out["sums"].node_in += len(met) * (np.arange(topology.nodes) != node)
            if "owners" in wanted:
                _send(out["owners"], node * g, owners(met, size), topology, nodes_only=True)
    if wanted & {"copies", "spread"}:
        _copy(out, owners(_native.unique(np.concatenate(anyone))[0], size), topology)
    return out


def _send(places: _Places, rank: int, to: Ints, topology: Topology, nodes_only: bool = False) -> None:
    """Entries of one rank, or of its node, to the ranks `to`; what it keeps goes nowhere."""
    g = topology.ranks
    node = to // g
    far = node != rank // g
    places.node_out[rank // g] += int(far.sum())
    places.node_in += np.bincount(node[far], minlength=topology.nodes)
    if not nodes_only:
        near = to[~far & (to != rank)]
        places.rank_out[rank] += len(near)
        places.rank_in += np.bincount(near, minlength=topology.size)


def _copy(out: Mapping[Route, _Places], owner: Ints, topology: Topology) -> None:
    """A copy of each of these from its owner to its mates, and from each mate to its node."""
    g, nodes = topology.ranks, topology.nodes
    of_node, of_mate = np.bincount(owner // g, minlength=nodes), np.bincount(owner % g, minlength=g)
    if "copies" in out:
        out["copies"].node_out += of_node * (nodes - 1)
        out["copies"].node_in += len(owner) - of_node
    if "spread" in out:
        out["spread"].rank_out += np.tile(of_mate * (g - 1), nodes)
        out["spread"].rank_in += np.tile(len(owner) - of_mate, nodes)


@dataclass(frozen=True)
class Simulated:
    """The mean step of a plan on a topology."""

    traffic: Traffic
    seconds: float
    steps: int


def simulate(
    plan: Plan,
    topology: Topology,
    steps: Iterable[Step],
    tables: Sequence[Table],
    *,
    wire: Wire = "float32",
    dedup: Dedup | None = None,
) -> Simulated:
    """Replays steps: the mean of their bytes and of their times."""
    counted = [count_step(plan, topology, step, tables, wire=wire, dedup=dedup) for step in steps]
    if not counted:
        raise SettingsError(f"There is no whole step to replay: a step has a batch for each of {topology.size} ranks.")
    seconds = sum(traffic.seconds(topology) for traffic in counted) / len(counted)
    return Simulated(Traffic.mean(counted), seconds, len(counted))


def memory(plan: Plan, topology: Topology, tables: Sequence[Table], keys: Mapping[str, Ints]) -> Ints:
    """Bytes of rows on each rank once all `keys` of each table have a row: exact where they are known."""
    from hotrow.plan.cost import NAME_BYTES
    from hotrow.plan.plan import row_bytes

    total = np.zeros(topology.size, np.int64)
    for table in tables:
        left = np.unique(keys[table.name])
        for share in plan.shares[table.name]:
            here = np.ones(len(left), np.bool_) if share.keys is None else np.isin(left, share.keys)
            mine, left = owners(left[here], topology.size), left[~here]
            width = row_bytes(table)
            if share.tier == "replicated":
                total += len(mine) * width
            elif share.tier == "node":
                total += np.tile(np.bincount(mine % topology.ranks, minlength=topology.ranks), topology.nodes) * width
            else:
                total += np.bincount(mine, minlength=topology.size) * width
            total += 0 if share.keys is None else len(share.keys) * NAME_BYTES
    return total


def whole_steps(batches: Iterable[Mapping[str, Ints]], topology: Topology, most: int) -> Iterator[Step]:
    """Successive batches as steps of all ranks, rank after rank as the reader deals them; at most so many."""
    step: list[Mapping[str, Ints]] = []
    made = 0
    for batch in batches:
        step.append(batch)
        if len(step) == topology.size:
            yield step
            step, made = [], made + 1
            if made == most:
                return
