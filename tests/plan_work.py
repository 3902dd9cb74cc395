"""What ranks do in the tests of plans: measure their links, and exchange rows as a plan says."""

import numpy as np

from hotrow.plan import Plan, Share
from hotrow.plan.measure import measure
from hotrow.table import Table
from hotrow.tiers.replicated import ReplicatedTier
from hotrow.tiers.router import Router
from hotrow.tiers.sharded import ShardedTier
from hotrow.tiers.tier import Gradients


def measured(world):
    """The topology as plain data."""
    return measure(world, large=1 << 18, turns=3).model_dump()


def exchanged(world, dims, named, dedup, wire, batches):
    """Bytes that this rank sends within its node and to others in one fetch and update of its own batch."""
    tables = [Table(name=name, dim=dim) for name, dim in dims.items()]
    plan = Plan(
        {
            name: (*(Share(tier, np.array(keys)) for tier, keys in shares.items()), Share("world"))
            for name, shares in named.items()
        }
    )
    tiers = {"world": ShardedTier(tables, world, "world", dedup=dedup, wire=wire)}
    if any("node" in shares for shares in named.values()):
        tiers["node"] = ShardedTier(tables, world, "node", wire=wire)
    if any("replicated" in shares for shares in named.values()):
        tiers["replicated"] = ReplicatedTier(tables, world, wire=wire)
    router = Router(tiers, plan)
    unique = [np.unique(batches[world.rank][name], return_counts=True) for name in dims]
    keys, times = [k for k, _ in unique], [n.astype(np.int32) for _, n in unique]
    starts = np.cumsum([0, *(len(k) * t.dim for k, t in zip(keys, tables, strict=True))])
    rows = np.zeros(starts[-1], np.float32)
    routed = router.route([t.name for t in tables], keys, starts[:-1].tolist(), times)
    tickets = router.fetch(routed, rows, 0)
    router.update(routed, Gradients(np.ones_like(rows)), 0, tickets)
    sent = [t for tier in tiers.values() for t in tier.traffic.values()]
    for tier in tiers.values():
        tier.close()
    return sum(t.within for t in sent), sum(t.between for t in sent)
