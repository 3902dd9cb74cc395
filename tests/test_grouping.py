"""The grouping: unique keys, and which lookups share one, for batches of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow import _native
from hotrow.store.store import RowStore
from hotrow.table import Table


def check(keys: np.ndarray) -> None:
    """Against what the arrays mean, for a table with one feature."""
    layout = _native.Layout([1], [[(0, 0)]])
    offsets = np.arange(len(keys) + 1)
    grouping = layout.group([keys], [offsets], [None])
    unique, inverse = grouping.keys(0), grouping.inverse(0)
    assert (unique[inverse] == keys).all()
    assert len(unique) == len(np.unique(keys))
    order, starts = grouping.order(0), grouping.lookup_starts(0)
    assert starts[0] == 0 and starts[-1] == len(keys)
    assert (order == np.argsort(inverse, kind="stable")).all()
    assert (np.diff(starts) == np.bincount(inverse, minlength=len(unique))).all()
    again, numbers = _native.unique(keys)
    assert (again == unique).all() and (numbers == inverse).all()


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=60))
def test_small_sets_of_any_keys(keys):
    check(np.array(keys, np.int64))


@pytest.mark.parametrize("n", [2**15, 2**15 + 1, 200_000])
@pytest.mark.parametrize("spread", [1, 50, 2**62])
def test_large_sets_are_split_and_come_out_the_same(n, spread):
    check(np.random.default_rng(0).integers(-spread, spread, n))


def test_the_number_of_threads_changes_nothing():
    keys = np.random.default_rng(1).zipf(1.2, 100_000).astype(np.int64)
    before = _native.threads()
    try:
        found = []
        for threads in (1, 2, 5):
            _native.set_threads(threads)
            found.append([a.tobytes() for a in _native.unique(keys)])
    finally:
        _native.set_threads(before)
    assert found[0] == found[1] == found[2]


SUM, SEQUENCE = 0, 2


def windows(*pooling: int) -> _native.Grouping:
    """Features over the same windows, all of one table: keys 7 8 9 8, 6 lies in none, 5 9."""
    values = np.array([0, 7, 8, 9, 8, 6, 5, 9])
    begins, lengths = np.array([1, 2, 3, 6, 0]), np.array([3, 3, 0, 2, 0])
    offsets = np.concatenate([[0], np.cumsum(np.tile(lengths, len(pooling)))])
    layout = _native.Layout([2], [[(0, p) for p in pooling]])
    return layout.group([values], [offsets], [None], [np.tile(begins, len(pooling))])


def test_keys_that_windows_share_are_looked_up_once_and_those_in_none_never():
    sequence = windows(SEQUENCE)
    assert sequence.keys(0).tolist() == [7, 8, 9, 5]
    assert sequence.inverse(0).tolist() == [0, 1, 2, 1, 3, 2], "one lookup a stored key"
    stored, begins = sequence.windows(0)
    assert stored == 6 and begins.tolist() == [0, 1, 0, 4, 0]
    pooled = windows(SUM)
    assert pooled.keys(0).tolist() == [7, 8, 9, 5]
    assert pooled.inverse(0).tolist() == [0, 1, 2, 1, 2, 1, 3, 2], "a lookup for each key of each window"


@pytest.mark.parametrize("pooling", [(SUM,), (SEQUENCE,), (SUM, SEQUENCE), (SEQUENCE, SUM, SUM)], ids=str)
def test_lookups_of_windows_stay_grouped_by_their_key(pooling):
    grouping = windows(*pooling)
    inverse, starts = grouping.inverse(0), grouping.lookup_starts(0)
    assert (grouping.order(0) == np.argsort(inverse, kind="stable")).all()
    assert (np.diff(starts) == np.bincount(inverse)).all()
    rows = np.array([[1, 2], [10, 20], [100, 200], [1000, 2000]], np.float32)
    matrices, grads = [], []
    if SUM in pooling:
        matrices.append(np.full((5, 2 * pooling.count(SUM)), np.nan, np.float32))
    else:
        matrices.append(None)
    matrices += [np.full((6, 2), np.nan, np.float32) for p in pooling if p == SEQUENCE]
    grouping.forward(rows.reshape(-1), matrices)
    if SUM in pooling:
        assert matrices[0][:, :2].tolist() == [[111, 222], [120, 240], [0, 0], [1100, 2200], [0, 0]]
    for sequence in matrices[1:]:
        assert sequence[:, 0].tolist() == [1, 10, 100, 10, 1000, 100]
    grads = [None if m is None else np.ones_like(m) for m in matrices]
    summed = np.full(8, np.nan, np.float32)
    grouping.backward(grads, summed)
    uses = np.array([1, 3, 3, 1]) * pooling.count(SUM) + np.array([1, 2, 2, 1]) * pooling.count(SEQUENCE)
    assert summed.reshape(4, 2)[:, 0].tolist() == uses.tolist()


@pytest.mark.parametrize(
    ("begins", "message"),
    [([0], "each bag needs a begin"), ([0, 2], "do not fit together"), ([-1, 0], "do not fit together")],
)
def test_windows_outside_the_values_are_refused(begins, message):
    layout = _native.Layout([1], [[(0, 0)]])
    with pytest.raises(ValueError, match=message):
        layout.group([np.arange(3)], [np.array([0, 2, 4])], [None], [np.array(begins)])


@pytest.mark.parametrize(
    ("groups", "values", "offsets", "message"),
    [
        ([[(1, 0)]], [1], [0, 1], "there is no such table"),
        ([[]], [1], [0, 1], "a group needs features x samples \\+ 1 offsets"),
        ([[(0, 0)]], [1], [], "a group needs features x samples \\+ 1 offsets"),
        ([[(0, 0), (0, 0)]], [1], [0, 1], "a group needs features x samples \\+ 1 offsets"),
        ([[(0, 0)]], [1], [0, 2], "do not fit together"),
        ([[(0, 0)]], [1, 2], [0, 2, 1], "do not fit together"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(groups, values, offsets, message):
    with pytest.raises(ValueError, match=message):
        _native.Layout([1], groups).group([np.array(values, np.int64)], [np.array(offsets, np.int64)], [None])


def test_results_of_another_shape_are_refused():
    grouping = _native.Layout([2], [[(0, 0)]]).group([np.arange(3)], [np.arange(4)], [None])
    rows = np.zeros(6, np.float32)
    for shape in ((2, 2), (3, 1)):
        with pytest.raises(ValueError, match="the result matrices do not have the shapes of this batch"):
            grouping.forward(rows, [np.zeros(shape, np.float32)])
    with pytest.raises(ValueError, match="too few rows"):
        grouping.forward(rows[:4], [np.zeros((3, 2), np.float32)])


@pytest.mark.parametrize(
    ("offsets", "begins"),
    [
        ([0, 2**63 - 1, -5, 3], None),
        ([0, -(2**63), 2**63 - 1], None),
        ([0, 1, 4], None),
        ([0, 2, 4], [2**63 - 1, 0]),
        ([0, 2**62, 2**63 - 1], [0, 0]),
        ([0, 2, 3], [2, 0]),
    ],
)
def test_bags_outside_their_values_are_refused(offsets, begins):
    layout = _native.Layout([8], [[(0, 0)]])
    with pytest.raises(ValueError, match="do not fit together"):
        layout.group([np.arange(3)], [np.array(offsets)], [None], None if begins is None else [np.array(begins)])


def test_stores_that_do_not_fit_are_refused():
    store = RowStore(Table(name="x", dim=16)).native
    rows, keys = np.zeros(64, np.float32), np.arange(4)
    for start in (1, 2**64 - 64):
        with pytest.raises(ValueError, match="too small"):
            _native.fetch([store], [keys], [None], rows, [start], 0)
    with pytest.raises(ValueError, match="None"):
        _native.fetch([None], [keys], [None], rows, [0], 0)
    grouping = _native.Layout([8], [[(0, 0)]]).group([keys], [np.arange(5)], [None])
    places = _native.Places(grouping, [0], [np.ones((4, 8), np.float32)])
    with pytest.raises(ValueError, match="another dim"):
        _native.update([store], [grouping.keys(0)], [None], np.empty(0, np.float32), [0], [0.1], None, places)
    with pytest.raises(ValueError, match="its map"):
        grouping.place([None], [0], [0], [0])
