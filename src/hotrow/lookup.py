"""`Lookup`: one batch on its way through the tables, from unique keys to results, and from gradients back.

The grouping says which lookups share a row; it is made once and used by the fetch, by pooling and by the sum of
gradients, which therefore needs no sort and no atomics. All features of a batch are one node of autograd.

The rows of all tables lie in one flat array, table after table, so that a copy to an accelerator and an exchange
see one tensor, however many tables there are. Gradients of the results are kept until the step, which sums each
row's while it updates the row; so until then what was given to `backward` must not be changed in place.

Autograd holds the lookup until its backward comes, before or after a step, and nobody else does: results that are
dropped take it with them. A second backward needs `retain_graph=True`, as everywhere in PyTorch, and adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow import _native
from hotrow.data.batch import Batch
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError
from hotrow.table import Feature, Table
from hotrow.tiers.router import Routed, Router
from hotrow.tiers.tier import Floats, Gradients, Part, Places, Tier, Wait

_POOLINGS = ("sum", "mean", "sequence")
_NO_KEYS = np.empty(0, np.int64)


Only = Callable[[Tier], bool]
Chosen = Sequence[npt.NDArray[np.int64]]
"""For each table of a batch the positions of some of its unique keys, ascending."""


class Layout:
    """Which features of a kind of batch look up which tables; the same for every batch with the same groups.

    `asked` are the features that were asked for, where those are not all.
    """

    def __init__(
        self,
        groups: tuple[tuple[str, ...], ...],
        tables: dict[str, Table],
        features: dict[str, Feature],
        asked: tuple[str, ...] | None = None,
    ) -> None:
        self.asked = asked
        order = {name: t for t, name in enumerate(tables)}
        missing = set(features) - {name for group in groups for name in group}
        if missing:
            have = ", ".join(name for group in groups for name in group)
            raise BatchError(f'The batch has no feature "{min(missing)}"; it has {have}.')

        def spec(name: str) -> tuple[int, int]:
            if name not in features:
                return -1, 0
            return order[features[name].table], _POOLINGS.index(features[name].pooling)

        self.tables, self._spec = tuple(tables), spec
        # All of a batch, for a tier that has its keys from the grouping.
        self.whole = [Part(name, t, _NO_KEYS, None, 0) for t, name in enumerate(tables)]
        self.native = _native.Layout([t.dim for t in tables.values()], [[spec(n) for n in g] for g in groups])
        self.pooled: list[tuple[tuple[str, ...], tuple[int, ...], int]] = []
        self.sequences: list[tuple[str, int, int, int]] = []  # feature, group, place in the group, dim
        for g, group in enumerate(groups):
            pooled = [n for n in group if n in features and features[n].pooling != "sequence"]
            dims = tuple(tables[features[n].table].dim for n in pooled)
            self.pooled.append((tuple(pooled), dims, sum(dims)))
            self.sequences += [
                (n, g, k, tables[features[n].table].dim)
                for k, n in enumerate(group)
                if n in features and features[n].pooling == "sequence"
            ]

    def looks_up(self, feature: str) -> tuple[int, str]:
        """The number of the table that a feature looks up, and its pooling."""
        table, pooling = self._spec(feature)
        return table, _POOLINGS[pooling]


@dataclass
class Lookup:
    """A batch and its grouping; once fetched its rows, and after `backward` the gradients of its results."""

    in_place: ClassVar[bool] = True
    """Whether rows stay where they are brought to, so that several threads can each bring some."""

    batch: Batch
    layout: Layout
    grouping: _native.Grouping
    router: Router
    training: bool = False
    tickets: list[Any] | None = None
    rows: Tensor | None = None
    results: list[Tensor | None] | None = None
    """Where rows were pooled by their tier: then there are no `rows`."""
    pooled: bool = False
    """Whether they were, to be trained on."""
    grads: list[Tensor | None] | None = None
    arrived: Callable[[Lookup], None] | None = None
    """Told when the first gradients since the last step are here."""

    @cached_property
    def routed(self) -> Routed:
        """What each tier is asked for; laid out when first needed, which is never where one tier pools all rows."""
        return self._route()

    def _route(self) -> Routed:
        tables = self.layout.tables
        keys = [self.grouping.keys(t) for t in range(len(tables))]
        lookups = None
        if self.router.wants_lookups:
            lookups = [np.diff(self.grouping.lookup_starts(t)) for t in range(len(tables))]
        return self.router.route(tables, keys, self.grouping.starts, lookups)

    def fetch(self, step: int, training: bool, only: Only | None = None) -> None:
        """Brings the rows to train on, new ones included, or rows as they are; with `only`, those of some tiers."""
        self.training = training
        if self.rows is None:
            self.rows = _room(self.grouping.starts[-1])
        self._bring(self.rows.numpy(), step, only)

    def fetch_results(self, step: int, training: bool) -> bool:
        """As `fetch`, straight into the results, where one tier has all rows and pools; says whether one does."""
        tier, parts = self.router.pooling, self.layout.whole
        if tier is None or not parts:
            return False
        self.training = self.pooled = training
        self.results = self.empty_results()
        places = Places(self.grouping, [None if r is None else r.numpy() for r in self.results])
        if training:
            self.tickets = [tier.fetch_results(parts, places, step)]
        else:
            tier.read_results(parts, places, step)
        return True

    def empty_results(self) -> list[Tensor | None]:
        """Room for the results."""
        return [None if shape is None else _room(shape[0] * shape[1]).view(shape) for shape in self.result_shapes()]

    def fetch_some(self, chosen: Chosen, step: int, only: Only, *, late: bool = False) -> None:
        """After a `fetch` without these tiers: brings their rows at the positions `chosen` for each table among `keys`.

        Others can follow, in any thread; `late` ones are waited for. All are to be there before they are embedded.
        """
        assert self.rows is not None
        routed = _asked(narrow(_of(self.routed, only), chosen))
        if late:
            self.rest.fetch_late(routed, self.rows.numpy(), step)
        else:
            self.rest.fetch(routed, self.rows.numpy(), step)

    def _bring(self, rows: Floats, step: int, only: Only | None) -> None:
        at = [i for i, (tier, _) in enumerate(self.routed) if only is None or only(tier)]
        asked = [self.routed[i] for i in at]
        if not self.training:
            self.rest.read(asked, rows, step)
            return
        if self.tickets is None:
            self.tickets = [None] * len(self.routed)
        for i, ticket in zip(at, self.rest.fetch(asked, rows, step), strict=True):
            self.tickets[i] = ticket

    def embed(self) -> Embedded:
        """What a model sees; autograd leads from here to `grads`."""
        if self.rows is None and self.results is None:
            raise BatchError(
                "This lookup has no rows yet, or was fetched to be embedded once and has been: fetch it before it is "
                "embedded."
            )
        start = torch.empty(0, requires_grad=self.training)
        results = _Pool.apply(start, self, self.rows)  # type: ignore[no-untyped-call]
        groups = self.batch.groups
        pooled = [
            PooledGroup(names, dims, rows, group.inverse)
            for (names, dims, _), rows, group in zip(self.layout.pooled, results, groups, strict=False)
            if rows is not None
        ]
        sequences = {}
        for (name, g, k, _), rows in zip(self.layout.sequences, results[len(groups) :], strict=True):
            s = groups[g].unique_size
            offsets = groups[g].offsets[k * s : (k + 1) * s + 1]
            begins = None if groups[g].begins is None else self.window_begins(name)
            sequences[name] = JaggedRows(rows, offsets - offsets[0], groups[g].inverse, begins)
        return Embedded(pooled, sequences)

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        """Adds gradients of the results to those kept for the step."""
        self._add([None if grad is None else grad.float().contiguous() for grad in grads])

    def _add(self, given: list[Tensor | None]) -> None:
        if self.grads is None:
            self.grads = given
            if self.arrived is not None:
                self.arrived(self)
            return
        self.grads = [
            new if old is None else old if new is None else old + new
            for old, new in zip(self.grads, given, strict=True)
        ]

    def keys(self) -> list[npt.NDArray[np.int64]]:
        """For each table the unique keys that tiers are asked for."""
        return [self.grouping.keys(t) for t in range(len(self.layout.tables))]

    def read_again(self, chosen: Chosen, step: int, only: Only) -> None:
        """Brings rows of some tiers once more: those at the positions `chosen` for each table among `keys`."""
        assert self.rows is not None
        self.rest.read(_asked(narrow(_of(self.routed, only), chosen)), self.rows.numpy(), step)

    def finish(self, step: int) -> Gradients:
        """Ends a step: updates what is at hand in this lookup, and gives the gradients that tiers are to apply."""
        return self.gradients()

    def update(self, grads: Gradients, step: int) -> None:
        """Hands the gradients to the tiers."""
        tickets, self.tickets = self.tickets, None  # each is good for one update
        if self.pooled and grads.places is not None:
            assert self.router.pooling is not None
            ticket = None if tickets is None else tickets[0]
            self.router.pooling.update(self.layout.whole, grads, step, ticket)
            return
        self.rest.update(self.routed, grads, step, tickets)

    def update_first(
        self, grads: Gradients, step: int, chosen: Chosen, following: Lookup | None, late: Chosen, only: Only
    ) -> list[Wait]:
        """Hands local tiers all gradients, and remote ones those of chosen rows and of tables that count updates.

        In the same go the `late` rows of the `following` batch are fetched from the remote tiers that `only` names.
        """
        held, self.tickets = self.tickets or [None] * len(self.routed), None
        routed: Routed = []
        tickets: list[Any] = []
        for (tier, parts), ticket in zip(self.routed, held, strict=True):
            first = [p if _counts_updates(tier, p) else _some(p, chosen[p.number]) for p in parts]
            routed.append((tier, first if tier.remote else parts))
            tickets.append(None if tier.remote else ticket)
        if following is None:
            return self.rest.update_then_fetch(routed, grads, step, tickets, [], np.empty(0, np.float32))
        assert following.rows is not None
        wanted = narrow(_of(following.routed, only), late)
        return self.rest.update_then_fetch(routed, grads, step, tickets, wanted, following.rows.numpy())

    def update_rest(self, grads: Gradients, step: int, chosen: Chosen) -> list[Wait]:
        """Hands remote tiers the gradients that `update_first` left out."""
        others = [np.delete(np.arange(len(keys)), at) for keys, at in zip(self.keys(), chosen, strict=True)]
        routed: Routed = []
        for tier, parts in self.routed:
            left = [_some(p, others[p.number]) for p in parts if tier.remote and not _counts_updates(tier, p)]
            routed += [(tier, left)] if left else []
        return self.rest.update_behind(routed, grads, step)

    @property
    def rest(self) -> Router:
        """The router to the tiers that are asked."""
        return self.router

    def gradients(self) -> Gradients:
        """The gradients of the batch's rows; a result that has none counts as zeros."""
        assert self.grads is not None
        matrices: list[Floats | None] = []
        for grad, shape in zip(self.grads, self.result_shapes(), strict=True):
            if shape is None:
                matrices.append(None)
            else:
                matrices.append(np.zeros(shape, np.float32) if grad is None else grad.numpy())
        return Gradients(places=Places(self.grouping, matrices))

    def result_shapes(self) -> list[tuple[int, int] | None]:
        """One matrix for each group's pooled features, None if it has none; then one for each sequence.

        A sequence whose windows overlap has a row for each stored key that lies in one, whichever share it.
        """
        groups = self.batch.groups
        shapes: list[tuple[int, int] | None] = [
            (group.unique_size, width) if width else None
            for group, (_, _, width) in zip(groups, self.layout.pooled, strict=True)
        ]
        for name, g, k, dim in self.layout.sequences:
            s, offsets = groups[g].unique_size, groups[g].offsets
            if groups[g].begins is None:
                shapes.append((int(offsets[(k + 1) * s] - offsets[k * s]), dim))
            else:
                shapes.append((self._windows(name)[0], dim))
        return shapes

    def window_begins(self, sequence: str) -> Tensor:
        """Where in the rows of a sequence each window begins."""
        return torch.from_numpy(self._windows(sequence)[1])

    def _windows(self, sequence: str) -> tuple[int, npt.NDArray[np.int64]]:
        """How many rows the windows of a sequence share, and where in them each begins."""
        windows = self.grouping.windows([name for name, *_ in self.layout.sequences].index(sequence))
        assert windows is not None
        return windows


def _room(floats: int) -> Tensor:
    """Room for so many; from a megabyte on it is memory of an earlier step, where there is some left over."""
    return torch.empty(floats) if floats < 1 << 18 else torch.from_numpy(_native.spare_floats(floats))


def _of(routed: Routed, only: Only) -> Routed:
    return [(tier, parts) for tier, parts in routed if only(tier)]


def _asked(routed: Routed) -> Routed:
    """Without tiers that nothing is wanted of; ranks ask collective ones all the same."""
    return [(tier, parts) for tier, parts in routed if tier.collective or any(len(part.keys) for part in parts)]


def narrow(routed: Routed, chosen: Chosen) -> Routed:
    """The chosen rows of what was routed; every tier still has a part for each of its tables, maybe an empty one."""
    return [(tier, [_some(part, chosen[part.number]) for part in parts]) for tier, parts in routed]


def _some(part: Part, at: npt.NDArray[np.int64]) -> Part:
    """The rows of a part that stand at these positions of its table's."""
    here: npt.NDArray[Any] = at
    if part.positions is not None:
        wanted = np.zeros(int(part.positions.max(initial=-1)) + 1, np.bool_)
        wanted[at[at < len(wanted)]] = True
        here = wanted[part.positions]
    positions = at if part.positions is None else part.positions[here]
    lookups = None if part.lookups is None else part.lookups[here]
    return part._replace(keys=part.keys[here], positions=positions, lookups=lookups)


def _counts_updates(tier: Tier, part: Part) -> bool:
    """Whether the table's optimizer goes by how many updates the table had, so that each must come in one piece."""
    return tier.tables[part.table].optimizer.name == "adam"


class _Pool(torch.autograd.Function):
    """All features of a batch in one node: rows to results, whose gradients the lookup keeps."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, lookup: Lookup, rows: Tensor | None) -> tuple[Tensor | None, ...]:
        results, lookup.results = lookup.results, None
        if results is None:
            assert rows is not None
            results = lookup.empty_results()
            lookup.grouping.forward(rows.numpy(), [None if r is None else r.numpy() for r in results])
        ctx.lookup = lookup
        ctx.save_for_backward(start)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        _ = ctx.saved_tensors  # PyTorch refuses them, and so a second backward, where the graph was not retained
        ctx.lookup.keep(grads)
        return None, None, None
