"""Keys, rows and gradients on their way between ranks, all of them played by one process."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import _native

KEYS = st.lists(st.one_of(st.integers(-5, 30), st.integers(-(2**63), 2**63 - 1)), max_size=30, unique=True)
WIRES = {"float32": 0, "bfloat16": 1, "float16": 2}


@dataclass
class Side:
    """One member: its keys and gradients of each table, and what it sends."""

    keys: list[np.ndarray]
    grads: list[np.ndarray]
    flat: np.ndarray
    out: _native.Outgoing


def outgoing(
    keys: list[np.ndarray],
    dims: list[int],
    positions: list[np.ndarray] | None = None,
    starts: list[int] | None = None,
    members: int = 1,
    repeats: list[np.ndarray] | None = None,
) -> _native.Outgoing:
    """Keys for the owner of each among `members`; of one table, with rows in their order, unless told otherwise."""
    return _native.Outgoing(
        keys=keys,
        positions=positions or [None] * len(keys),
        repeats=repeats,
        starts=starts or [0],
        dims=dims,
        ranks=members,
        divide=1,
        members=members,
    )


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[Side], list[int]]:
    """Members that ask each other for keys of some tables."""
    dims = draw(st.lists(st.integers(1, 19), min_size=1, max_size=3))
    members = draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [side(random, draw, dims, members) for _ in range(members)], dims


def side(random: np.random.Generator, draw: st.DrawFn, dims: list[int], members: int) -> Side:
    keys = [np.array(draw(KEYS), np.int64) for _ in dims]
    grads = [random.standard_normal((len(k), d)).astype(np.float32) for k, d in zip(keys, dims, strict=True)]
    order = [random.permutation(len(k)) for k in keys]  # rows may lie in any order
    starts = np.cumsum([0, *(g.size for g in grads)]).tolist()
    flat = np.concatenate([g[np.argsort(o)].reshape(-1) for g, o in zip(grads, order, strict=True)])
    out = _native.Outgoing(
        keys=keys,
        positions=order,
        repeats=None,
        starts=starts[:-1],
        dims=dims,
        ranks=members,
        divide=1,
        members=members,
    )
    return Side(keys, grads, flat, out)


def bytes_to(out: _native.Outgoing, dims: list[int], wire: int, members: int) -> np.ndarray:
    return out.counts.reshape(members, -1) @ [_native.wire_bytes(d, wire) for d in dims]


def incoming_of(sides: list[Side], me: int, dims: list[int]) -> _native.Incoming:
    counts = np.concatenate([s.out.counts.reshape(len(sides), -1)[me] for s in sides])
    keys = [np.split(s.out.keys, np.cumsum(s.out.counts.reshape(len(sides), -1).sum(1))[:-1])[me] for s in sides]
    return _native.Incoming(np.concatenate(keys), counts, dims)


def grads_for(sides: list[Side], me: int, dims: list[int], wire: int) -> np.ndarray:
    shares = []
    for s in sides:
        sizes = bytes_to(s.out, dims, wire, len(sides))
        message = np.empty(sizes.sum(), np.uint8)
        s.out.pack(s.flat, wire, message)
        shares.append(np.split(message, np.cumsum(sizes)[:-1])[me])
    return np.concatenate(shares)


@given(exchanges(), st.integers(1, 3))
def test_gradients_of_a_row_are_summed_by_members_of_a_node_and_then_by_nodes(exchange, node):
    sides, dims = exchange
    for me in range(len(sides)):
        incoming = incoming_of(sides, me, dims)
        sums = np.empty(incoming.starts[-1], np.float32)
        incoming.sum(grads_for(sides, me, dims, 0), 0, node, 3.0, sums)
        for t, dim in enumerate(dims):
            keys = incoming.keys(t)
            found = sums[incoming.starts[t] : incoming.starts[t + 1]].reshape(-1, dim)
            asked = {k for s in sides for k in s.keys[t].tolist() if owner(k, len(sides)) == me}
            assert sorted(keys.tolist()) == sorted(asked), "each key once, at its owner"
            for key, row in zip(keys.tolist(), found, strict=True):
                assert np.array_equal(row, summed(sides, t, key, node) / np.float32(3))  # the same bits


def owner(key: int, members: int) -> int:
    return int(_native.owners(np.array([key], np.int64), members)[0])


def summed(sides: list[Side], table: int, key: int, node: int) -> np.ndarray:
    """The specification: ranks of a node one after another, then node after node."""
    of_node: dict[int, np.ndarray] = {}
    for member, s in enumerate(sides):
        for i in np.flatnonzero(s.keys[table] == key):
            n = member // node
            of_node[n] = of_node[n] + s.grads[table][i] if n in of_node else s.grads[table][i]
    total, *others = of_node.values()
    for other in others:
        total = total + other
    return total


@given(exchanges())
def test_every_member_gets_the_rows_that_it_asked_for(exchange):
    sides, dims = exchange
    answers = []
    for me in range(len(sides)):
        incoming = incoming_of(sides, me, dims)
        rows = [row_of(incoming.keys(t), dim) for t, dim in enumerate(dims)]
        sizes = [bytes_to(s.out, dims, 0, len(sides))[me] for s in sides]
        message = np.empty(sum(sizes), np.uint8)
        incoming.answer(np.concatenate([r.reshape(-1) for r in rows]), 0, message)
        answers.append(np.split(message, np.cumsum(sizes)[:-1]))
    for number, s in enumerate(sides):
        into = np.full_like(s.flat, np.nan)
        s.out.unpack(np.concatenate([a[number] for a in answers]), 0, into)
        expected = s.flat.copy()
        begin = 0
        for t, dim in enumerate(dims):  # where each key's gradient lay its row must lie now
            place = {g.tobytes(): row for g, row in zip(s.grads[t], row_of(s.keys[t], dim), strict=True)}
            block = expected[begin : begin + s.grads[t].size].reshape(-1, dim)
            block[:] = np.array([place[g.tobytes()] for g in block.copy()], np.float32).reshape(-1, dim)
            begin += s.grads[t].size
        assert np.array_equal(into, expected)


def row_of(keys: np.ndarray, dim: int) -> np.ndarray:
    """Some row for each key."""
    return (keys[:, None] % 1009 + np.arange(dim) / 32).astype(np.float32)


@pytest.mark.parametrize("wire", WIRES)
@given(st.integers(1, 40), st.sampled_from([1e-30, 1e-9, 1.0, 1e6, 1e30]), st.integers(0, 2**32))
def test_a_row_comes_off_the_wire_as_near_as_its_format_allows(wire, dim, scale, seed):
    row = (np.random.default_rng(seed).standard_normal(dim) * scale).astype(np.float32)
    off = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}[wire]
    got = travelled(row, wire)
    floor = 2.0**-24 * np.abs(row).max() if wire == "float16" else 0.0
    assert (np.abs(got - row) <= off * np.abs(row) + floor).all()
    if wire == "bfloat16":
        assert np.array_equal(got, torch.from_numpy(row).bfloat16().float().numpy())


def travelled(row: np.ndarray, wire: str) -> np.ndarray:
    out = _native.Outgoing(
        keys=[np.zeros(1, np.int64)],
        positions=[None],
        repeats=None,
        starts=[0],
        dims=[len(row)],
        ranks=1,
        divide=1,
        members=1,
    )
    message = np.empty(_native.wire_bytes(len(row), WIRES[wire]), np.uint8)
    out.pack(row, WIRES[wire], message)
    got = np.empty_like(row)
    out.unpack(message, WIRES[wire], got)
    return got


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_infinities_and_nans_survive_the_wire(wire):
    row = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 2.0, 3.0, 4.0, 0.5], np.float32)
    assert np.array_equal(travelled(row, wire), row, equal_nan=True)
    assert np.array_equal(travelled(np.zeros(9, np.float32), wire), np.zeros(9))


def test_repeated_keys_bring_one_gradient_and_many_rows():
    keys = np.array([7, 9], np.int64)
    out = _native.Outgoing(
        keys=[keys],
        positions=[None],
        repeats=[np.array([3, 1], np.int32)],
        starts=[0],
        dims=[2],
        ranks=1,
        divide=1,
        members=1,
    )
    assert out.keys.tolist() == [7, 7, 7, 9]
    message = np.empty(4 * 8, np.uint8)
    out.pack(np.array([1, 2, 3, 4], np.float32), 0, message)
    sums = np.empty(4, np.float32)
    incoming = _native.Incoming(out.keys, out.counts, [2])
    incoming.sum(message, 0, 1, 1.0, sums)
    assert dict(zip(incoming.keys(0).tolist(), sums.reshape(-1, 2).tolist(), strict=True)) == {7: [1, 2], 9: [3, 4]}


def test_owners_share_keys_evenly_and_rows_of_one_owner_do_not_look_alike_to_the_index():
    keys = np.arange(100_000)
    owners = _native.owners(keys, 8)
    assert np.bincount(owners).min() > 12_000
    hashes = _native.hash_keys(keys[owners == 3])
    assert len(np.unique(hashes & 0xFF)) == 256  # what the index tells keys apart by
    assert len(np.unique(hashes >> 8 & 0xF)) == 16  # and what parts are chosen by


@pytest.mark.parametrize(("counts", "keys"), [([3], 2), ([-1], 0), ([1, 1, 1], 2), ([2**62, 2**62], 0), ([], 0)])
def test_counts_that_are_not_those_of_the_keys_are_refused(counts, keys):
    with pytest.raises(ValueError, match="count"):
        _native.Incoming(np.zeros(keys, np.int64), np.array(counts, np.int64), [2] if counts else [])


def test_messages_and_arrays_of_another_size_are_refused():
    out = outgoing([np.arange(3)], [2])
    with pytest.raises(ValueError, match="too few rows"):
        out.pack(np.zeros(5, np.float32), 0, np.empty(24, np.uint8))
    with pytest.raises(ValueError, match="another size"):
        out.pack(np.zeros(6, np.float32), 0, np.empty(23, np.uint8))
    with pytest.raises(ValueError, match="another size"):
        out.unpack(np.empty(25, np.uint8), 0, np.empty(6, np.float32))
    incoming = _native.Incoming(out.keys, out.counts, [2])
    with pytest.raises(ValueError, match="another size"):
        incoming.sum(np.empty(8, np.uint8), 0, 1, 1.0, np.empty(6, np.float32))
    with pytest.raises(ValueError, match="too few rows"):
        incoming.answer(np.zeros(5, np.float32), 0, np.empty(24, np.uint8))
