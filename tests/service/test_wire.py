"""Keys and values of the wire, against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotrow import _native

KEYS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-4, 300), st.integers(2**40, 2**40 + 70_000))
TABLES = st.lists(st.lists(KEYS, max_size=20).map(lambda keys: np.array(keys, np.int64)), min_size=1, max_size=4)


@given(TABLES, st.integers(1, 5), st.data())
def test_every_key_goes_to_its_shard_in_as_few_bytes_as_it_needs(keys, shards, data):
    dims = [data.draw(st.integers(1, 5)) for _ in keys]
    starts = np.cumsum([0, *(len(k) * d for k, d in zip(keys, dims, strict=True))]).tolist()
    shipments = _native.ship(keys, [None] * len(keys), starts[:-1], dims, shards)
    owners = [_native.shards_of(k, shards) for k in keys]
    for shard, shipment in enumerate(shipments):
        expected = [k[o == shard] for k, o in zip(keys, owners, strict=True)]
        heads, packed = shipment.pack()
        assert np.array_equal(shipment.keys, np.concatenate(expected))
        assert np.array_equal(_native.unpack_keys(heads, packed), shipment.keys)
        for (count, base, width), mine in zip(heads.reshape(-1, 3), expected, strict=True):
            reach = int(mine.max()) - int(mine.min()) if len(mine) else 0
            assert count == len(mine) and (base == mine.min() if len(mine) else True)
            assert width == max(1, (reach.bit_length() + 7) // 8)
    rows = np.random.default_rng(0).normal(size=starts[-1]).astype(np.float32)
    back = np.zeros_like(rows)
    for shipment in shipments:
        shipment.decode(shipment.encode(rows, 0)[0], back)
    assert np.array_equal(back, rows)


@given(hnp.arrays(np.int64, hnp.array_shapes(max_dims=1, max_side=9)), st.binary(max_size=100))
def test_packed_keys_that_are_not_as_they_say_are_refused(heads, packed):
    """No heads, however large their numbers, make it read what is not there."""
    counts, widths = heads[0::3].tolist(), heads[2::3].tolist()
    fits = len(heads) % 3 == 0 and all(1 <= w <= 8 and n >= 0 for n, w in zip(counts, widths, strict=False))
    if fits and sum(n * w for n, w in zip(counts, widths, strict=True)) + 8 == len(packed):
        return
    with pytest.raises(ValueError):
        _native.unpack_keys(heads, np.frombuffer(packed, np.uint8))


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@given(hnp.arrays(np.float32, (6, 13), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
def test_formats_equal_numpy(rows):
    halves, exponents = _native.encode_rows(rows.reshape(-1), [6], [13], 2)
    for row, half, exponent in zip(rows, halves.reshape(6, 13), exponents, strict=True):
        largest = np.abs(row).max()
        wanted = np.clip(np.frexp(largest)[1] - 1, -126, 126) if largest >= 2.0**-126 else -126
        assert exponent == wanted
        scaled = row.astype(np.float64) * 2.0 ** -float(exponent)
        assert np.array_equal(half.view(np.float16), scaled.astype(np.float32).astype(np.float16))
    back = _native.decode_rows(halves, exponents, [6], [13], 2).reshape(6, 13)
    wanted = halves.view(np.float16).reshape(6, 13).astype(np.float32) * np.float32(2.0) ** exponents[:, None]
    assert np.array_equal(back, wanted.astype(np.float32))
    (bits,) = _native.encode_rows(rows.reshape(-1), [6], [13], 1)
    assert np.array_equal(bits, nearest_bf16(rows.reshape(-1)))


def test_what_is_not_finite_stays_so_and_spoils_no_other_value():
    rows = np.tile(np.array([np.inf, -np.inf, np.nan, 1.5, 0.0], np.float32), 3)
    for wire in (1, 2):
        encoded = _native.encode_rows(rows, [1], [15], wire)
        back = _native.decode_rows(encoded[0], encoded[1] if wire == 2 else None, [1], [15], wire)
        assert np.array_equal(back, rows, equal_nan=True)


@given(st.lists(st.lists(st.integers(0, 6), unique=True), min_size=1, max_size=4), st.integers(0, 1000))
def test_gradients_of_ranks_are_summed_in_their_order(ranks, seed):
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=(len(keys), 3)).astype(np.float32) * 10.0 ** rng.integers(-5, 5) for keys in ranks]
    grads = [g.astype(np.float32) for g in grads]
    keys, sums = _native.sum_by_key([np.array(k, np.int64) for k in ranks], [g.reshape(-1) for g in grads], 3)
    expected: dict[int, np.ndarray] = {}
    for of_rank, g in zip(ranks, grads, strict=True):
        for key, grad in zip(of_rank, g, strict=True):
            expected[key] = expected[key] + grad if key in expected else grad
    assert sorted(keys.tolist()) == sorted(expected)
    for key, total in zip(keys.tolist(), sums.reshape(-1, 3), strict=True):
        assert np.array_equal(total, expected[key])
