"""Embedding kernels in Triton, each beside the plain PyTorch twin that says what it computes.

`Tables` holds rows of many tables on a device, `BatchShape` says what a batch looks up in them, and `group`, `lookup`
and `update` are its steps. Nothing here needs more than torch; without Triton the twins run, and say so once.
"""

from hotrow.kernels.shape import BatchShape, FeatureSpec, GroupSpec
from hotrow.kernels.steps import Grouping, Members, Staged, group, group_numbers, lookup, tune, update
from hotrow.kernels.tables import Rule, Tables, TableSpec

__all__ = [
    "BatchShape",
    "FeatureSpec",
    "GroupSpec",
    "Grouping",
    "Members",
    "Rule",
    "Staged",
    "TableSpec",
    "Tables",
    "group",
    "group_numbers",
    "lookup",
    "tune",
    "update",
]
