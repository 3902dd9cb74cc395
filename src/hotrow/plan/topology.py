"""`Topology`: the nodes, ranks, memories and links there are, as a cluster file says or as `measure` found.

    nodes = 16                        [between]                     [within]
    ranks = 8                         bandwidth = "100Gbit/s"       bandwidth = "450GB/s"
    memory = "80GiB"                  latency = "20us"              latency = "8us"

`ranks` are those of one node and `memory` is what rows may take on each. A link's bandwidth is what its sender can
send at once: for `between` a node, all its ranks together; for `within` one rank. Where each rank talks only to those
of its place on the other nodes it has few connections, and nodes may send less: `rail` is what they send then, and
the same as `between` where it is not given. Which links an exchange goes over follows from the kind of its lanes.

A link's latency is what an exchange takes that carries nothing, so it is that of the collective, not of the wire. An
exchange takes its latency and the bytes of its busiest sender or receiver over the bandwidth: two figures a link, which
is as much as can be measured in a second; what congestion and stragglers add is not in it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from hotrow.errors import DataError, SettingsError
from hotrow.files import replacing
from hotrow.settings import Settings, parse
from hotrow.sizes import parse_size
from hotrow.toml import to_toml
from hotrow.world import LaneKind

_RATE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kKMGT]?)(i?)(bit|b|B)(?:/s|ps)\s*")
_TIME = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*(s|ms|us|µs|ns)\s*")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}


def parse_rate(text: str) -> float:
    """Bytes a second, of text as `100Gbit/s`, `12.5GB/s` or `900MiB/s`."""
    found = _RATE.fullmatch(text)
    if found is None:
        raise SettingsError(f'"{text}" is not a bandwidth. Write it as in 100Gbit/s, 12.5GB/s or 900MiB/s.')
    unit = float(1024 if found[3] else 1000) ** _POWERS[found[2]]
    value = float(found[1].replace("_", "")) * unit
    return value if found[4] == "B" else value / 8


def parse_time(text: str) -> float:
    """Seconds, of text as `20us`, `0.3ms` or `2s`."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise SettingsError(f'"{text}" is not a time. Write it as in 20us, 0.3ms or 2s.')
    return float(found[1].replace("_", "")) / _IN_A_SECOND[found[2]]


def rate_text(rate: float) -> str:
    """Bytes a second as people read them."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if rate < 1000:
            return f"{rate:.4g}{unit}"
        rate /= 1000
    return f"{rate:.4g}TB/s"


def time_text(seconds: float) -> str:
    """Seconds as people read them."""
    for unit, scale in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * scale * (1 - 1e-9):
            return f"{seconds / scale:.4g}{unit}"
    return f"{seconds:.4g}s"


def _told(parser: Any) -> BeforeValidator:
    """Takes text as people write it, and a number as it is."""

    def read(value: Any) -> Any:
        try:
            return parser(value) if isinstance(value, str) else value
        except SettingsError as error:
            raise PydanticCustomError("sentence", "{said}", {"said": str(error)}) from None

    return BeforeValidator(read)


class Link(Settings):
    """How fast bytes go over one kind of link, and what an exchange over it takes at least."""

    bandwidth: Annotated[float, _told(parse_rate), Field(gt=0)] = Field(
        description='what its sender can send at once: bytes a second, or as in "10Gbit/s"'
    )
    latency: Annotated[float, _told(parse_time), Field(ge=0)] = Field(
        0.0, description='what an exchange takes that carries nothing: seconds, or as in "20us"'
    )
    overhead: float = Field(0.0, ge=0, lt=1, description="what headers add to bytes, as a share of them")

    def carrying(self, sent: float) -> float:
        """Seconds that so many bytes of one sender take, with their headers, beside the latency."""
        return sent * (1 + self.overhead) / self.bandwidth


LINKS = {
    "between": "a node to others",
    "rail": "the same, ranks to those of their place",
    "within": "a rank to its node's others",
}
"""A topology's links, and who sends to whom over each."""


class Topology(Settings):
    """The ranks there are and the links between them."""

    nodes: int = Field(ge=1, le=65536)
    ranks: int = Field(1, ge=1, le=1024, description="ranks of one node")
    memory: Annotated[int, _told(parse_size), Field(gt=0)] = Field(
        description='what rows may take on each rank: bytes, or as in "80GiB"'
    )
    between: Link | None = Field(None, description="from a node to the others, all its ranks together")
    within: Link | None = Field(None, description="from a rank to the others of its node")
    rail: Link | None = Field(
        None,
        description="from a node to the others where each rank sends only to those of its place there; "
        "as `between` where it is not given",
    )

    @model_validator(mode="after")
    def _has_its_links(self) -> Topology:
        for name, needed, what in (("between", self.nodes, "nodes"), ("within", self.ranks, "ranks a node")):
            if needed > 1 and getattr(self, name) is None:
                said = f"{needed} {what} need a link; say bandwidth and latency in [{name}]."
                raise PydanticCustomError("sentence", "{said}", {"said": said})
        return self

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks

    def links(self, lane: LaneKind) -> tuple[Link | None, Link | None]:
        """The links that an exchange over a lane of this kind has within nodes, and between them."""
        near = self.within if self.ranks > 1 and lane != "rail" else None
        far = self.rail or self.between if lane == "rail" else self.between
        return near, far if self.nodes > 1 and lane != "node" else None

    def seconds(self, within: float, between: float, lane: LaneKind = "world") -> float:
        """What one exchange takes in which the busiest rank sends `within` bytes and the busiest node `between`.

        Both links carry at once. An exchange without bytes between nodes is one of each node in itself.
        """
        times = [
            link.latency + link.carrying(sent)
            for link, sent in zip(self.links(lane), (within, between), strict=True)
            if link is not None and sent > 0
        ]
        return max(times, default=0.0)

    def to_toml(self) -> str:
        """As a cluster file that `load_topology` reads."""
        data = self.model_dump(exclude_none=True)
        data["memory"] = f"{self.memory}B"
        for name in LINKS:
            if name in data:
                link: Mapping[str, float] = data[name]
                data[name] = {
                    "bandwidth": rate_text(link["bandwidth"]),
                    "latency": time_text(link["latency"]),
                    "overhead": round(link["overhead"], 5),
                }
        return to_toml(data)

    def save(self, path: Path | str, overwrite: bool = False) -> None:
        """Writes the cluster file, whole or not at all."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise DataError(f"{path} is already there. Name another file, or replace it with --overwrite.")
        if path.exists():
            load_topology(path)  # only a cluster file is replaced: a mistyped path costs nothing
        with replacing(path, "The topology") as beside:
            beside.write_text(self.to_toml(), encoding="utf-8")


def load_topology(path: Path | str) -> Topology:
    """Reads and checks a cluster file."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise SettingsError(
            f"There is no cluster file {path}. Measure one with: hotrow topology --out {path}"
        ) from None
    except OSError as error:
        raise SettingsError(f"The cluster file {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # bytes that are no text, text that is no TOML
        raise SettingsError(f"The cluster file {path} is not valid TOML: {error}.") from None
    return parse(Topology, data, str(path))
