"""Where rows live: one file a tier, and the router that splits a batch over them."""

from hotrow.tiers.device import DeviceTier
from hotrow.tiers.host import HostTier
from hotrow.tiers.router import Router
from hotrow.tiers.tier import Gradients, Part, Places, Tier

__all__ = ["DeviceTier", "Gradients", "HostTier", "Part", "Places", "Router", "Tier"]
