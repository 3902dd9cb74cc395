"""`World`: which of how many ranks this process is, and on which of how many nodes.

Ranks of a node stand side by side: node n holds ranks n*g to (n+1)*g - 1, g being the ranks of a node. That is how
`torchrun` numbers them, whose environment `World.here` reads; a process started alone is a world of one.

Ranks exchange in lanes, of three kinds:

    world   all ranks
    node    the ranks of one node
    rail    the ranks of one place on every node
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hotrow.errors import SettingsError

LaneKind = Literal["world", "node", "rail"]


@dataclass(frozen=True)
class World:
    """The ranks there are, and which one this is."""

    rank: int = 0
    size: int = 1
    node_size: int = 1
    """Ranks of one node."""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and self.node_size >= 1):
            raise SettingsError(f"There is no rank {self.rank} in a world of {self.size}, {self.node_size} a node.")
        if self.size % self.node_size:
            raise SettingsError(f"{self.size} ranks cannot be {self.node_size} on every node; give each node as many.")

    @property
    def nodes(self) -> int:
        return self.size // self.node_size

    @property
    def node(self) -> int:
        """The node this rank is on."""
        return self.rank // self.node_size

    @property
    def node_rank(self) -> int:
        """This rank's place among those of its node."""
        return self.rank % self.node_size

    def lanes(self, kind: LaneKind) -> list[list[int]]:
        """The ranks of every lane of a kind."""
        if kind == "world":
            return [list(range(self.size))]
        if kind == "node":
            return [list(range(n * self.node_size, (n + 1) * self.node_size)) for n in range(self.nodes)]
        return [list(range(place, self.size, self.node_size)) for place in range(self.node_size)]

    @staticmethod
    def here(environment: Mapping[str, str] = os.environ) -> World:
        """What `torchrun` says of this process."""

        def number(name: str, default: int) -> int:
            said = environment.get(name, str(default))
            if not said.isdecimal():
                raise SettingsError(f'{name} is "{said}" in the environment, but should be a number.')
            return int(said)

        size = number("WORLD_SIZE", 1)
        return World(number("RANK", 0), size, number("LOCAL_WORLD_SIZE", size))
