"""What repeats is kept once, and every sample can be told exactly from it."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotrow import _native
from hotrow.data import Column, Schema
from hotrow.data.dedup import SAMPLES, decode, encode, renumber, tables
from hotrow.data.schema import Repeats
from hotrow.errors import DataError, SettingsError
from session_logs import GROUPS, SCHEMA, grouped, logs, same

HISTORY = Schema(
    label="y",
    features=(Column(name="h", kind="keys"),),
    session="s",
    groups=(Repeats(name="G", columns=("h",), slides=("h",)),),
)


def history(*lists, sessions=None):
    """The tables of one sliding feature: row of each sample, (begin, length) of each row, keys."""
    n = len(lists)
    table = pa.table(
        {
            "y": pa.array([0.0] * n, pa.float32()),
            "h": pa.array(lists, pa.list_(pa.int64())),
            "s": pa.array(sessions or [1] * n, pa.int64()),
        }
    )
    made = encode(table, HISTORY)
    assert decode(made, HISTORY).column("h").to_pylist() == list(lists)
    rows = made["G"].to_pydict()
    windows = list(zip(rows["h_begin"], rows["h_length"], strict=True))
    return made[SAMPLES].column("G").to_pylist(), windows, made["G.h"].column("h").to_pylist()


@given(logs(), st.lists(st.sampled_from(GROUPS), unique_by=lambda g: g.name))
def test_decoding_gives_back_exactly_what_was_encoded(log, groups):
    schema = SCHEMA.model_copy(update={"groups": tuple(groups)})
    made = encode(log, schema)
    assert {name: table.schema for name, table in made.items()} == tables(schema)
    assert same(decode(made, schema), log)


@given(logs(), st.sampled_from(GROUPS))
def test_a_row_is_a_sample_that_differs_from_the_one_before_it_in_its_session(log, group):
    schema = grouped(group)
    features = {f.name: f for f in schema.features}
    columns = [
        c for name in group.columns for c in (name, getattr(features.get(name), "weights", None)) if c is not None
    ]
    rows = log.select([*columns, "s"]).to_pylist()
    changed = [i == 0 or repr(rows[i]) != repr(rows[i - 1]) for i in range(len(rows))]
    assert encode(log, schema)[SAMPLES].column(group.name).to_pylist() == (np.cumsum(changed) - 1).tolist()


@given(logs(least=1))
def test_whole_sessions_use_one_stretch_of_every_table_and_all_of_it(log):
    made = encode(log, grouped())
    sessions = log.column("s").to_numpy()
    for group in GROUPS:
        inverse = made[SAMPLES].column(group.name).to_numpy()
        assert inverse[0] == 0 and set(np.diff(inverse)) <= {0, 1} and inverse[-1] == len(made[group.name]) - 1
        assert all(len(set(sessions[inverse == row])) == 1 for row in set(inverse))
        for name in group.slides:
            begins, lengths = (made[group.name].column(f"{name}_{what}").to_numpy() for what in ("begin", "length"))
            ends, covered = 0, set()
            for session in dict.fromkeys(sessions):
                rows = sorted(set(inverse[sessions == session]))
                keys = {k for r in rows for k in range(begins[r], begins[r] + lengths[r])}
                assert keys == set(range(ends, ends + len(keys)))
                ends += len(keys)
                covered |= keys
            assert covered == set(range(len(made[f"{group.name}.{name}"])))


@pytest.mark.parametrize(
    ("lists", "windows", "keys"),
    [
        ([[1, 2, 3], [2, 3, 4]], [(0, 3), (1, 3)], [1, 2, 3, 4]),
        ([[1, 2, 3], [3, 4, 5]], [(0, 3), (2, 3)], [1, 2, 3, 4, 5]),
        ([[1], [1, 2], [1, 2, 3]], [(0, 1), (0, 2), (0, 3)], [1, 2, 3]),
        ([[1, 2, 3], [2, 3], [3]], [(0, 3), (1, 2), (2, 1)], [1, 2, 3]),
        ([[1, 2, 3], [1, 2], [1]], [(0, 3), (0, 2), (0, 1)], [1, 2, 3]),
        ([[1, 2], [8, 9], [9, 7]], [(0, 2), (2, 2), (3, 2)], [1, 2, 8, 9, 7]),
        ([[5, 5, 5], [5, 5, 5, 5], [5, 5, 6]], [(0, 3), (0, 4), (2, 3)], [5, 5, 5, 5, 6]),
        ([[1, 2, 1, 2, 1], [2, 1, 2, 1, 3]], [(0, 5), (1, 5)], [1, 2, 1, 2, 1, 3]),
    ],
)
def test_a_history_that_slides_grows_or_shrinks_adds_only_its_new_keys(lists, windows, keys):
    assert history(*lists) == (list(range(len(lists))), windows, keys)


def test_sessions_share_nothing_and_an_empty_history_costs_no_key():
    inverse, windows, keys = history([1, 2], [1, 2], [1, 2], [], sessions=[1, 1, 2, 2])
    assert (inverse, windows[:2], keys) == ([0, 0, 1, 2], [(0, 2), (2, 2)], [1, 2, 1, 2])
    assert windows[2][1] == 0
    assert history([]) == ([0], [(0, 0)], [])


def test_the_same_keys_with_other_weights_do_not_slide():
    schema = grouped(Repeats(name="G", columns=("rated",), slides=("rated",)))
    weights = [[1.0, 2.0], [2.0, 3.0], [9.0, 4.0]]
    n = len(weights)
    flat = {
        f.name: pa.array([[]] * n if pa.types.is_list(f.type) else [0] * n, f.type) for f in tables(SCHEMA)[SAMPLES]
    }
    flat |= {"rated": pa.array([[1, 2], [2, 3], [3, 4]], pa.list_(pa.int64()))}
    flat |= {"rated_weights": pa.array(weights, pa.list_(pa.float32()))}
    made = encode(pa.table(flat), schema)
    assert made["G.rated"].to_pydict() == {"rated": [1, 2, 3, 3, 4], "rated_weights": [1.0, 2.0, 3.0, 9.0, 4.0]}
    assert decode(made, schema).column("rated_weights").to_pylist() == weights


def test_long_lists_that_repeat_themselves_are_laid_along_each_other():
    assert len(history(*([7] * n for n in range(3000, 3050)))[2]) == 3049
    assert len(history(*([7] * 3000 + [-i - 1] for i in range(20)))[2]) == 20 * 3001  # no end is another's beginning


@given(logs(least=1), st.integers(1, 1 << 20))
def test_rows_are_counted_from_anywhere(log, by):
    schema = grouped()
    made = encode(log, schema)
    raised = renumber(made, schema, dict.fromkeys(made, by))
    assert raised[SAMPLES].column("past").to_pylist() == [row + by for row in made[SAMPLES].column("past").to_pylist()]
    assert same(decode(renumber(raised, schema, dict.fromkeys(made, -by)), schema), log)
    with pytest.raises(DataError, match="that are not there"):
        decode(raised, schema)


def test_nulls_of_a_group_are_kept_as_what_they_mean():
    schema = grouped()
    flat = {f.name: pa.array([0], f.type) for f in tables(SCHEMA)[SAMPLES] if not pa.types.is_list(f.type)}
    flat |= {name: pa.array([None], pa.list_(pa.int64())) for name in ("seen", "tags")}
    for name in ("rated", "marks"):
        flat[name] = pa.array([[4, None]], pa.list_(pa.int64()))
        flat[f"{name}_weights"] = pa.array([[None, 2.0]], pa.list_(pa.float32()))
    flat |= {"user": pa.array([None], pa.int64()), "age": pa.array([None], pa.float32())}
    (sample,) = decode(encode(pa.table(flat), schema), schema).to_pylist()
    assert (sample["user"], sample["age"], sample["seen"], sample["tags"]) == (-1, 0.0, [], [])
    for name in ("rated", "marks"):
        assert (sample[name], sample[f"{name}_weights"]) == ([4, -1], [1.0, 2.0])


def test_columns_that_would_clash_are_refused():
    two = Schema(label="y", features=(Column(name="h", kind="keys"), Column(name="h_begin")), session="s")
    group = Repeats(name="G", columns=("h", "h_begin"), slides=("h",))
    with pytest.raises(SettingsError, match='two columns "h_begin" in group G'):
        tables(two.model_copy(update={"groups": (group,)}))
    with pytest.raises(SettingsError, match='two columns "s" in the samples'):
        tables(two.model_copy(update={"groups": (Repeats(name="s", columns=("h",)),)}))


@given(st.data())
@example(None)
def test_taking_windows_copies_what_they_cover_and_nothing_else(data):
    """Any windows, not only those `encode` makes: a batch may begin anywhere in a session."""
    if data is None:
        windows, ranges = [(4, 2), (0, 1), (7, 0), (5, 3)], [(0, 4)]
    else:
        windows = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8))
        at = sorted(data.draw(st.lists(st.integers(0, len(windows)), max_size=6)))
        ranges = [(a, b - a) for a, b in zip(at[::2], at[1::2], strict=False)]
    keys = np.arange(100, 126)
    begins, lengths = (np.array([w[i] for w in windows], dtype=np.int64) for i in (0, 1))
    starts, counts = (np.array([r[i] for r in ranges], dtype=np.int64) for i in (0, 1))
    column = (keys, keys.astype(np.float32), begins, lengths, True)
    values, weights, got, got_lengths, ends = _native.take_bags([column], starts, counts)
    taken = [windows[i] for first, count in ranges for i in range(first, first + count)]
    assert got_lengths.tolist() == [length for _, length in taken]
    for (begin, length), at in zip(taken, got, strict=True):
        assert values[at : at + length].tolist() == keys[begin : begin + length].tolist()
    covered = [{k for b, n in windows[first : first + count] for k in range(b, b + n)} for first, count in ranges]
    assert len(values) == sum(map(len, covered)) == ends[-1]
    assert weights.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda i: _native.take(i(1, 2), None, i(1), i(2)), "range of rows is outside"),
        (lambda i: _native.take(i(1, 2), i(5), i(0), i(1)), "index is outside"),
        (lambda i: _native.take_inverse(i(0, 2, 1), i(0), i(3)), "not in the order of first use"),
        (lambda i: _native.take_bags([(i(1, 2), None, i(1), i(2), True)], i(0), i(1)), "list is outside the keys"),
        (lambda i: _native.take_bags([(i(1, 2), None, i(-1), i(1), False)], i(0), i(1)), "list is outside the keys"),
        (lambda i: _native.slide(i(1), None, i(0, 2), i(0), np.ones(1, bool)), "offsets leave the keys"),
        (lambda i: _native.mark_changed(i(1), None, i(1, 0), np.ones(1, bool)), "offsets decrease"),
    ],
)
def test_the_native_core_refuses_what_would_leave_its_arrays(call, said):
    with pytest.raises(ValueError, match=said):
        call(lambda *numbers: np.array(numbers, dtype=np.int64))
