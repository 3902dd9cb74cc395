"""Counts are exact while they fit, within their bound beyond, the same in parts as in one go, and safe on disk."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import DataError, SettingsError
from hotrow.profile.counts import KeyCounts, order

KEYS = st.lists(st.one_of(st.integers(0, 12), st.integers(-(2**63), 2**63 - 1)), max_size=120)


def counted(keys, limit=1000, times=None):
    counts = KeyCounts(limit)
    counts.add(np.array(keys, np.int64), times)
    return counts


def as_dict(counts):
    return dict(zip(*(a.tolist() for a in counts.above(1)), strict=True))


@given(KEYS)
def test_counts_are_exact_while_they_fit(keys):
    counts, true = counted(keys), Counter(keys)
    assert as_dict(counts) == true
    assert (counts.total, counts.distinct, counts.error, counts.exact) == (len(keys), len(true), 0, True)
    asked = np.array([*true, 99, -99], np.int64)
    assert counts.of(asked).tolist() == [true[k] for k in asked.tolist()]


@given(KEYS, st.data())
def test_times_count_as_often_as_repeating_the_key(keys, data):
    times = data.draw(st.lists(st.integers(0, 50), min_size=len(keys), max_size=len(keys)))
    weighted = counted(keys, times=np.array(times, np.int64))
    assert as_dict(weighted) == as_dict(counted(np.repeat(np.array(keys, np.int64), times)))
    assert weighted.total == sum(times)


@given(KEYS, KEYS)
def test_merging_equals_counting_both(first, second):
    merged = counted(first)
    merged.merge(counted(second))
    both = counted(first + second)
    assert as_dict(merged) == as_dict(both) and merged.total == both.total and merged.exact


def within_bounds(counts, true):
    kept = as_dict(counts)
    total = sum(true.values())
    assert counts.total == total and counts.kept <= counts.limit
    assert all(kept.get(k, 0) <= n <= kept.get(k, 0) + counts.error for k, n in true.items())
    assert set(kept) <= set(true)
    assert counts.error * (counts.limit // 2 + 1) <= total - sum(kept.values())
    return True


SKEWED = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=150)


@given(SKEWED, st.integers(1, 24))
def test_beyond_the_limit_counts_stay_within_the_bound(given_, limit):
    counts, true = KeyCounts(limit), Counter()
    for at in range(0, len(given_), 40):
        part = given_[at : at + 40]
        counts.add(np.array([k for k, _ in part], np.int64), np.array([n for _, n in part], np.int64))
        for k, n in part:
            true[k] += n
    assert within_bounds(counts, true)
    assert counts.exact == (len(true) <= limit)


@given(st.lists(SKEWED, min_size=1, max_size=5), st.integers(1, 24))
def test_merged_summaries_stay_within_the_bound_of_one(parts, limit):
    true, made = Counter(), []
    for part in parts:
        made.append(KeyCounts(limit))
        made[-1].add(np.array([k for k, _ in part], np.int64), np.array([n for _, n in part], np.int64))
        for k, n in part:
            true[k] += n
    assert within_bounds(KeyCounts.merged(made, limit), true)


def test_a_zipf_stream_in_little_memory_keeps_its_hot_keys():
    stream = np.random.default_rng(0).zipf(1.2, 200_000) % 2**40
    exact, small = counted(stream, 1 << 20), counted(stream, 1_000)
    assert exact.exact and not small.exact
    assert small.bytes < 100_000
    hot, counts = exact.hottest(100)
    held = small.of(hot)
    assert (held <= counts).all() and (counts - held <= small.error).all()
    assert small.error <= small.total / 501
    heavy = exact.above(small.error + 1)[0]
    assert (small.of(heavy) > 0).all(), "a key used more often than the error must be kept"


def test_distinct_survives_merging_exact_into_summary_and_back():
    for first, second in ((50, 100_000), (100_000, 50), (100_000, 100_000)):
        a, b = counted(np.arange(first), 1_000), counted(np.arange(second) + 20, 1_000)
        a.merge(b)
        union = max(first, second + 20)
        assert not a.exact and abs(a.distinct / union - 1) < 0.04


def test_hottest_histogram_and_curve_tell_the_same():
    counts = counted([5] * 9 + [1] * 4 + [2] * 4 + [7])
    keys, times = counts.hottest(3)
    assert keys[0] == 5 and set(keys[1:].tolist()) == {1, 2} and times.tolist() == [9, 4, 4]
    assert counts.hottest(0)[0].size == 0 and counts.hottest(99)[0].size == 4
    assert KeyCounts().hottest(3)[0].size == 0
    histogram = counts.histogram()
    assert (histogram.counts.tolist(), histogram.keys.tolist()) == ([9, 4, 1], [1, 2, 1])
    curve = counts.curve()
    assert curve.rows.tolist() == [1, 3, 4]
    assert curve.share.tolist() == pytest.approx([9 / 18, 17 / 18, 1])


@given(st.lists(st.integers(1, 2**40), max_size=60))
def test_a_histogram_holds_large_counts_too(times):
    keys = np.arange(len(times))
    histogram = counted(keys, times=np.array(times, np.int64)).histogram()
    want = sorted(Counter(times).items(), reverse=True)
    assert list(zip(histogram.counts.tolist(), histogram.keys.tolist(), strict=True)) == want


def test_equal_counts_come_in_an_order_of_the_keys_alone():
    keys = np.arange(1000)
    forward, backward = counted(keys).hottest(1000)[0], counted(keys[::-1]).hottest(1000)[0]
    assert (forward == backward).all()
    assert (np.diff(order(forward).astype(np.float64)) >= 0).all()


def test_threads_may_add_at_once():
    counts = KeyCounts(limit=500)
    parts = [np.random.default_rng(i).integers(0, 400, 5_000) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(counts.add, parts))
    assert as_dict(counts) == Counter(np.concatenate(parts).tolist())


@pytest.mark.parametrize("limit", [1000, 16])
def test_a_saved_count_comes_back_as_it_was(tmp_path, limit):
    stream = np.random.default_rng(1).zipf(1.3, 3_000) % 700 - 5
    counts = counted(stream, limit)
    counts.save(tmp_path / "c.parquet")
    back = KeyCounts.load(tmp_path / "c.parquet")
    assert as_dict(back) == as_dict(counts)
    for name in ("total", "error", "exact", "distinct", "limit", "kept"):
        assert getattr(back, name) == getattr(counts, name), name
    more = np.arange(5_000)
    back.add(more)
    counts.add(more)
    assert as_dict(back) == as_dict(counts) and back.error == counts.error
    assert [p.name for p in tmp_path.iterdir()] == ["c.parquet"]


def test_a_file_depends_on_the_counts_alone(tmp_path):
    stream = np.random.default_rng(2).integers(0, 500, 4_000)
    whole, parts = counted(stream), KeyCounts(1000)
    for piece in reversed(np.array_split(stream, 7)):
        parts.merge(counted(piece))
    whole.save(tmp_path / "a")
    parts.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def _altered(path, **changes):
    table = pq.read_table(path)
    columns = {name: changes.pop(name, table.column(name)) for name in table.column_names}
    about = {k.decode(): v.decode() for k, v in table.schema.metadata.items() if k != b"ARROW:schema"} | changes
    pq.write_table(pa.table(columns).replace_schema_metadata(about), path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "does not hold counts"),
        ({"total": "7"}, "keys and total do not agree"),
        ({"total": json.dumps(None)}, "were altered"),
        ({"limit": "0"}, "were altered"),
        ({"registers": "AAAA"}, "were altered: keys, counters and registers do not fit"),
        ({"count": pa.array([0, 2, 1])}, "a counter is below one"),
        ({"key": pa.array([1, 1, 3])}, "keys and total do not agree"),
        ({"key": pa.array(["a", "b", "c"])}, "were altered"),
    ],
)
def test_an_altered_file_is_refused(tmp_path, change, said):
    counted([1, 2, 2, 3]).save(tmp_path / "c")
    _altered(tmp_path / "c", **change)
    with pytest.raises(DataError, match=said):
        KeyCounts.load(tmp_path / "c")


def test_what_is_no_file_of_counts_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        KeyCounts.load(tmp_path / "none")
    (tmp_path / "text").write_text("not Parquet")
    with pytest.raises(DataError, match="cannot be read"):
        KeyCounts.load(tmp_path / "text")
    with pytest.raises(SettingsError, match="at least one key"):
        KeyCounts(0)
    with pytest.raises(DataError, match="could not be written"):
        counted([1]).save(tmp_path / "no folder" / "c")


def test_keys_used_less_than_never_are_refused():
    counts = counted([1])
    with pytest.raises(ValueError, match="less than zero"):
        counts.add(np.array([2, 3]), np.array([1, -1]))
    assert as_dict(counts) == {1: 1} and counts.total == 1
