"""Drift is nothing for the same accesses, everything for other keys, and what moved in between."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import DataError
from hotrow.profile.counts import KeyCounts
from hotrow.profile.drift import _mean_deviation, drift, table_drift


def counted(keys, limit=100_000):
    counts = KeyCounts(limit)
    counts.add(np.asarray(keys, np.int64))
    return counts


STREAM = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@given(STREAM, STREAM)
def test_distances_are_those_of_the_two_distributions(first, second):
    moved = table_drift(counted(first), counted(second))
    p, q = (np.bincount(s, minlength=10) / len(s) for s in (first, second))
    assert moved.total_variation == pytest.approx(np.abs(p - q).sum() / 2)
    middle = (p + q) / 2
    bits = sum(x * math.log2(x / m) for d in (p, q) for x, m in zip(d, middle, strict=True) if x > 0) / 2
    assert moved.jensen_shannon == pytest.approx(bits, abs=1e-12)
    assert moved.new == pytest.approx(q[p == 0].sum()) and moved.gone == pytest.approx(p[q == 0].sum())
    back = table_drift(counted(second), counted(first))
    assert back.total_variation == pytest.approx(moved.total_variation)
    assert back.noise == pytest.approx(moved.noise)
    assert all(0 <= h.kept <= 1 and 0 <= h.overlap <= 1 for h in moved.hot)


def test_the_same_accesses_have_not_moved_and_other_keys_have_nothing_in_common():
    stream = np.random.default_rng(0).zipf(1.2, 5_000) % 1000
    same = table_drift(counted(stream), counted(stream))
    assert same.total_variation == same.jensen_shannon == same.new == 0
    assert all(h.kept == h.overlap == 1 and h.before == h.after == h.best for h in same.hot)
    other = table_drift(counted(stream), counted(stream + 5000))
    assert other.total_variation == other.jensen_shannon == other.new == other.gone == 1
    assert all(h.kept == h.overlap == h.after == 0 for h in other.hot)


def test_noise_is_what_two_halves_of_one_log_differ_by():
    random = np.random.default_rng(1)
    first, second = (random.zipf(1.3, n) % 3000 for n in (20_000, 8_000))
    still = table_drift(counted(first), counted(second))
    assert still.total_variation == pytest.approx(still.noise, rel=0.05) and still.noise > 0.05
    turned = table_drift(counted(first), counted(3000 - second))
    assert turned.total_variation > 3 * turned.noise


@pytest.mark.parametrize(("m", "p"), [(1, 0.5), (2, 0.3), (9, 0.71), (40, 0.05)])
def test_mean_deviations_are_those_of_the_binomial(m, p):
    want = sum(math.comb(m, k) * p**k * (1 - p) ** (m - k) * abs(k - m * p) for k in range(m + 1))
    assert _mean_deviation(m, p) == pytest.approx(want)


def test_a_summary_gives_a_lower_bound():
    random = np.random.default_rng(2)
    first, second = random.zipf(1.3, 20_000) % 5000, random.zipf(1.3, 20_000) % 5000 * 3
    exact = table_drift(counted(first), counted(second))
    small = table_drift(counted(first, 300), counted(second, 300))
    assert 0.2 < small.total_variation <= exact.total_variation + 1e-9


def test_hot_rows_that_cooled_down_are_seen():
    before = counted(np.repeat(np.arange(1000), np.r_[np.full(10, 100), np.ones(990, int)]))
    after = counted(np.repeat(np.arange(1000), np.r_[np.ones(5, int), np.full(10, 100), np.ones(985, int)]))
    (hot,) = table_drift(before, after, tops=[0.01]).hot
    assert (hot.rows, hot.overlap) == (10, 0.5)
    assert hot.after == pytest.approx(505 / 1990) and hot.best == pytest.approx(1000 / 1990)
    assert hot.kept == pytest.approx(0.505)


def test_profiles_of_other_tables_are_refused():
    with pytest.raises(DataError, match='Only one of the two profiles has a table "item"'):
        drift({"user": counted([1]), "item": counted([1])}, {"user": counted([1])})


def test_no_accesses_at_all_are_no_drift():
    moved = table_drift(KeyCounts(), KeyCounts())
    assert moved.total_variation == moved.noise == 0 and moved.hot == ()
