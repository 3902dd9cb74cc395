"""`Embeddings`: tables that grow, as a module for anyone's own loop.

    embeddings = Embeddings([Table(name="item", dim=16)], [Feature(name="item")])
    for batch in batches:
        loss = model(embeddings(batch), batch.dense)
        loss.backward()
        embeddings.step()          # beside the dense optimizer's step

`forward` is three steps that a pipeline can also take one by one, the first ones ahead of time: `group` finds the
batch's unique keys, `fetch` brings their rows, `embed` pools them under autograd. In evaluation mode, and where
gradients are off, rows are read and nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hotrow import _native
from hotrow.data.batch import Batch
from hotrow.device_lookup import DeviceLookup
from hotrow.embedded import Embedded
from hotrow.errors import BatchError, SettingsError, nearest
from hotrow.lookup import Layout, Lookup
from hotrow.plan import Plan
from hotrow.store.snapshot import Snapshot, restore
from hotrow.table import Feature, Table
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.host import HostTier
from hotrow.tiers.router import Router
from hotrow.tiers.tier import Gradients, Tier


class Embeddings(nn.Module):
    """Rows for features, from the tiers of a plan; everything in this process's memory unless told otherwise."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        tiers: Mapping[str, Tier] | None = None,
        plan: Plan | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tables = _by_name("table", tables)
        self.features = _by_name("feature", features)
        for feature in features:
            if feature.table not in self.tables:
                raise SettingsError(
                    f'Feature {feature.name} looks up table "{feature.table}", which there is not.'
                    f"{nearest(feature.table, self.tables)}"
                )
        self.seed = seed
        self.steps = 0
        plan = plan or Plan.all_on("host", tables)
        plan.check(tables)
        self._device = torch.device(device or "cpu")
        self.router = Router(self._with_device(tiers or {"host": HostTier(tables, seed)}, plan), plan)
        self.device_tier = self._computing_tier()
        self.send_ahead = True  # whether a batch goes to the device as soon as it is grouped
        self._layouts: dict[tuple[tuple[str, ...], ...], Layout] = {}
        self._pending: list[Lookup] = []

    def forward(self, batch: Batch) -> Embedded:
        """What a model sees of `batch`."""
        return self.embed(self.fetch(self.group(batch)))

    def group(self, batch: Batch) -> Lookup:
        """The batch's unique keys and their grouping. Touches no row: any thread may do it ahead of time."""
        groups = tuple(group.features for group in batch.groups)
        layout = self._layouts.get(groups)
        if layout is None:
            layout = self._layouts[groups] = Layout(groups, self.tables, self.features)
        for name, g, _, _ in layout.sequences:
            if batch.groups[g].weights is not None:
                raise BatchError(
                    f"Feature {name} is a sequence, which has no use for the weights the batch brings; "
                    f"put it in a group without weights."
                )
        grouping = layout.native.group(
            [g.values.numpy() for g in batch.groups],
            [g.offsets.numpy() for g in batch.groups],
            [None if g.weights is None else g.weights.numpy() for g in batch.groups],
            [None if g.begins is None else g.begins.numpy() for g in batch.groups],
        )
        if self.device_tier is not None:
            return DeviceLookup(batch, layout, grouping, self.router, self.device_tier, self.send_ahead)
        return Lookup(batch, layout, grouping, self.router)

    def fetch(self, lookup: Lookup) -> Lookup:
        """Brings the lookup's rows. In training mode keys without a row get one, as the table's admission has it."""
        if lookup.router is not self.router:  # grouped before the plan changed
            lookup = self.group(lookup.batch)
        lookup.fetch(self.steps, self.training and torch.is_grad_enabled())
        return lookup

    def embed(self, lookup: Lookup) -> Embedded:
        """What a model sees of a fetched lookup; its gradients are applied by the next `step`."""
        if lookup.training and not any(lookup is other for other in self._pending):
            self._pending.append(lookup)
        return lookup.embed()

    def step(self) -> None:
        """Applies the gradients of every lookup since the last step, as one step of each table's optimizer."""
        pending = [lookup for lookup in self._pending if lookup.grads is not None]
        self._pending = []
        if len(pending) == 1 and pending[0].router is self.router:
            pending[0].update(self.steps)
        else:
            self._step_summed(pending)
        self.steps += 1

    def _step_summed(self, pending: Sequence[Lookup]) -> None:
        """Several lookups, or none: one update with the sum of their gradients."""
        flat = [lookup.gradients().flat for lookup in pending]
        keys, grads, starts = [], [], [0]
        for t, table in enumerate(self.tables.values()):
            unique, inverse = _native.unique(
                np.concatenate([np.empty(0, np.int64), *(lookup.grouping.keys(t) for lookup in pending)])
            )
            total = torch.zeros(len(unique), table.dim)
            for_table = [
                torch.from_numpy(grad[lookup.grouping.starts[t] : lookup.grouping.starts[t + 1]])
                for grad, lookup in zip(flat, pending, strict=True)
            ]
            if for_table:
                total.index_add_(0, torch.from_numpy(inverse).long(), torch.cat(for_table).view(-1, table.dim))
            keys.append(unique)
            grads.append(total.reshape(-1))
            starts.append(starts[-1] + total.numel())
        routed = self.router.route(list(self.tables), keys, starts)
        if any(lookup.router is not self.router for lookup in pending):  # rows may have moved since they were fetched
            self.router.fetch(routed, np.empty(starts[-1], np.float32), self.steps)
        self.router.update(routed, Gradients(torch.cat(grads).numpy()), self.steps)

    def replan(self, plan: Plan) -> None:
        """Moves rows, with state and clocks, to where `plan` has them. Lookups already made stay good.

        Costs a copy of every row that either plan names through host memory; a device never holds more than one plan's.
        """
        plan.check(list(self.tables.values()))
        taken = {}
        for table in self.tables:
            shares = (*self.router.plan.shares[table], *plan.shares[table])
            named = [share.keys for share in shares if share.keys is not None]
            keys = np.unique(np.concatenate([np.empty(0, np.int64), *named]))
            owners = self.router.route([table], [keys], [0])
            taken[table] = [tier.stores()[table].take(part.keys) for tier, (part,) in owners]
        for name, tier in self.router.tiers.items():
            tier.replan(plan.keys_on(name))
        self.router = Router(self._with_device(self.router.tiers, plan), plan)
        self.device_tier = self._computing_tier()
        for table, columns in taken.items():
            for rows in columns:
                self.router.give(table, rows)

    def read(self, table: str, keys: torch.Tensor) -> torch.Tensor:
        """The rows of `keys` in one table, `[n, dim]`, as they are."""
        if table not in self.tables:
            raise SettingsError(f'There is no table "{table}".{nearest(table, self.tables)}')
        rows = torch.empty(len(keys), self.tables[table].dim)
        routed = self.router.route([table], [keys.contiguous().numpy()], [0])
        self.router.read(routed, rows.view(-1).numpy(), self.steps)
        return rows

    def stats(self) -> dict[str, dict[str, int]]:
        """For each table how many rows it has in this process and the bytes they take."""
        found = {name: {"rows": 0, "bytes": 0} for name in self.tables}
        for tier in self.router.tiers.values():
            for name, store in tier.stores().items():
                found[name]["rows"] += len(store)
                found[name]["bytes"] += store.bytes
        return found

    def snapshot(self, folder: Path | str, base: Path | str | None = None) -> Snapshot:
        """A consistent cut of every table, now: cheap. Its `write` does the work, in any thread, beside training.

        With `base`, the last snapshot that was written or restored, it holds only what changed since then. The
        cut is between two steps of one thread; with others updating meanwhile it is one moment for each table.
        """
        for tier in self.router.tiers.values():
            tier.flush()
        stores = [(name, s) for tier in self.router.tiers.values() for name, s in tier.stores().items()]
        return Snapshot(Path(folder), stores, self.steps, self.seed, None if base is None else Path(base))

    def restore(self, folder: Path | str) -> None:
        """Rows, optimizer state and clocks as a snapshot has them, whatever tiers it was taken from."""
        self.steps = restore(Path(folder), self.router, list(self.tables.values()), self.seed)
        self._pending = []

    def _with_device(self, tiers: Mapping[str, Tier], plan: Plan) -> dict[str, Tier]:
        """The tiers, and a device tier where the plan names one that is not there."""
        named = {share.tier for shares in plan.shares.values() for share in shares}
        if "device" not in named or "device" in tiers:
            return dict(tiers)
        tables, keys = list(self.tables.values()), plan.keys_on("device")
        tier = DeviceTier(tables, keys, device=self._device, seed=self.seed)
        tier.steps = self.steps
        return {"device": tier, **tiers}

    def _computing_tier(self) -> DeviceTier | None:
        """Where results are computed, if not by the host: an accelerator does so even if it holds no row."""
        for tier in self.router.tiers.values():
            if isinstance(tier, DeviceTier):
                return tier
        return None if self._device.type == "cpu" else DeviceTier(list(self.tables.values()), device=self._device)

    def extra_repr(self) -> str:
        return ", ".join(f"{t.name}: dim {t.dim}" for t in self.tables.values())


def _by_name(what: str, settings: Sequence[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for s in settings:
        if s.name in named:
            raise SettingsError(f'There are two {what}s called "{s.name}".')
        named[s.name] = s
    return named
