"""`Tables`: the rows of many tables in one flat tensor on one device, their optimizer state in another.

A row has a *slot*: one int32 number space for all tables, so that a sort by slot is a sort by table. Tables of one dim
and one optimizer setting lie one after another as a *segment*, which kernels treat as one large table: the fewer
kinds of tables a model has, the less a kernel looks up per row. Segments of one padded dim and one kind of optimizer
form a *class*: a kernel has code of its own for each class there is, and handles all of them in one launch.

The last slots of a segment may be *staged*: they stand for rows of other tiers that come with a batch in a buffer of
their own, and whose summed gradient is handed out instead of applied. Addresses are counted in elements and in int64,
so storage may exceed 2^31 elements; slots must stay below 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.capabilities import DEVICE
from hotrow.errors import SettingsError
from hotrow.kernels.backend import constant, power_of_two
from hotrow.kernels.tuning import machine_name

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
SGD, ADAGRAD, ROWWISE, ADAM = (constant(i) for i in range(4))

# Columns of `Tables.layout`, which has a row for each segment.
FIRST, HOT, DIM, VALUES, STATE, CLASS = (constant(i) for i in range(6))
LAYOUT_COLUMNS = constant(8)

# Columns of `Tables.hyper`, likewise.
RATE, EPS, DECAY, CLIP_VALUE, CLIP_NORM, BOUND, BETA1, BETA2, REST1, REST2 = (constant(i) for i in range(10))
HYPER_COLUMNS = constant(12)

MOST_DIM = 4096  # of any table: what is staged on a CPU
_ALIGNED = 64  # elements: every segment begins on a boundary that suits the widest loads


@dataclass(frozen=True)
class Rule:
    """An optimizer as kernels know it; `hotrow.store.optimizers` says what each one means."""

    kind: str = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    bound: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    initial: float = 0.0
    schedule: int = 0  # tables whose learning rates change differently have different numbers

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f'Kernels know no optimizer "{self.kind}"; they have {", ".join(KINDS)}.')

    def state_dim(self, dim: int) -> int:
        """How many floats of state one row of `dim` values has."""
        return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1, "adam": 2 * dim}[self.kind]

    def hyper(self, step: int, lr: float | None = None) -> list[float]:
        """This rule's row of `Tables.hyper` at step `step`, counted from 1; `lr` is that step's, if it changes."""
        rate = self.lr if lr is None else lr
        if self.kind == "adam":
            rate *= math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        clips = [self.clip_value, self.clip_norm, self.bound]
        betas = [self.beta1, self.beta2, 1 - self.beta1, 1 - self.beta2]
        return [rate, self.eps, self.weight_decay, *clips, *betas, 0.0, 0.0]

    @property
    def plain(self) -> bool:
        """Whether nothing is clipped or bounded."""
        return not (self.clip_value or self.clip_norm or self.bound)


class TableSpec(NamedTuple):
    """A table on this device: how many rows live here, and how many of a batch may be staged beside them."""

    rows: int
    dim: int
    rule: Rule = Rule()
    staged: int = 0


class Class(NamedTuple):
    """Segments that one branch of a kernel handles.

    `vector`: elements of the widest aligned load; `full`: every dim is the whole block; `first` and `segments`: which
    segments they are.
    """

    block: int
    kind: int
    vector: int
    full: bool
    first: int
    segments: int


@dataclass
class Tables:
    """Flat storage for `specs`, and everything about it that kernels read."""

    specs: Sequence[TableSpec]
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    memory: str = "device"  # or "pinned": rows and state in host memory, which kernels reach over the link
    classes: tuple[Class, ...] = field(init=False)
    blocks: tuple[int, ...] = field(init=False)  # of each class, as the next five
    kinds: tuple[int, ...] = field(init=False)
    vectors: tuple[int, ...] = field(init=False)
    full: tuple[bool, ...] = field(init=False)
    first_segments: tuple[int, ...] = field(init=False)
    segment_counts: tuple[int, ...] = field(init=False)
    segment_of: tuple[int, ...] = field(init=False)
    first: tuple[int, ...] = field(init=False)  # each table's first slot
    staged_first: tuple[int, ...] = field(init=False)  # and its first staged one
    begins: tuple[int, ...] = field(init=False)  # where each table's values begin
    staged_size: int = field(init=False)  # elements of the buffer for staged rows
    staged_begins: Tensor = field(init=False)  # and where each segment's begin in it
    values: Tensor = field(init=False)
    state: Tensor = field(init=False)
    segments: list[list[int]] = field(init=False)
    layout: Tensor = field(init=False)  # the same on the device, padded
    hyper: Tensor = field(init=False)
    machine: str = field(init=False)
    plain: bool = field(init=False)  # whether no table clips or bounds
    nothing: Tensor = field(init=False)  # what kernels are given in place of what a batch does not have
    no_rows: Tensor = field(init=False)
    no_seed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        _check(self.specs, torch.device(self.device))
        if self.memory not in ("device", "pinned"):
            raise SettingsError(f'Rows are kept in "device" or "pinned" memory, not "{self.memory}".')
        segments = self._segments()
        rows, elements, states = self._lay_out(segments)
        self.segments = rows
        self.classes = _classes(rows, [self.specs[tables[0]] for tables in segments])
        padding = [[2**31 - 1, 0, 1, 0, 0, 0, 0, 0]] * (power_of_two(len(rows)) - len(rows))  # for bisection
        self.layout = torch.tensor(rows + padding, dtype=torch.int64, device=self.device)
        self.values = self._zeros(elements, self.dtype)
        self.state = self._zeros(max(states, 1), torch.float32)
        self.hyper = torch.empty(len(rows), len(Rule().hyper(1)), device=self.device)
        self.machine = machine_name(self.device)
        self.plain = all(spec.rule.plain for spec in self.specs)
        columns = zip(*self.classes, strict=True)
        self.blocks, self.kinds, self.vectors, self.full, self.first_segments, self.segment_counts = columns
        self.nothing = torch.empty(0, dtype=torch.int32, device=self.device)
        self.no_rows = torch.empty(0, device=self.device)
        self.no_seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.set_step(1)
        for t, spec in enumerate(self.specs):
            if spec.rule.initial:
                self.state_of(t).fill_(spec.rule.initial)

    def set_step(self, step: int, rates: Sequence[float] | None = None) -> None:
        """Sets what optimizers use at step `step`, counted from 1.

        `rates` are that step's learning rates, table by table, where they change; tables of one rule have one.
        """
        rows = []
        for tables in self._segments():
            t = tables[0]
            rows.append(self.specs[t].rule.hyper(step, None if rates is None else rates[t]))
        self.hyper.copy_(torch.tensor(rows))

    def rows_of(self, table: int) -> Tensor:
        """A view of one table's rows, `[rows, dim]`."""
        spec, begin = self.specs[table], self.begins[table]
        return self.values[begin : begin + spec.rows * spec.dim].view(spec.rows, spec.dim)

    def state_of(self, table: int) -> Tensor:
        """A view of one table's optimizer state, `[rows, state dim]`."""
        spec = self.specs[table]
        begin, width = self._state_begins[table], spec.rule.state_dim(spec.dim)
        return self.state[begin : begin + spec.rows * width].view(spec.rows, width)

    def staged_of(self, buffer: Tensor, table: int) -> Tensor:
        """A view of one table's places in a buffer for staged rows or their gradients, `[staged, dim]`."""
        spec, begin = self.specs[table], self._staged_at[table]
        return buffer[begin : begin + spec.staged * spec.dim].view(spec.staged, spec.dim)

    def _segments(self) -> list[list[int]]:
        """Tables that are alike, class after class."""
        alike: dict[tuple[int, int, int, Rule], list[int]] = {}
        for t, spec in enumerate(self.specs):
            key = (power_of_two(spec.dim), KINDS.index(spec.rule.kind), spec.dim, spec.rule)
            alike.setdefault(key, []).append(t)
        return [alike[key] for key in sorted(alike, key=lambda key: (key[:3], alike[key][0]))]

    def _lay_out(self, segments: list[list[int]]) -> tuple[list[list[int]], int, int]:
        """The rows of `layout`, and how many elements of values and of state there are."""
        count = len(self.specs)
        segment_of, first, staged_first, begins = ([0] * count for _ in range(4))
        self._state_begins, self._staged_at = [0] * count, [0] * count
        rows: list[list[int]] = []
        staged_begins = []
        slots = elements = states = staged = 0
        for s, tables in enumerate(segments):
            dim, width = self.specs[tables[0]].dim, self.specs[tables[0]].rule.state_dim(self.specs[tables[0]].dim)
            rows.append([slots, sum(self.specs[t].rows for t in tables), dim, elements, states, 0, 0, 0])
            staged_begins.append(staged)
            for t in tables:
                segment_of[t], first[t], begins[t], self._state_begins[t] = s, slots, elements, states
                slots += self.specs[t].rows
                elements += self.specs[t].rows * dim
                states += self.specs[t].rows * width
            for t in tables:
                staged_first[t], self._staged_at[t] = slots, staged
                slots += self.specs[t].staged
                staged += self.specs[t].staged * dim
            elements, states, staged = aligned(elements), aligned(states), aligned(staged)
        if slots >= 2**31:
            raise SettingsError(f"{slots:,} rows on one device are more than kernels can number (2^31 - 1).")
        self.segment_of, self.first = tuple(segment_of), tuple(first)
        self.staged_first, self.begins = tuple(staged_first), tuple(begins)
        self.staged_size = staged
        self.staged_begins = torch.tensor(staged_begins, dtype=torch.int64, device=self.device)
        return rows, elements, states

    def _zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        if self.memory == "pinned":
            return torch.zeros(elements, dtype=dtype, pin_memory=True)
        return torch.zeros(elements, dtype=dtype, device=self.device)


def _classes(rows: list[list[int]], specs: Sequence[TableSpec]) -> tuple[Class, ...]:
    """The classes of segments that `specs` are examples of; writes each segment's class into its row."""
    keys = [(power_of_two(spec.dim), KINDS.index(spec.rule.kind)) for spec in specs]
    classes = []
    for c, (block, kind) in enumerate(dict.fromkeys(keys)):
        mine = [s for s, key in enumerate(keys) if key == (block, kind)]
        dims = [specs[s].dim for s in mine]
        for s in mine:
            rows[s][5] = c
        classes.append(Class(block, kind, math.gcd(*dims, 8), dims == [block] * len(dims), mine[0], len(mine)))
    return tuple(classes)


def aligned(elements: int) -> int:
    """Where the next segment may begin, behind so many elements."""
    return -(-elements // _ALIGNED) * _ALIGNED


def _check(specs: Sequence[TableSpec], device: torch.device) -> None:
    most = DEVICE.max_dim if device.type == "cuda" else MOST_DIM
    if not specs:
        raise SettingsError("There is no table to put on the device.")
    for t, spec in enumerate(specs):
        if not 1 <= spec.dim <= most:
            raise SettingsError(f"Table {t} has dim {spec.dim}; kernels take dims from 1 to {most} here.")
        if spec.rows < 0 or spec.staged < 0:
            raise SettingsError(f"Table {t} has {spec.rows} rows and {spec.staged} staged ones: below zero.")
