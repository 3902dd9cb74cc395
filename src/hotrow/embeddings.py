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

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hotrow import _native
from hotrow.capabilities import held_by_devices, kept_in_words, too_wide
from hotrow.data.batch import Batch, check_tensor
from hotrow.device_lookup import DeviceLookup
from hotrow.dropout import with_dropout
from hotrow.embedded import Embedded
from hotrow.errors import BatchError, CheckpointError, HotrowError, SettingsError, nearest
from hotrow.lookup import Chosen, Layout, Lookup, Only
from hotrow.marker import Marker
from hotrow.opaque import opaque
from hotrow.peers import Peers
from hotrow.plan import Plan
from hotrow.scaling import refuse_scaled, unscale
from hotrow.store.pieces import RankSnapshot
from hotrow.store.snapshot import Snapshot, restore
from hotrow.table import Feature, Table
from hotrow.tiers.collective import CollectiveTier
from hotrow.tiers.device import DeviceTier
from hotrow.tiers.host import HostTier
from hotrow.tiers.moving import move_alone
from hotrow.tiers.ranks import check_ranks, move_rows, tiers_on_devices, with_collective
from hotrow.tiers.router import Routed, Router
from hotrow.tiers.tier import Gradients, Tier, Wait
from hotrow.world import World

_PENDING_SAID = 32
"""Lookups with gradients that no step has applied, when it is said: more than most accumulate on purpose."""


@dataclass(frozen=True)
class Update:
    """The gradients of one step: of a lookup, or of keys routed by `router`."""

    step: int
    of: Lookup | Routed
    grads: Gradients
    router: Router | None = None

    def apply(self) -> None:
        """Hands them to the tiers."""
        if isinstance(self.of, Lookup):
            self.of.update(self.grads, self.step)
        else:
            assert self.router is not None
            self.router.update(self.of, self.grads, self.step)

    def apply_first(self, chosen: Chosen, following: Lookup | None, late: Chosen, only: Only) -> list[Wait]:
        """Hands local tiers all of a lookup's gradients, and begins to hand remote ones those of chosen rows.

        Once applied there, `late` rows of the `following` batch are fetched from tiers that `only` names.
        """
        assert isinstance(self.of, Lookup)
        return self.of.update_first(self.grads, self.step, chosen, following, late, only)

    def apply_rest(self, chosen: Chosen) -> list[Wait]:
        """Begins to hand remote tiers the gradients of all rows that were not chosen."""
        assert isinstance(self.of, Lookup)
        return self.of.update_rest(self.grads, self.step, chosen)


class Embeddings(nn.Module):
    """Rows for features, from the tiers of a plan; everything in this process's memory unless told otherwise.

    Results are computed on `device`. With `device_rows` the tiers of several ranks that the plan asks for have their
    rows there too, where it names every key of theirs. `timeout` is how many seconds an exchange of ranks may take.
    Device "meta" is as none.
    """

    most_pending = 256
    """Lookups with gradients that may wait for a step: one more is refused, since their memory must have an end."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        tiers: Mapping[str, Tier] | None = None,
        plan: Plan | None = None,
        device: torch.device | str | None = None,
        device_rows: bool = False,
        world: World | None = None,
        timeout: float | None = None,
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
        self.world = world or World()
        self._peers = Peers.of(self.world)
        self._device = torch.device(device or "cpu")
        if self._device.type == "meta":  # rows take no memory before they are used
            self._device = torch.device("cpu")
        self._rows_on = self._device if device_rows else None
        self._timeout = timeout
        if wrong := too_wide(tables) if self._device.type == "cuda" else "":
            raise SettingsError(wrong)
        if tiers is None:
            tiers = {"host": HostTier(tables, seed)} if self.world.size == 1 else {}
        plan = self._checked(plan or Plan.all_on("host" if self.world.size == 1 else "world", tables))
        with torch.device("cpu"):  # whatever device is the default
            self.router = Router(self._with_named(tiers, plan), plan)
            self.device_tier = self._computing_tier()
        self.prepare: Callable[[DeviceLookup], Any] | None = None  # instead of sending a grouped batch to the device
        self.on_step: Callable[[], None] | None = None  # instead of applying the update here and now
        self.optional: frozenset[str] = frozenset()  # features that a batch may be without
        self._layouts: dict[Any, Layout] = {}
        self._dropout = {feature.name: feature.dropout for feature in features if feature.dropout}
        self._pending: list[Lookup] = []
        self._pending_said = False
        self.expected_pending = _PENDING_SAID
        self._shown = torch.optim.SGD([torch.empty(0, device="cpu")])  # what gradient scalers see of the rows
        self._marker = Marker(seed)

    @opaque
    def forward(self, batch: Batch, features: Sequence[str] | None = None) -> Embedded:
        """What a model sees of `batch`; with `features` of these only, as of one tower alone."""
        return self.embed(self.fetch(self.group(batch, features), once=True))

    def group(self, batch: Batch, features: Sequence[str] | None = None) -> Lookup:
        """The batch's unique keys and their grouping. Touches no row: any thread may do it ahead of time.

        With `features` only these are looked up, and the batch may be without the others.
        """
        asked = None if features is None else tuple(features)
        groups = tuple(group.features for group in batch.groups)
        layout = self._layouts.get((groups, asked))
        if layout is None:
            layout = self._layouts[groups, asked] = Layout(groups, self.tables, self._asked(groups, asked), asked)
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
            return DeviceLookup(batch, layout, grouping, self.router, self.device_tier, self.prepare)
        return Lookup(batch, layout, grouping, self.router)

    def prefetch(self, lookup: Lookup, step: int) -> None:
        """Brings what tiers with a cache lack for a lookup of a coming step. Any thread may, lookups in their order."""
        if self.current(lookup):
            self.router.prefetch(lookup.routed, step)

    def fetch(self, lookup: Lookup, step: int | None = None, only: Only | None = None, *, once: bool = False) -> Lookup:
        """Brings the lookup's rows. In training mode keys without a row get one, as the table's admission has it.

        `step` is the one that the lookup is for, counted from 0, where it is not the next. With `only`, rows of those
        tiers are brought for which it holds, and the others are left for later. A lookup that is embedded only `once`
        has its rows pooled on the way where a single tier in this memory has them all: each is moved once.
        """
        self._marker.check(self.steps)
        if not self.current(lookup):
            lookup = self.group(lookup.batch, lookup.layout.asked)
        step = self.steps if step is None else step
        training = self.training and torch.is_grad_enabled()
        if not once or only is not None or not lookup.fetch_results(step, training):
            lookup.fetch(step, training, only)
        return lookup

    @property
    def looks_ahead(self) -> int:
        """Coming lookups that are worth a `prefetch`."""
        return max(tier.looks_ahead for tier in self.router.tiers.values())

    def current(self, lookup: Lookup) -> bool:
        """Whether the lookup's rows are still where they were when it was grouped: no plan has changed since."""
        return lookup.router is self.router

    def embed(self, lookup: Lookup) -> Embedded:
        """What a model sees of a fetched lookup; its gradients are applied by the first `step` after its backward."""
        if lookup.training:
            self._check_pending()
            lookup.arrived = self._arrived
        embedded = lookup.embed()
        return with_dropout(embedded, self._dropout) if self._dropout and lookup.training else embedded

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Applies all gradients that came since the last step, as one step of each table's optimizer.

        Under a `GradScaler` give it, before its `update`: gradients are divided by its scale, and a step whose
        gradients are not all finite is left out, as `scaler.step(optimizer)` does.
        """
        if scaler is not None and scaler.is_enabled():
            if self.world.size > 1:
                raise SettingsError(
                    "A GradScaler leaves steps out on the ranks where they overflow, and all ranks make a step "
                    "together: use bfloat16, which needs no scaler."
                )
            if not unscale(self._pending, scaler, self._shown):
                self._forget(self._pending)
                return
        elif scaler is None and self._pending:
            refuse_scaled()
        if self.on_step is not None:
            self.on_step()
        else:
            self.finish().apply()

    def finish(self) -> Update:
        """Ends a step: takes all gradients that came since the last one, to be applied now or later.

        Updates are to be applied in their order; fetches and the steps that follow may come before. A lookup whose
        backward is still to come has its gradient in the step after that.
        """
        pending, step = self._pending, self.steps
        self.steps += 1
        if len(pending) == 1 and pending[0].router is self.router:
            update = Update(step, pending[0], pending[0].finish(step))
        else:
            update = self._summed(pending, step)
        self._forget(pending)
        return update

    def scale(self, factor: float) -> None:
        """Multiplies all gradients that came since the last step."""
        for lookup in self._pending:
            assert lookup.grads is not None
            lookup.grads = [None if grad is None else grad * factor for grad in lookup.grads]

    def forget(self) -> None:
        """Lets go of all gradients that came since the last step."""
        self._forget(self._pending)

    def _forget(self, pending: Sequence[Lookup]) -> None:
        """Lets go of gradients; their lookups may be fetched again, for another step."""
        for lookup in pending:
            lookup.grads = None
        self._pending = []

    def _arrived(self, lookup: Lookup) -> None:
        self._pending.append(lookup)

    def _check_pending(self) -> None:
        """Says when gradients pile up that no step applies, and stops before they fill the memory."""
        count = len(self._pending)
        if count < self.expected_pending:
            return
        said = (
            f"{count} lookups have gradients that no step has applied: their rows learn nothing until then, and the "
            f"gradients take memory. Call step() of these Embeddings, or of the collection that holds them, after "
            f"each optimizer.step()."
        )
        if count >= self.most_pending:
            raise HotrowError(f"{said} To accumulate over more lookups, set most_pending of the Embeddings higher.")
        if not self._pending_said:
            self._pending_said = True
            warnings.warn(said, stacklevel=2)

    def _summed(self, pending: Sequence[Lookup], step: int) -> Update:
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
            self.router.fetch(routed, np.empty(starts[-1], np.float32), step)
        return Update(step, routed, Gradients(torch.cat(grads).numpy()), self.router)

    def replan(self, plan: Plan) -> None:
        """Moves rows, with state and clocks, to where `plan` has them. Lookups already made stay good.

        Costs a copy of every row that either plan names through host memory, and of all others of a table whose last
        tier changes, some at a time; a device never holds more than one plan's.
        Several ranks must all do it between the same two steps; only rows that change their tier travel.
        """
        plan = self._checked(plan)
        router = Router(self._with_named(self.router.tiers, plan), plan)
        for tier in router.tiers.values():
            if isinstance(tier, CollectiveTier):  # which may have had no rows, and so no updates, for a while
                tier.set_steps(self.steps)
        if self.world.size > 1:
            move_rows(self.router, router, self.world, self.steps)
            self.router = router
            return
        move_alone(self.router, router, self.steps)
        self.router = router
        self.device_tier = self._computing_tier()

    def read(self, table: str, keys: torch.Tensor) -> torch.Tensor:
        """The rows of `keys` in one table, `[n, dim]`, as they are."""
        if table not in self.tables:
            raise SettingsError(f'There is no table "{table}".{nearest(table, self.tables)}')
        self._marker.check(self.steps)
        check_tensor(keys, torch.int64, 1, "keys")
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
        Several ranks take one together, in a folder that all see; `write` returns on each when the whole is there.
        """
        self._marker.check(self.steps)
        for tier in self.router.tiers.values():
            tier.flush()
        stores = [(name, s) for tier in self.router.tiers.values() for name, s in tier.stores().items()]
        below = None if base is None else Path(base)
        if self.world.size > 1:
            return RankSnapshot(Path(folder), stores, self.steps, self.seed, below, self._peers)
        return Snapshot(Path(folder), stores, self.steps, self.seed, below)

    def restore(self, folder: Path | str) -> None:
        """Rows, optimizer state and clocks as a snapshot has them, whatever tiers and ranks it was taken from."""
        self.steps = restore(Path(folder), self.router, list(self.tables.values()), self.seed, self._peers)
        self._peers.agree("restored", "")  # nobody reads a row before who restores it has
        self._pending = []
        self._marker.restored(self.steps)

    def get_extra_state(self) -> torch.Tensor:
        """In a module's state dict: not the rows, but which ones belong to its weights."""
        return self._marker.of(self.steps)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Looks whether the rows here are those of the state dict; if not, they are to be restored before use."""
        self._marker.loaded(state, self.steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> Embeddings:
        """New embeddings with copies of all rows, where those are in this process's memory."""
        tiers = self.router.tiers
        if not all(isinstance(tier, HostTier) for tier in tiers.values()):
            names = ", ".join(tiers)
            raise HotrowError(
                f"Embeddings with rows on {names} cannot be copied: write snapshot(folder), and restore it into others."
            )
        copies = {name: tier.copy() for name, tier in tiers.items() if isinstance(tier, HostTier)}
        tables, features = list(self.tables.values()), list(self.features.values())
        plan, device = self.router.plan, self._device
        other = type(self)(tables, features, seed=self.seed, tiers=copies, plan=plan, device=device)
        memo[id(self)] = other
        other.steps, other.training, other.optional = self.steps, self.training, self.optional
        other._marker.restored(self.steps)
        return other

    def __getstate__(self) -> Any:
        raise CheckpointError(
            "Embeddings are not pickled, for that would leave their rows behind: write snapshot(folder), and "
            "restore(folder) into embeddings made anew; save the weights around them with state_dict()."
        )

    def _asked(self, groups: tuple[tuple[str, ...], ...], asked: tuple[str, ...] | None) -> dict[str, Feature]:
        """The features that a batch with these groups is looked up by."""
        if asked is None:
            there = {name for group in groups for name in group}
            return {n: f for n, f in self.features.items() if n not in self.optional or n in there}
        for name in asked:
            if name not in self.features:
                raise BatchError(f'There is no feature "{name}" to look up.{nearest(name, self.features)}')
        return {name: self.features[name] for name in asked}

    def _checked(self, plan: Plan) -> Plan:
        """The plan without rows on a device of tables that it cannot hold.

        Refuses a plan for other tables, one that ranks cannot share, and ranks with plans of their own.
        """
        tables = list(self.tables.values())
        plan.check(tables)
        for table, shares in plan.shares.items():
            if shares[-1].tier == "device":
                raise SettingsError(
                    f"The plan puts all other keys of table {table} on the device, which holds those only that a plan "
                    f"names. Put them on host."
                )
        check_ranks(plan, tables, self._peers)
        plan, kept = held_by_devices(plan, tables, tiers_on_devices(plan, self._rows_on is not None))
        if kept:
            warnings.warn(kept_in_words(kept), stacklevel=3)
        return plan

    def _with_named(self, tiers: Mapping[str, Tier], plan: Plan) -> dict[str, Tier]:
        """The tiers, and those for a device or for several ranks that the plan names and that are not there."""
        tables = list(self.tables.values())
        tiers = with_collective(tiers, plan, tables, self.world, self.seed, self._rows_on, self._timeout)
        named = {share.tier for shares in plan.shares.values() for share in shares}
        if "device" not in named or "device" in tiers:
            return tiers
        keys = plan.keys_on("device")
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
