"""What a device can hold, known without one: the planner, the run and `Embeddings` all go by it.

Rows on a device count as admitted and are never evicted, kernels know four optimizers and dims up to 1024, and rows
that lie there together have one dtype: that of most tables, float32 if there are as many of each. A table that does
not fit stays with its owner, in host memory, and whoever plans or trains says so; nothing else about it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotrow.table import Table

if TYPE_CHECKING:
    from hotrow.plan.plan import Plan


@dataclass(frozen=True)
class Capabilities:
    """What a kind of tier can hold."""

    optimizers: frozenset[str]
    max_dim: int
    bounded: bool
    """Whether rows come and go there as `admission` and `eviction` have it."""

    def refuses(self, table: Table) -> str | None:
        """Why `table` stays with its owner; None if it fits."""
        if table.optimizer.name not in self.optimizers:
            return f"it has {table.optimizer.name}, and kernels know {', '.join(sorted(self.optimizers))}"
        if table.dim > self.max_dim:
            return f"it has dim {table.dim}, and kernels take {self.max_dim} at most"
        if table.admission is not None and not self.bounded:
            return "it admits keys, and every key of a device has a row"
        if table.eviction is not None and not self.bounded:
            return "it forgets rows, and a device keeps all that it has"
        return None


DEVICE = Capabilities(frozenset({"sgd", "adagrad", "rowwise_adagrad", "adam"}), max_dim=1024, bounded=False)


def refused(tables: Sequence[Table]) -> dict[str, str]:
    """Which of the tables cannot have rows on one device together, and why."""
    found = {table.name: why for table in tables if (why := DEVICE.refuses(table)) is not None}
    dtypes = Counter(table.dtype for table in tables if table.name not in found)
    if len(dtypes) > 1:
        held = max(sorted(dtypes, reverse=True), key=lambda dtype: dtypes[dtype])  # float32 before bfloat16
        found |= {
            table.name: f"it has {table.dtype}, and the device's rows are {held}, as those of most tables"
            for table in tables
            if table.name not in found and table.dtype != held
        }
    return found


def held_by_devices(plan: Plan, tables: Sequence[Table], tiers: Collection[str]) -> tuple[Plan, dict[str, str]]:
    """The plan without what these tiers, whose rows lie on devices, cannot hold; and which tables that are, and why."""
    kept: dict[str, str] = {}
    shares = dict(plan.shares)
    for tier in tiers:
        keys = plan.keys_on(tier)
        no = refused([table for table in tables if len(keys.get(table.name, ()))])
        kept |= no
        shares |= {name: tuple(share for share in shares[name] if share.tier != tier) for name in no}
    return (type(plan)(shares, plan.row_bytes, plan.facts), kept) if kept else (plan, kept)


def kept_in_words(kept: Mapping[str, str]) -> str:
    """One sentence: the tables that stay in host memory, and why."""
    by_reason: dict[str, list[str]] = {}
    for name, why in kept.items():
        by_reason.setdefault(why, []).append(name)
    said = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())
    return f"In host memory, as a device cannot hold them: {said}."


def too_wide(tables: Sequence[Table]) -> str:
    """What to tell who wants results of these tables on a GPU; nothing if kernels take them all."""
    wide = [f"{table.name} has dim {table.dim}" for table in tables if table.dim > DEVICE.max_dim]
    return (
        f"On a GPU kernels compute the results of all tables, and they take dims up to {DEVICE.max_dim}, but "
        f"{', '.join(wide)}. Make tables.dim smaller, or compute on the CPU."
        if wide
        else ""
    )
