"""The budget is kept, and no other choice of rows within it holds more accesses."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import SettingsError
from hotrow.plan import row_bytes
from hotrow.plan.hot import choose, curve, hot_rows
from hotrow.profile.counts import Histogram, KeyCounts
from hotrow.store.optimizers import SGD
from hotrow.table import Table


def histogram(counts):
    values, keys = np.unique(np.array(counts, np.int64), return_counts=True)
    return Histogram(values[::-1], keys[::-1])


def held(cuts):
    return sum(cut.accesses for cut in cuts.values())


TABLES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)
WIDTHS = st.lists(st.integers(1, 7), min_size=3, max_size=3)


def best_choice(tables, widths, memory):
    """The most accesses of any set of rows that fits: all of them tried."""
    rows = [(count, widths[t]) for t, counts in enumerate(tables) for count in counts]
    fitting = (
        sum(c for c, _ in chosen)
        for n in range(len(rows) + 1)
        for chosen in itertools.combinations(rows, n)
        if sum(w for _, w in chosen) <= memory
    )
    return max(fitting)


@given(TABLES, WIDTHS, st.integers(7, 60))
def test_no_choice_of_rows_holds_more_but_for_part_of_one_row(tables, widths, memory):
    classes = {str(t): histogram(counts) for t, counts in enumerate(tables)}
    cuts = choose(classes, {str(t): widths[t] for t in range(3)}, memory)
    used = sum(cut.rows * widths[int(t)] for t, cut in cuts.items())
    assert used <= memory
    left = [
        (c, widths[t]) for t, counts in enumerate(tables) for c in sorted(counts)[: len(counts) - cuts[str(t)].rows]
    ]
    assert all(width > memory - used for _, width in left), "a row that fits was left out"
    slack = max((count for count, _ in left), default=0)
    best = best_choice(tables, widths, memory)
    assert held(cuts) <= best and (best < held(cuts) + slack or best == held(cuts))


@given(TABLES, st.integers(1, 7), st.integers(7, 60))
def test_with_rows_of_one_size_no_choice_holds_more(tables, width, memory):
    classes = {str(t): histogram(counts) for t, counts in enumerate(tables)}
    cuts = choose(classes, dict.fromkeys(classes, width), memory)
    assert held(cuts) == best_choice(tables, [width] * 3, memory)


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=80), min_size=1, max_size=3),
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
    st.integers(200, 4000),
    st.integers(2, 40),
)
def test_the_plan_keeps_the_budget_and_names_the_hottest_keys(streams, dims, memory, limit):
    tables = [Table(name=str(t), dim=dims[t]) for t in range(len(streams))]
    counts = {}
    for t, stream in enumerate(streams):
        counts[str(t)] = KeyCounts(limit)
        counts[str(t)].add(np.array(stream, np.int64))
    hot = hot_rows(tables, counts, memory)
    total = 0
    for table in tables:
        shares, known = hot.plan.shares[table.name], counts[table.name]
        keys = shares[0].keys if len(shares) == 2 else np.empty(0, np.int64)
        assert len(np.unique(keys)) == len(keys) == hot.tables[table.name].rows
        assert shares[-1].tier == "host" and shares[-1].keys is None
        assert known.of(keys).sum() == hot.tables[table.name].cut.accesses
        assert sorted(known.of(keys).tolist()) == sorted(known.hottest(len(keys))[1].tolist())
        total += len(keys) * row_bytes(table)
        true = np.isin(np.array(streams[int(table.name)]), keys).mean()
        assert hot.tables[table.name].share.low - 1e-9 <= true <= hot.tables[table.name].share.high + 1e-9
    assert total == hot.bytes <= memory


def test_what_a_wide_row_leaves_over_goes_to_a_narrow_one():
    classes = {"wide": histogram([100, 90]), "narrow": histogram([5, 4])}
    cuts = choose(classes, {"wide": 10, "narrow": 3}, 17)
    assert (cuts["wide"].rows, cuts["narrow"].rows) == (1, 2)


def test_a_budget_for_everything_takes_everything():
    counts = KeyCounts()
    counts.add(np.arange(50) % 20)
    hot = hot_rows([Table(name="t", dim=4)], {"t": counts}, 1 << 20)
    assert hot.tables["t"].rows == 20 and hot.share.low == hot.share.high == 1
    assert hot.bytes == 20 * row_bytes(Table(name="t", dim=4))


def test_the_curve_rises_to_all_accesses():
    counts = KeyCounts()
    counts.add(np.random.default_rng(0).zipf(1.3, 3000) % 500)
    found = curve({"t": counts.histogram()}, {"t": 84}, counts.total)
    assert (np.diff(found.bytes) > 0).all() and (np.diff(found.share) > 0).all()
    assert found.share[-1] == 1 and found.bytes[-1] == 84 * counts.distinct


def test_a_budget_smaller_than_one_row_is_refused():
    counts = KeyCounts()
    counts.add(np.array([1]))
    tables = [Table(name="wide", dim=64), Table(name="narrow", dim=2, optimizer=SGD())]
    with pytest.raises(SettingsError, match="23 bytes holds no row: the smallest, of table narrow, takes 24 "):
        hot_rows(tables, {"wide": counts, "narrow": counts}, 23)
    assert hot_rows(tables, {"wide": counts, "narrow": counts}, 24).bytes == 24
    with pytest.raises(SettingsError, match="counted no access"):
        hot_rows(tables, {"wide": KeyCounts(), "narrow": KeyCounts()}, 1 << 20)


def test_a_profile_without_the_table_is_refused():
    with pytest.raises(SettingsError, match="nothing of table t: it is of another data set"):
        hot_rows([Table(name="t", dim=4)], {}, 1 << 20)
