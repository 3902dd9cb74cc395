"""`Graph`: who used what, as a bipartite graph of two features' keys, and the drawing of neighbours in it.

Its edges are the distinct pairs of keys in the positive samples of a split: `hotrow graph DATA` writes them, in one
Arrow file that is mapped into memory, 16 bytes an edge and about 32 a node with the map of its keys. Each side has its
neighbours one node after another (CSR), by number and in rising order. The file has a checksum of all that it says and
a CRC-32 of each array, compared when it is opened; version 1 had none.

Drawing is as GraphSAGE has it: `fan_out` neighbours, uniformly and with replacement, none where a node has none. So a
node's draws all have one length, and the second hop of a sample is its first hop's draws one after another, with no
boundaries to keep. A number of the caller decides each draw: the same number, the same neighbours.

The edge between the two ends of a sample is left out when its neighbours are drawn. A training sample that was positive
would otherwise find its own answer among them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow import _native
from hotrow.data.dataset import DataSet
from hotrow.data.labels import label_column, of_column
from hotrow.data.mix import mix64
from hotrow.errors import DataError, SettingsError, nearest
from hotrow.files import replacing
from hotrow.sealed import to_text, unsealed

Ints = NDArray[np.int64]
U64 = NDArray[np.uint64]

_FORMAT = "hotrow-graph"
_VERSION = 2
_SCHEMA = pa.schema({"value": pa.int64()})
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Side(NamedTuple):
    """The nodes of one feature: their `keys`, and those they touch, by number: `others[begins[n]:begins[n + 1]]`."""

    keys: Ints
    begins: Ints
    others: Ints


class Drawn(NamedTuple):
    """Neighbours as numbers on the other side: the first node's `lengths[0]`, 0 or the fan-out, then the next one's.

    `draws` has a number for each neighbour, by which its own neighbours can be drawn.
    """

    nodes: Ints
    lengths: Ints
    draws: U64


class Graph:
    """A graph between the keys of two features, `between`."""

    def __init__(self, between: Sequence[str], first: Side, second: Side) -> None:
        self.between = (between[0], between[1])
        self.sides = (first, second)
        self._maps = [_native.KeyMap(np.array(side.keys)) for side in self.sides]

    @property
    def edges(self) -> int:
        return len(self.sides[0].others)

    @staticmethod
    def of_pairs(between: Sequence[str], first: Ints, second: Ints) -> Graph:
        """The graph of these pairs of keys; a pair that stands twice is one edge."""
        keys, numbers = zip(*(np.unique(side, return_inverse=True) for side in (first, second)), strict=True)
        codes = np.unique(numbers[0].astype(np.int64) * len(keys[1]) + numbers[1])
        ends = (codes // max(len(keys[1]), 1), codes % max(len(keys[1]), 1))
        back = np.argsort(ends[1], kind="stable")
        return Graph(
            between,
            Side(keys[0], _begins(ends[0], len(keys[0])), ends[1]),
            Side(keys[1], _begins(ends[1], len(keys[1])), ends[0][back]),
        )

    @staticmethod
    def of_data_set(
        dataset: DataSet,
        split: str = "train",
        between: Sequence[str] = ("user", "item"),
        positive: float = 0.5,
        label: str = "",
    ) -> Graph:
        """The pairs of a split's samples whose label is at least `positive`; of all samples of a log without one."""
        from hotrow.data.reader import Reader

        single = {f.name: f for f in dataset.schema.features if f.kind == "key"}
        for name in between:
            if name not in single:
                raise SettingsError(
                    f'A graph is between features with one key a sample; {dataset.path} has none called "{name}".'
                    f"{nearest(name, single)}"
                )
        if len(between) != 2 or between[0] == between[1]:
            raise SettingsError("A graph is between two different features, as in --between user,item.")
        labels = dataset.schema.label_names
        column = label_column(label, labels, "--label") if labels or label else 0
        pairs: list[list[Ints]] = [[], []]
        for batch in Reader(dataset, split, 1 << 16, shuffle=False):
            wanted = slice(None) if batch.labels is None else of_column(batch.labels, column).numpy() >= positive
            spelled = batch.expand()
            for name, into in zip(between, pairs, strict=True):
                into.append(spelled[name].values.numpy()[wanted])
        first, second = (np.concatenate([np.empty(0, np.int64), *arrays]) for arrays in pairs)
        if len(first) == 0:
            raise DataError(
                f'The split "{split}" of {dataset.path} has no sample with a label of {positive:g} or more.'
            )
        return Graph.of_pairs(between, first, second)

    def nodes(self, side: int, keys: Ints) -> Ints:
        """The number of each key on a side; -1 for one that has no edge."""
        found: Ints = self._maps[side].find(np.ascontiguousarray(keys)).astype(np.int64)
        return found

    def draw(self, side: int, nodes: Ints, fan_out: int, draws: U64, without: Ints | None = None) -> Drawn:
        """Neighbours of each of `nodes`, which are numbers or -1; `draws` has a number for each to draw by.

        `without` names for each node a neighbour that is not drawn, -1 for none.
        """
        this = self.sides[side]
        if not self.edges:
            return Drawn(np.empty(0, np.int64), np.zeros(len(nodes), np.int64), draws[:0])
        degrees = np.where(nodes >= 0, np.diff(this.begins)[np.maximum(nodes, 0)], 0)
        skipped = np.full(len(nodes), -1) if without is None else self._places(side, nodes, without)
        choices = degrees - (skipped >= 0)
        has = np.flatnonzero(choices > 0)
        slots = np.arange(1, fan_out + 1, dtype=np.uint64)
        random = mix64(draws[has, None] + slots * _GOLDEN)
        # The high 53 bits as a share of 1: uniform but for one part in 2^53 / choices.
        picked = ((random >> np.uint64(11)).astype(np.float64) * 2.0**-53 * choices[has, None]).astype(np.int64)
        picked += (skipped[has, None] >= 0) & (picked >= skipped[has, None])
        found = this.others[this.begins[nodes[has], None] + picked]
        return Drawn(found.reshape(-1), np.where(choices > 0, fan_out, 0), random.reshape(-1))

    def _places(self, side: int, nodes: Ints, others: Ints) -> Ints:
        """Where among each node's neighbours another node stands; -1 where there is no such edge.

        A binary search in the neighbours of all nodes at once: as many turns as the longest list needs.
        """
        this, at, last = self.sides[side], np.maximum(nodes, 0), self.edges - 1
        low, high = this.begins[at], this.begins[at + 1]
        end = high
        while (searching := low < high).any():
            middle = (low + high) // 2
            below = this.others[np.minimum(middle, last)] < others
            low = np.where(searching & below, middle + 1, low)
            high = np.where(searching & ~below, middle, high)
        found = (nodes >= 0) & (others >= 0) & (low < end) & (this.others[np.minimum(low, last)] == others)
        return np.where(found, low - this.begins[at], -1)

    def save(self, path: Path | str, overwrite: bool = False) -> None:
        """Writes one file, whole or not at all."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise DataError(f"{path} is already there. Name another file, or replace it with --overwrite.")
        if path.exists():
            Graph.load(path)  # only a graph is replaced: a mistyped path costs nothing
        arrays = [np.ascontiguousarray(array, np.int64) for side in self.sides for array in side]
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "between": self.between,
            "nodes": [len(side.keys) for side in self.sides],
            "edges": self.edges,
            "crc32": [crc32(array.data) for array in arrays],
        }
        schema = _SCHEMA.with_metadata({"graph": to_text(about, indent=None)})
        with replacing(path, "The graph") as beside:
            path.parent.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for array in arrays:
                    writer.write_batch(pa.record_batch({"value": array}, schema=schema))

    @staticmethod
    def load(path: Path | str) -> Graph:
        """A graph as `save` wrote it, mapped and not read; raises `DataError` for a file that is something else."""
        path = Path(path)
        try:
            with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
                about = json.loads((reader.schema.metadata or {}).get(b"graph", b"null"))
                arrays = [_values(reader.get_batch(i)) for i in range(reader.num_record_batches)]
        except FileNotFoundError:
            raise DataError(f"There is no graph {path}. Make one with: hotrow graph DATA --out {path}") from None
        except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
            raise DataError(f"The graph {path} cannot be read: {error}. Make it again.") from None
        if not isinstance(about, dict) or about.get("format") != _FORMAT or about.get("version") not in (1, 2):
            raise DataError(f"{path} is not a graph of format {_FORMAT} 1 or {_VERSION}. Make one with: hotrow graph")
        try:
            if about["version"] != 1 and unsealed(about)["crc32"] != [crc32(array.data) for array in arrays]:
                raise ValueError("other arrays")
            sides = _sides(about, arrays)
            graph = None if sides is None else Graph(about["between"], *sides)
        except (KeyError, TypeError, ValueError):  # what the JSON says is of another form, or a key stands twice
            graph = None
        if graph is None:
            raise DataError(f"The graph {path} was altered or cut short. Make it again.")
        return graph


def _values(batch: pa.RecordBatch) -> Ints:
    batch.validate(full=True)  # Arrow takes offsets and lengths as they stand
    if batch.schema != _SCHEMA or batch.column(0).null_count:
        raise ValueError("it holds something else than numbers")
    found: Ints = batch.column(0).to_numpy()
    return found


def _sides(about: dict[str, Any], arrays: Sequence[Ints]) -> tuple[Side, Side] | None:
    """Both sides, or None where the arrays do not fit together."""
    if len(arrays) != 6 or len(about.get("between", ())) != 2:
        return None
    first, second = Side(*arrays[:3]), Side(*arrays[3:])
    for side, other, nodes in zip((first, second), (second, first), about["nodes"], strict=True):
        if not len(side.keys) == nodes == len(side.begins) - 1 or len(side.others) != about["edges"]:
            return None
        if side.begins[0] != 0 or side.begins[-1] != about["edges"] or (np.diff(side.begins) < 0).any():
            return None
        if len(side.others) and not 0 <= int(side.others.min()) <= int(side.others.max()) < len(other.keys):
            return None
    return first, second


def _begins(owners: Ints, count: int) -> Ints:
    """Where the edges of each of `count` nodes begin, in an order by owner."""
    return np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=count))]).astype(np.int64)
