"""The step `neighbours`: to each sample the keys around its two ends in a graph, as sequence features.

    [[data.steps]]
    name = "neighbours"
    graph = "clicks.graph"          # hotrow graph DATA --out clicks.graph
    fan_outs = [10, 5]              # 10 neighbours of each end, 5 of each of those

With a graph between user and item that adds `user_hop1` (items), `user_hop2` (users), `item_hop1` (users) and
`item_hop2` (items), which look up the tables of `item` and `user`. Keys are drawn as `hotrow.data.graph` says, by seed,
epoch and the sample's place in its split: anew in every epoch, and the same whoever reads them. A sample costs about
50 ns a key. Samples that repeat share nothing of it: each draws its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hotrow.data.dedup import SAMPLES
from hotrow.data.graph import Graph, Ints
from hotrow.data.mix import mix64
from hotrow.data.samples import Values, Window
from hotrow.data.schema import Column, Schema
from hotrow.errors import SettingsError, nearest
from hotrow.settings import Settings


def hop(end: str, number: int) -> str:
    """What the feature is called that holds the `number`-th hop around a feature."""
    return f"{end}_hop{number}"


class Neighbours(Settings):
    """Neighbours of both ends of a sample, hop by hop."""

    random: ClassVar[bool] = True

    name: Literal["neighbours"] = "neighbours"
    graph: Path = Field(description="what `hotrow graph` wrote")
    fan_outs: tuple[Annotated[int, Field(ge=1)], ...] = Field((10, 5), min_length=1, max_length=3)

    def after(self, schema: Schema) -> Schema:
        """The schema with a sequence feature for each end and hop."""
        known = {f.name: f for f in schema.features if f.kind == "key"}
        taken = {*(f.name for f in schema.features), *schema.columns}
        ends = self._graph().between
        for end in ends:
            if end not in known:
                raise SettingsError(
                    f"neighbours: {self.graph} is between {' and '.join(ends)}, and the data set has no feature "
                    f'"{end}" with one key a sample.{nearest(end, known)}'
                )
        made = [
            Column(name=hop(end, h), kind="keys", table=known[ends[(side + h) % 2]].table, pooling="sequence")
            for side, end in enumerate(ends)
            for h in range(1, len(self.fan_outs) + 1)
        ]
        for column in made:
            if column.name in taken:
                raise SettingsError(f'neighbours: there is already a column "{column.name}"; give it another name.')
        return schema.model_copy(update={"features": (*schema.features, *made)})

    def apply(self, window: Window) -> Window:
        """The window with the new features."""
        if window.draws is None:
            raise SettingsError(
                "neighbours draws anew in every epoch, so which samples look up hot rows only cannot be known "
                'beforehand. Use plan.mode = "split".'
            )
        columns = dict(self._drawn(window, window.draws.numbers()))
        return replace(
            window,
            schema=self.after(window.schema),
            columns={**window.columns, **columns},
            places={**window.places, **dict.fromkeys(columns, SAMPLES)},
        )

    def _drawn(self, window: Window, draws: NDArray[np.uint64]) -> Iterator[tuple[str, Values]]:
        graph = self._graph()
        nodes = [graph.nodes(side, _of_samples(window, end)) for side, end in enumerate(graph.between)]
        for side, end in enumerate(graph.between):
            at, lengths, mine = nodes[side], np.ones(window.size, np.int64), mix64(draws + np.uint64(side + 1))
            for h, fan_out in enumerate(self.fan_outs, start=1):
                drawn = graph.draw((side + h - 1) % 2, at, fan_out, mine, nodes[1 - side] if h == 1 else None)
                # From the second hop on every node has a neighbour: the one it was reached from.
                lengths = drawn.lengths if h == 1 else lengths * fan_out
                at, mine = drawn.nodes, drawn.draws
                keys = graph.sides[(side + h) % 2].keys[at]
                yield hop(end, h), Values(keys, np.cumsum(lengths) - lengths, lengths)

    def _graph(self) -> Graph:
        try:
            said = self.graph.stat()
        except OSError:
            return Graph.load(self.graph)  # which says what is wrong
        return _loaded(self.graph, said.st_mtime_ns, said.st_size)


@functools.lru_cache(maxsize=4)
def _loaded(path: Path, _changed: int, _size: int) -> Graph:
    """A graph is mapped once for all threads that draw from it."""
    return Graph.load(path)


def _of_samples(window: Window, feature: str) -> Ints:
    """A feature's key for every sample."""
    column = next(f.column for f in window.schema.features if f.name == feature)
    values: Ints = window.columns[column].values
    inverse = window.inverses.get(window.places[column])
    return values if inverse is None else values[inverse]
