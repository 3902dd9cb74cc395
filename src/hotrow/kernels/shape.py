"""`BatchShape`: the features of a batch, how many samples each has, and where every result stands.

Results of a batch are one flat tensor: for each group the matrix of its pooled features, side by side, `[S, sum of
dims]`; then one matrix `[lookups, dim]` for each sequence. A group with an inverse may ask for its results *expanded*,
`[B, sum of dims]`: the lookup then writes each unique sample's result to all its samples, and gradients are summed
over them (`contract`) before anything else, so that all later work is on unique samples.

A *cell* is one place for a result: a sample of a pooled feature, a lookup of a sequence. The lookups of all groups
have one numbering, group after group; offsets of the groups stand one after another likewise, each as the batch has it.
Building one costs a small copy to the device, so shapes that come again are worth keeping.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.errors import BatchError
from hotrow.kernels.backend import constant, power_of_two
from hotrow.kernels.tables import Tables

MOST_LOOKUPS = 2**31 - 2**16  # kernels count them in int32, and look a little ahead
SUM, MEAN, SEQUENCE = (constant(i) for i in range(3))
POOLINGS = ("sum", "mean", "sequence")

# Columns of `BatchShape.features`.
OFFSETS, LOOKUPS, CELLS, OUT, STRIDE, POOLING, EXPAND, UNIQUE_OUT = (constant(i) for i in range(8))
KIND, SEGMENT, TABLE_SLOT, FIRST_SLOT, HERE, WIDTH, BEGIN = (constant(i) for i in range(8, 15))
FEATURE_COLUMNS = constant(16)

# Columns of `BatchShape.segments`.
FROM, TO, COLUMNS, SAMPLES, MEMBERS, BLOCKS = (constant(i) for i in range(6))
SEGMENT_COLUMNS = constant(8)
CONTRACT_BLOCK, CONTRACT_UNROLL = 256, 4  # columns that one program contracts, of so many samples at once
CONTRACT_MANY = 4  # samples for each unique one, from which one is enough for a program; or it has two


class FeatureSpec(NamedTuple):
    """A feature: the number of the table it looks up, its pooling, and for a sequence how many lookups it has."""

    table: int
    pooling: str = "sum"
    lookups: int = 0


class GroupSpec(NamedTuple):
    """The features of one group over `samples` unique samples; `expanded` is the batch size to expand to, or None."""

    features: Sequence[FeatureSpec]
    samples: int
    lookups: int
    expanded: int | None = None


@dataclass
class BatchShape:
    """`groups` on `tables`, as kernels read it."""

    tables: Tables
    groups: Sequence[GroupSpec]
    features: Tensor = field(init=False)
    segments: Tensor = field(init=False)
    size: int = field(init=False)  # elements of the flat results
    unique_size: int = field(init=False)  # and of the results on unique samples
    lookups: int = field(init=False)
    bags: int = field(init=False)  # offsets that a batch has
    kind: str = field(init=False)  # what is tuned for: lookups; those of a cell or s, of sequences; + if expanded
    expanded: bool = field(init=False)  # whether a group's results are expanded to the batch
    contract_programs: int = field(init=False)
    contract_vector: int = field(init=False)
    contract_whole: bool = field(init=False)
    out_vector: int = field(init=False)  # what every place in the results is a multiple of, up to 8
    unit: int = field(init=False)  # what every place in the results on unique samples is a multiple of
    matrices: list[tuple[int, int, int]] = field(init=False)  # begin, rows and width of each matrix of the results

    def __post_init__(self) -> None:
        rows, segments = self._rows()
        self.bags = sum(len(group.features) * group.samples + 1 for group in self.groups)
        self.expanded = any(group.expanded is not None for group in self.groups)
        self._cells = [row[2] for row in rows]
        self._classes = [row[8] for row in rows]
        each = str((self.lookups // max(1, sum(self._cells))).bit_length())
        if 2 * sum(f.lookups for g in self.groups for f in g.features if f.pooling == "sequence") > self.lookups:
            each = "s"
        self.kind = f"{max(self.lookups, 1).bit_length()}|{each}{'+' if self.expanded else ''}"
        self.out_vector = math.gcd(*(x for row in rows for x in (row[3], row[4])), 8)
        self.unit = math.gcd(*(x for row in rows for x in (row[7], row[4])), 64)
        device = self.tables.device
        self.features = torch.tensor(rows, dtype=torch.int64).to(device)
        self.contract_tile = 1 if self.size >= CONTRACT_MANY * self.unique_size else 2
        self.contract_programs = _number_programs(segments, self.contract_tile)
        self.contract_vector = math.gcd(*(x for segment in segments for x in segment[:3]), 8)
        self.contract_whole = all(segment[2] % CONTRACT_BLOCK == 0 for segment in segments)
        padding = [[0, 0, 1, 0, -1, 2**62, 0, 0]] * (power_of_two(len(segments)) - len(segments))
        self.segments = torch.tensor(segments + padding, dtype=torch.int64).to(device)
        self._units: dict[tuple[int, ...], tuple[Tensor, int, int]] = {}
        if self.unique_size // self.unit >= 2**31 or self.lookups > MOST_LOOKUPS:
            raise BatchError(
                f"A batch with {self.lookups:,} lookups and results of {self.unique_size:,} values is more than "
                f"kernels can number ({MOST_LOOKUPS:,} lookups); make it smaller."
            )

    def units(self, tiles: tuple[int, ...]) -> tuple[Tensor, int, int]:
        """Where each feature's programs begin, padded, if one handles `tiles[class]` cells; how many there are in all;
        and how many of each feature, 0 if not all have the same."""
        if tiles not in self._units:
            starts = [0]
            for cells, kind in zip(self._cells, self._classes, strict=True):
                starts.append(starts[-1] + -(-cells // tiles[kind]))
            padded = starts + [starts[-1]] * (power_of_two(len(self._cells)) + 1 - len(starts))
            each = {end - start for start, end in itertools.pairwise(starts)}
            even = each.pop() if len(each) == 1 else 0
            self._units[tiles] = torch.tensor(padded, dtype=torch.int32).to(self.tables.device), starts[-1], even
        return self._units[tiles]

    def views(self, results: Tensor) -> list[Tensor]:
        """The matrices of flat results: one a group with pooled features, then one a sequence."""
        return [results[begin : begin + n * width].view(n, width) for begin, n, width in self.matrices]

    def _rows(self) -> tuple[list[list[int]], list[list[int]]]:
        tables, rows, segments = self.tables, [], []
        offsets = lookups = out = unique_out = members = 0
        sequences: list[tuple[list[int], int]] = []
        self.matrices = []
        for group in self.groups:
            width = sum(tables.specs[f.table].dim for f in group.features if f.pooling != "sequence")
            column = 0
            for k, feature in enumerate(group.features):
                spec = tables.specs[feature.table]
                pooled = feature.pooling != "sequence"
                row = [offsets + k * group.samples, lookups, group.samples if pooled else feature.lookups]
                row += [out + column, width if pooled else spec.dim, POOLINGS.index(feature.pooling)]
                row += [members if pooled and group.expanded is not None else -1, unique_out + column]
                segment = tables.segment_of[feature.table]
                first, hot, dim, begin, _, kind = tables.segments[segment][:6]
                row += [kind, segment, tables.first[feature.table], first, hot, dim, begin, 0]
                rows.append(row)
                if pooled:
                    column += spec.dim
                else:
                    sequences.append((row, spec.dim))
            results = group.samples if group.expanded is None else group.expanded
            if width:
                at = members if group.expanded is not None else -1
                segments.append([out, unique_out, width, group.samples, at, 0, 0, 0])
                self.matrices.append((out, results, width))
            out, unique_out = out + results * width, unique_out + group.samples * width
            members += 0 if group.expanded is None else group.samples + 1
            offsets += len(group.features) * group.samples + 1
            lookups += group.lookups
        for row, dim in sequences:
            row[3], row[7] = out, unique_out
            segments.append([out, unique_out, dim, row[2], -1, 0, 0, 0])
            self.matrices.append((out, row[2], dim))
            out, unique_out = out + row[2] * dim, unique_out + row[2] * dim
        self.size, self.unique_size, self.lookups = out, unique_out, lookups
        return rows, segments


def _number_programs(segments: list[list[int]], tile: int) -> int:
    """Writes where each segment's programs begin, and returns how many there are: a device starts 0.8 a nanosecond."""
    programs = 0
    for segment in segments:
        segment[5] = programs
        programs += -(-segment[3] // tile) * -(-segment[2] // CONTRACT_BLOCK)
    return programs
