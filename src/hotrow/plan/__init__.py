"""Plans: which rows live on which tier, and how they are chosen."""

from hotrow.plan.plan import Plan, Share, row_bytes
from hotrow.plan.replan import Move, moved_bytes, moves
from hotrow.plan.topology import Link, Topology, load_topology

__all__ = ["Link", "Move", "Plan", "Share", "Topology", "load_topology", "moved_bytes", "moves", "row_bytes"]
