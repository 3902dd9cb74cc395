"""A plan: which rows live on which tier.

Per table an ordered list of `Share`s, each a tier and the keys it holds; the last one of a table names no keys and
takes every key that no other names, seen or not. The plain plan puts everything on one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow.errors import SettingsError
from hotrow.table import Table


@dataclass(frozen=True)
class Share:
    """The keys of one table that one tier holds; None: all that no earlier share of the table names."""

    tier: str
    keys: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Plan:
    """For each table its shares, hottest first."""

    shares: dict[str, tuple[Share, ...]]

    def __post_init__(self) -> None:
        for table, shares in self.shares.items():
            if not shares or shares[-1].keys is not None:
                raise SettingsError(f"Plan for table {table}: the last share must take the keys no other names.")
            if len({s.tier for s in shares}) < len(shares):
                raise SettingsError(f"Plan for table {table}: a tier stands twice; give it one share.")
            if any(s.keys is None for s in shares[:-1]):
                raise SettingsError(f"Plan for table {table}: only the last share may leave its keys open.")

    @staticmethod
    def all_on(tier: str, tables: Sequence[Table]) -> Plan:
        """Every row of every table on one tier."""
        return Plan({table.name: (Share(tier),) for table in tables})
