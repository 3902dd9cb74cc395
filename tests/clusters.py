"""Small clusters and tables for the tests of plans."""

import numpy as np
from hypothesis import strategies as st

from hotrow.plan import Link, Plan, Share, Topology, row_bytes
from hotrow.plan.cost import TableUse
from hotrow.plan.uses import Use
from hotrow.table import Table


def cluster(nodes, ranks, *, memory=1 << 30, between=1e8, within=1e9, rail=None, latency=1e-4):
    return Topology(
        nodes=nodes,
        ranks=ranks,
        memory=memory,
        between=Link(bandwidth=between, latency=latency),
        within=Link(bandwidth=within, latency=latency),
        rail=None if rail is None else Link(bandwidth=rail, latency=latency),
    )


CLUSTERS = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (2, 4)]).map(lambda shape: cluster(*shape))


def drawn_table(weights, draws, topology, dim=8, name="t"):
    """A table whose rows 0, 1, ... are each a class, drawn with these weights, the largest first."""
    p = np.sort(np.array(weights, np.float64))[::-1] / np.sum(weights)
    table = Table(name=name, dim=dim)
    classes = np.arange(len(p), 0, -1)
    use = Use.of_probabilities(p, draws, topology)
    return p, TableUse(
        table, row_bytes(table), classes, np.ones(len(p), np.int64), use, hot=np.arange(min(len(p), 256))
    )


def drawn_steps(p, draws, topology, steps, seed=0, name="t"):
    random = np.random.default_rng(seed)
    return [[{name: random.choice(len(p), draws, p=p)} for _ in range(topology.size)] for _ in range(steps)]


def split_plan(rows, replicated, node, name="t"):
    """The first rows replicated, the next ones on every node; and how many rows of each class that is."""
    at = np.arange(rows)
    masks = {"replicated": at < replicated, "node": (at >= replicated) & (at < replicated + node)}
    named = [Share(tier, at[mask]) for tier, mask in masks.items() if mask.any()]
    held = {tier: mask.astype(np.int64) for tier, mask in masks.items()}
    held["world"] = 1 - held["replicated"] - held["node"]
    return Plan({name: (*named, Share("world"))}), held
