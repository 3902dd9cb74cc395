"""Columns that change together are found, and grouped only where it pays."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from clustered import GROUPED, SCHEMA, clustered, keys_schema, planted
from hotrow.data.dedup import decode, encode
from hotrow.data.flat import arrow_schema
from hotrow.data.schema import Column, Repeats, Schema
from hotrow.profile import Repetition, find_groups, groups


def columns_of(found):
    return {frozenset(group.columns) for group in found}


def test_columns_with_the_same_clock_form_a_group_and_restless_ones_none():
    slow, quick = ("a0", "a1", "a2", "a3", "a4", "a5"), ("b0", "b1", "b2", "b3", "b4", "b5")
    table = planted({" ".join(slow): 0.05, " ".join(quick): 0.3, "item context": 0.97})
    found = find_groups(table, keys_schema("item", *slow[:2], *quick[:4], "context", *slow[2:], *quick[4:]))
    assert columns_of(found) == {frozenset(slow), frozenset(quick)}
    assert [group.columns[0] for group in found] == ["a0", "b0"]  # in the schema's order


def test_one_inverse_is_taken_where_it_is_cheaper_than_two():
    names = ("a", "b", "c", "d")
    alike = planted({"a b": 0.02, "c d": 0.02}, sessions=800)
    assert columns_of(find_groups(alike, keys_schema(*names))) == {frozenset(names)}
    unlike = planted({"a b": 0.01, "c d": 0.6}, sessions=800)
    assert frozenset(names) not in columns_of(find_groups(unlike, keys_schema(*names)))


def test_a_column_that_saves_less_than_its_inverse_stays_out():
    table = planted({"user": 0.0})
    assert find_groups(table, keys_schema("user")) == ()  # one key saves 15 bytes a sample, and a group costs 16
    assert columns_of(find_groups(table, keys_schema("user"), batch_size=1 << 20)) == {frozenset(("user",))}
    assert find_groups(planted({"a b c": 0.9}), keys_schema("a", "b", "c")) == ()


def test_small_batches_hold_less_of_what_repeats():
    table = planted({"a b c d e f": 0.02}, length=50)
    schema = keys_schema("a", "b", "c", "d", "e", "f")
    assert find_groups(table, schema, batch_size=1 << 20) != ()
    assert find_groups(table, schema, batch_size=2) == ()


def test_without_sessions_or_samples_there_are_no_groups():
    table = planted({"a b": 0.0})
    schema = keys_schema("a", "b")
    assert find_groups(table, schema.model_copy(update={"session": None})) == ()
    assert find_groups(table.slice(0, 0), schema) == ()


def lists(session, change, length, seed, slide):
    """A list a sample; with `change` it is drawn anew, or slides by one key."""
    rng = np.random.default_rng(seed)
    rows, at = [], 0
    for i, s in enumerate(session):
        fresh = i == 0 or s != session[i - 1]
        if fresh or rng.random() < change:
            at += 1 if slide and not fresh else 10_000
        rows.append(list(range(at, at + length)))
    return pa.array(rows)


def test_a_list_that_slides_is_told_from_one_that_is_drawn_anew():
    table = planted({"user": 0.0, "item": 1.0}, sessions=100)
    session = table.column("session").to_pylist()
    table = table.append_column("history", lists(session, 0.3, 20, 0, slide=True))
    table = table.append_column("interests", lists(session, 0.3, 20, 1, slide=False))
    schema = Schema(
        label="label",
        session="session",
        features=(
            Column(name="user"),
            Column(name="item"),
            Column(name="history", kind="keys"),
            Column(name="interests", kind="keys"),
        ),
    )
    found = find_groups(table, schema)
    assert {name for group in found for name in group.slides} == {"history"}
    assert {name for group in found for name in group.columns} == {"user", "history", "interests"}


def test_a_column_called_as_a_window_stays_with_the_samples():
    table = planted({"user": 0.0, "history_length": 0.05}, sessions=100)
    table = table.append_column("history", lists(table.column("session").to_pylist(), 0.3, 20, 0, slide=True))
    keys = (Column(name="user"), Column(name="history_length"), Column(name="history", kind="keys"))
    schema = Schema(label="label", session="session", features=keys)
    found = find_groups(table, schema)
    assert [(group.columns, group.slides) for group in found] == [(("user", "history"), ("history",))]
    made = schema.model_copy(update={"groups": found})
    assert decode(encode(table, made), made).column("history_length").equals(table.column("history_length"))


@given(clustered())
def test_groups_found_can_be_encoded_and_cost_less_than_none(table):
    found = find_groups(table, GROUPED)
    schema = GROUPED.model_copy(update={"groups": found})
    Schema.model_validate(schema.model_dump())  # names, columns and slides are possible
    back = decode(encode(table, schema), schema)
    assert back.select(["label", "session"]).equals(table.select(["label", "session"]))
    assert [str(v) for v in back.to_pylist()] == [str(v) for v in table.select(arrow_schema(SCHEMA).names).to_pylist()]
    columns = groups._Columns.of(Repetition.of(table, SCHEMA), SCHEMA, 4096)
    for group in found:
        members = [columns.names.index(name) for name in group.columns]
        assert columns.plain(members) > columns.grouped(members)


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [[first], *found]
        for at in range(len(found)):
            yield [*found[:at], [first, *found[at]], *found[at + 1 :]]


@pytest.mark.parametrize("seed", range(6))
def test_greedy_saves_nearly_what_the_best_partition_saves(seed):
    chances = np.random.default_rng(seed).choice([0.0, 0.03, 0.1, 0.3, 0.8], size=3)
    table = planted({"a b": chances[0], "c d": chances[1], "e f": chances[2]}, seed=seed)
    schema = keys_schema(*"abcdef")
    columns = groups._Columns.of(Repetition.of(table, schema), schema, 4096)

    def saved(partition):
        return sum(max(columns.plain(group) - columns.grouped(group), 0.0) for group in partition)

    best = max(saved(partition) for partition in partitions(list(range(6))))
    found = [[columns.names.index(name) for name in group.columns] for group in find_groups(table, schema)]
    assert saved(found) >= 0.9 * best


def test_a_thousand_columns_fall_into_the_groups_that_were_planted():
    clocks = {" ".join(f"g{g}_{i}" for i in range(20)): 0.06 + 0.008 * g for g in range(50)}
    table = planted(clocks, sessions=300)
    names = [name for planted_names in clocks for name in planted_names.split()]
    found = find_groups(table, keys_schema(*names[::2], *names[1::2]))
    assert len(names) == 1000
    assert columns_of(found) == {frozenset(planted_names.split()) for planted_names in clocks}


def test_names_are_safe_for_files_new_and_the_same_every_time():
    slow, odd = ("slow_0", "slow_1", "slow_2", "slow_3"), ("a/b", "d.e", "ü", "a b")
    table = planted({" ".join(slow): 0.01, " ".join(odd[:3]) + " x": 0.4, "item": 1.0})
    table = table.rename_columns(["a b" if n == "x" else n for n in table.column_names])
    schema = keys_schema(*slow, *odd, "item")
    found = find_groups(table, schema)
    assert [group.name for group in found] == ["slow_group", "a_b_group"]
    assert find_groups(table, schema) == found
    renamed = table.rename_columns(["slow_group" if n == "item" else n for n in table.column_names])
    clash = keys_schema(*slow, *odd, "slow_group")
    assert [group.name for group in find_groups(renamed, clash)] == ["slow_group_2", "a_b_group"]


def test_given_groups_do_not_change_what_is_found():
    table = planted({"a b c": 0.05})
    schema = keys_schema("a", "b", "c")
    given_groups = schema.model_copy(update={"groups": (Repeats(name="g", columns=("a",)),)})
    found = find_groups(table, schema)
    assert find_groups(table, given_groups) == find_groups(Repetition.of(table, schema), schema) == found != ()
