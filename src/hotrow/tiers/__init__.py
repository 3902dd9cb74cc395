"""Where rows live: one file a tier, and the router that splits a batch over them."""

from hotrow.tiers.cached import Cache, CachedTier
from hotrow.tiers.collective import CollectiveTier
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.exact_cache import ExactCachedTier
from hotrow.tiers.host import HostTier
from hotrow.tiers.replicated import ReplicatedTier
from hotrow.tiers.router import Router
from hotrow.tiers.served import ServedTier
from hotrow.tiers.sharded import ShardedTier
from hotrow.tiers.tier import Gradients, Part, Places, Tier

__all__ = [
    "Cache",
    "CachedTier",
    "CollectiveTier",
    "DeviceTier",
    "ExactCachedTier",
    "Gradients",
    "HostTier",
    "Part",
    "Places",
    "ReplicatedTier",
    "Router",
    "ServedTier",
    "ShardedTier",
    "Tier",
]
