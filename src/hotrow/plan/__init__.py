"""Plans: which rows live on which tier, and how they are chosen."""

from hotrow.plan.plan import Plan, Share, row_bytes

__all__ = ["Plan", "Share", "row_bytes"]
