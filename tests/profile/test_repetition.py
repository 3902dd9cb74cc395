"""What is counted of repetition is what a data set keeps, however the log was divided among those who counted."""

import functools
import itertools
import math
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustered import GROUPED, GROUPS, SCHEMA, clustered
from hotrow.data.dedup import encode
from hotrow.data.flat import arrow_schema
from hotrow.errors import DataError
from hotrow.profile import Repetition, changes, repetition
from hotrow.profile.changes import hash_of

NAMES = ["user", "item", "history", "tags", "words", "age", "price"]


def same_counts(a, b):
    assert (a.samples, a.session_lengths, a.columns, a.groups) == (b.samples, b.session_lengths, b.columns, b.groups)
    assert sorted(a.changes.hashes) == sorted(b.changes.hashes)
    assert a.changes.halvings == b.changes.halvings
    assert (a.changes.unpacked() == b.changes.unpacked()).all()


def bits(value):
    """A value as it is compared."""
    if isinstance(value, list):
        return [bits(v) for v in value]
    return struct.pack("<f", value) if isinstance(value, float) else value


@given(clustered())
def test_counts_are_those_of_a_loop_over_the_samples(table):
    found = Repetition.of(table, SCHEMA)
    rows = table.to_pylist()
    for name in NAMES:
        unchanged = repeated = values = 0
        for before, row in zip([None, *rows], rows, strict=False):
            length = len(row[name]) if isinstance(row[name], list) else 1
            values += length
            names = (name, "tags_weights") if name == "tags" else (name,)
            if (
                before is not None
                and before["session"] == row["session"]
                and all(bits(before[n]) == bits(row[n]) for n in names)
            ):
                unchanged, repeated = unchanged + 1, repeated + length
        counts = found.columns[name]
        assert (counts.values, counts.unchanged, counts.repeated) == (values, unchanged, repeated), name
        assert counts.bytes == values * {"tags": 12, "age": 4, "price": 4}.get(name, 8)
        assert counts.kept == counts.values  # there are no groups
        assert counts.slid <= found.samples - found.sessions - counts.unchanged
        assert math.isclose(found.length(name), values / len(rows))
    assert sum(k * v for k, v in found.session_lengths.items()) == found.samples == len(rows)
    assert found.sessions == len({row["session"] for row in rows})


@given(clustered())
def test_what_groups_are_counted_to_keep_is_what_their_files_hold(table):
    found = Repetition.of(table, GROUPED)
    tables = encode(table, GROUPED)
    for group in GROUPS:
        assert found.groups[group.name].rows == len(tables[group.name])
        for name in group.columns:
            kept = found.columns[name].kept
            if name in group.slides:
                assert kept == len(tables[f"{group.name}.{name}"])
            else:
                column = tables[group.name].column(name)
                assert kept == (
                    len(column) if not pa.types.is_list(column.type) else len(pa.compute.list_flatten(column))
                )
    assert found.columns["price"].kept == len(table)
    assert found.repeats == GROUPS
    assert found.columns["history"].kept == (
        found.columns["history"].values - found.columns["history"].repeated - found.columns["history"].overlap
    )


@given(clustered(), st.data())
def test_any_division_into_whole_sessions_merges_to_the_same_counts(table, data):
    whole = Repetition.of(table, GROUPED)
    session = table.column("session").to_pylist()
    cuts = [i for i in range(1, len(session)) if session[i] != session[i - 1] and data.draw(st.booleans())]
    edges = [0, *cuts, len(session)]
    parts = [Repetition.of(table.slice(a, b - a), GROUPED) for a, b in itertools.pairwise(edges)]
    merged, *rest = data.draw(st.permutations(parts))
    for part in rest:
        merged = merged.merge(part)
    same_counts(merged, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "_CHUNK", 3)
        same_counts(Repetition.of(table, GROUPED), whole)


def test_histories_that_slide_share_all_but_their_new_keys():
    history = [[1, 2, 3], [2, 3, 4], [3, 4, 5, 6], [3, 4, 5, 6], [9], [1, 2, 3]]
    table = pa.table({"label": [0.0] * 6, "session": [1] * 5 + [2], "history": pa.array(history)})
    schema = SCHEMA.model_copy(update={"dense": (), "features": SCHEMA.features[2:3]})
    counts = Repetition.of(table, schema).columns["history"]
    assert (counts.values, counts.unchanged, counts.slid, counts.overlap) == (18, 1, 2, 4)
    found = Repetition.of(table, schema)
    assert found.unchanged("history") == 1 / 4
    assert found.unchanged_or_slid("history") == 3 / 4
    assert found.exact_share == 4 / 18
    assert found.slid_share == 8 / 18


def test_without_a_session_nothing_repeats():
    table = pa.table({"label": [0.0] * 4, "user": [1] * 4})
    schema = SCHEMA.model_copy(update={"dense": (), "features": SCHEMA.features[:1], "session": None})
    found = Repetition.of(table, schema)
    assert (found.sessions, found.columns["user"].unchanged, found.exact_share) == (4, 0, 0.0)
    assert Repetition.of(table.slice(0, 0), schema).samples == 0


def test_samples_without_a_session_are_looked_at_by_chance_and_alike_however_they_are_divided(monkeypatch):
    monkeypatch.setattr(changes, "LOOKED", 500)
    n = 2000
    flat = {f.name: pa.array([[]] * n if pa.types.is_list(f.type) else [0] * n, f.type) for f in arrow_schema(SCHEMA)}
    table = pa.table(flat | {"user": range(n), "session": [-1 if i % 2 else i for i in range(n)]})
    whole = Repetition.of(table, SCHEMA)
    assert whole.session_lengths == {1: n} and 200 < len(whole.changes) <= 500
    known = set(hash_of(np.arange(0, n, 2), np.zeros(n // 2, np.int64)).tolist())
    assert 0.4 < len(known & set(whole.changes.hashes.tolist())) / len(whole.changes) < 0.6
    parts = [Repetition.of(table.slice(at, 300), SCHEMA) for at in range(0, n, 300)]
    same_counts(functools.reduce(Repetition.merge, parts), whole)


def test_counts_of_other_columns_or_groups_do_not_merge():
    table = pa.table({"label": [0.0], "session": [1], "user": [1], "age": pa.array([1.0], pa.float32())})
    schema = SCHEMA.model_copy(update={"dense": ("age",), "features": SCHEMA.features[:1]})
    found = Repetition.of(table, schema)
    for other in (
        schema.model_copy(update={"dense": ()}),
        schema.model_copy(update={"groups": (GROUPS[0].model_copy(update={"columns": ("user", "age")}),)}),
    ):
        with pytest.raises(DataError, match="same columns and groups"):
            found.merge(Repetition.of(table, other))
