"""Where rows live: one file a tier, and the router that splits a batch over them."""

from hotrow.tiers.host import HostTier
from hotrow.tiers.router import Router
from hotrow.tiers.tier import Part, Tier

__all__ = ["HostTier", "Part", "Router", "Tier"]
