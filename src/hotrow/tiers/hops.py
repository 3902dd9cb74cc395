"""Hops: keys on their way over one lane to who answers them, and rows and gradients between the two ends.

A `Hop` sorts its keys by member, sends them, and at the other end merges what all members asked for, so that a row is
looked up, and its gradient summed, once for all. A `Route` is a tier's hops one behind the other:

    no hop            this rank answers itself
    world             one hop over the world: what row-wise with deduplicated keys does
    node, rail        to the node-mate with the owner's place in its node, who asks the owner for the whole node

All tables go in one message: the counts of keys first, then keys (8 bytes each), then rows back and gradients forth, in
the order of the keys, which therefore need not be sent again. Gradients are summed by ranks of a node, then by nodes,
on every route: the same bits, whichever is taken (`native/owners.hpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.tiers.lanes import Bytes, Ints, Lane
from hotrow.tiers.tier import Floats, Part

Keys = npt.NDArray[np.int64]
WireFormat = Literal["float32", "bfloat16", "float16"]
WIRES: tuple[WireFormat, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Ends:
    """Keys of some tables, and where their rows lie in a flat array of `size` floats; as in `Part`."""

    keys: list[Keys]
    positions: list[Keys | None]
    starts: list[int]
    dims: list[int]
    size: int
    repeats: list[npt.NDArray[np.int32]] | None = None

    @staticmethod
    def of(parts: Sequence[Part], dims: Sequence[int], size: int) -> Ends:
        return Ends([p.keys for p in parts], [p.positions for p in parts], [p.start for p in parts], list(dims), size)


@dataclass(frozen=True)
class Rule:
    """Who answers a key: member owner // divide of a lane, modulo its size; the owner is one of `ranks` by hash."""

    ranks: int
    divide: int = 1


class Hop:
    """Keys that were asked for over one lane. Rows and gradients may travel over another lane of the same members."""

    def __init__(self, lane: Lane, ends: Ends, rule: Rule, wire: int) -> None:
        self.ends, self._wire = ends, wire
        self._out = _native.Outgoing(
            keys=ends.keys,
            positions=ends.positions,
            repeats=ends.repeats,
            starts=ends.starts,
            dims=ends.dims,
            ranks=rule.ranks,
            divide=rule.divide,
            members=lane.size,
        )
        self._counts = self._out.counts.reshape(lane.size, -1)
        self._widths = np.array([_native.wire_bytes(dim, wire) for dim in ends.dims], np.int64)

    def ask(self, lane: Lane, what: str, step: int) -> None:
        """Sends the keys, and takes those of all members."""
        self._coming = lane.counts(what, step, self._counts)
        keys = lane.swap(self._out.keys.view(np.uint8), 8 * self._counts.sum(1), 8 * self._coming.sum(1))
        self._in = _native.Incoming(keys.view(np.int64), self._coming.reshape(-1), self.ends.dims)

    def push(self, lane: Lane, what: str, step: int, grads: Floats, divisor: float = 1.0) -> Floats:
        """`ask` and `forth` in one message."""
        self._coming = lane.counts(what, step, self._counts)
        values = np.empty(int(self._sent().sum()), np.uint8)
        self._out.pack(grads, self._wire, values)
        key_bytes, coming_keys = 8 * self._counts.sum(1), 8 * self._coming.sum(1)
        message = _interleaved(self._out.keys.view(np.uint8), key_bytes, values, self._sent())
        got = lane.swap(message, key_bytes + self._sent(), coming_keys + self._got())
        keys, sums = _parted(got, coming_keys, self._got())
        self._in = _native.Incoming(keys.view(np.int64), self._coming.reshape(-1), self.ends.dims)
        return self._summed(lane, sums, divisor)

    def merged(self) -> Ends:
        """What all members asked this one for, each key once."""
        tables = range(len(self.ends.dims))
        return merged(self._in, tables, self.ends.dims)

    def back(self, lane: Lane, rows: Floats, into: Floats) -> None:
        """Rows of the merged keys to those who asked; one's own come `into` the array of this end."""
        answers = np.empty(int(self._got().sum()), np.uint8)
        self._in.answer(rows, self._wire, answers)
        self._out.unpack(lane.swap(answers, self._got(), self._sent()), self._wire, into)

    def forth(self, lane: Lane, grads: Floats, divisor: float = 1.0) -> Floats:
        """Gradients of this end's keys to who answers them, and the sums of what came for the merged keys."""
        message = np.empty(int(self._sent().sum()), np.uint8)
        self._out.pack(grads, self._wire, message)
        return self._summed(lane, lane.swap(message, self._sent(), self._got()), divisor)

    def _summed(self, lane: Lane, values: Bytes, divisor: float) -> Floats:
        sums = np.empty(self._in.starts[-1], np.float32)
        self._in.sum(values, self._wire, lane.node, divisor, sums)
        return sums

    def _sent(self) -> Ints:
        """Bytes of rows for each member."""
        return self._counts @ self._widths

    def _got(self) -> Ints:
        return self._coming @ self._widths


class Route:
    """Hops from this rank's keys to who answers them; with none it answers itself."""

    def __init__(
        self, lanes: Sequence[Lane], rules: Sequence[Rule], ends: Ends, wire: int, what: str, step: int
    ) -> None:
        self.hops: list[Hop] = []
        self.ends = ends
        for lane, rule in zip(lanes, rules, strict=True):
            hop = Hop(lane, self.ends, rule, wire)
            hop.ask(lane, what, step)
            self.hops.append(hop)
            self.ends = hop.merged()

    def back(self, lanes: Sequence[Lane], rows: Floats, into: Floats) -> None:
        """Rows of the far end's keys to this rank's."""
        for i in range(len(self.hops) - 1, -1, -1):
            target = into if i == 0 else np.empty(self.hops[i].ends.size, np.float32)
            self.hops[i].back(lanes[i], rows, target)
            rows = target

    def forth(self, lanes: Sequence[Lane], grads: Floats, divisor: float = 1.0) -> Floats:
        """This rank's gradients, with everyone's, to the far end: the sums of its keys, divided by `divisor`."""
        for hop, lane in zip(self.hops, lanes, strict=True):
            grads = hop.forth(lane, grads, divisor if hop is self.hops[-1] else 1.0)
        return grads


def merged(incoming: _native.Incoming, tables: Sequence[int], dims: list[int]) -> Ends:
    keys = [incoming.keys(t) for t in tables]
    starts: list[int] = incoming.starts
    return Ends(keys, [None] * len(keys), starts[:-1], dims, starts[-1])


def spread(
    lane: Lane, ends: Ends, sums: Floats, wire: int, what: str, step: int, divisor: float = 1.0
) -> tuple[Ends, Floats]:
    """Every member's keys and sums to every member: the union of keys, and the sums over the members in their order.

    What a member gave itself was rounded for the wire too, so that all have the same bits.
    """
    if lane.size == 1:
        return ends, sums / np.float32(divisor) if divisor != 1.0 else sums
    counts = np.array([len(keys) for keys in ends.keys], np.int64)
    coming = lane.counts(what, step, np.tile(counts, lane.size))
    widths = np.array([_native.wire_bytes(dim, wire) for dim in ends.dims], np.int64)
    message = _packed(ends, sums, wire)
    others = np.arange(lane.size) != lane.me  # what a member has itself it does not send: most of a copy in memory
    got = lane.swap(
        message if lane.size == 2 else np.tile(message, lane.size - 1),
        np.where(others, len(message), 0),
        np.where(others, coming @ (widths + 8), 0),
    )
    keys, values = _parted(got, 8 * coming.sum(1), coming @ widths, {lane.me: message})
    incoming = _native.Incoming(keys.view(np.int64), coming.reshape(-1), ends.dims)
    out = np.empty(incoming.starts[-1], np.float32)
    incoming.sum(values, wire, 1, divisor, out)
    return merged(incoming, range(len(ends.dims)), ends.dims), out


def _packed(ends: Ends, rows: Floats, wire: int) -> Bytes:
    """The keys of all tables, and then their rows."""
    out = _native.Outgoing(
        keys=ends.keys,
        positions=ends.positions,
        repeats=None,
        starts=ends.starts,
        dims=ends.dims,
        ranks=1,
        divide=1,
        members=1,
    )
    key_bytes = out.keys.nbytes
    widths = [_native.wire_bytes(dim, wire) for dim in ends.dims]
    message = np.empty(key_bytes + sum(len(k) * w for k, w in zip(ends.keys, widths, strict=True)), np.uint8)
    message[:key_bytes] = out.keys.view(np.uint8)
    out.pack(rows, wire, message[key_bytes:])
    return message


def _interleaved(keys: Bytes, key_sizes: Ints, values: Bytes, value_sizes: Ints) -> Bytes:
    """For each member its keys and then its values."""
    parts: list[Any] = []
    k = v = 0
    for of_keys, of_values in zip(key_sizes.tolist(), value_sizes.tolist(), strict=True):
        parts += [keys[k : k + of_keys], values[v : v + of_values]]
        k, v = k + of_keys, v + of_values
    return np.concatenate(parts)


def _parted(
    message: Bytes, key_sizes: Ints, value_sizes: Ints, own: Mapping[int, Bytes] = MappingProxyType({})
) -> tuple[Bytes, Bytes]:
    """What `_interleaved` put together, member by member; those in `own` are not in the message."""
    keys, values = [], []
    at = 0
    for member, (of_keys, of_values) in enumerate(zip(key_sizes.tolist(), value_sizes.tolist(), strict=True)):
        part = own.get(member, message[at : at + of_keys + of_values])
        at += 0 if member in own else len(part)
        keys.append(part[:of_keys])
        values.append(part[of_keys:])
    return np.concatenate(keys), np.concatenate(values)
