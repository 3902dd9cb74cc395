"""Clustered samples of every kind of session, drawn by hypothesis: what the data set format is tested with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from hotrow.data import Column, Schema
from hotrow.data.flat import arrow_schema
from hotrow.data.schema import Repeats

MOST = 6
"""`max_length` of the histories."""

SCHEMA = Schema(
    label="y",
    dense=("price", "age"),
    features=(
        Column(name="k"),
        Column(name="user"),
        Column(name="city"),
        Column(name="seen", kind="keys", table="k", pooling="sequence", max_length=MOST),
        Column(name="rated", kind="keys", table="k", weights="rated_weights", max_length=MOST),
        Column(name="tags", kind="keys", pooling="mean"),
        Column(name="marks", kind="keys", weights="marks_weights"),
    ),
    session="s",
    time="t",
    user="user",
    weight="w",
)

GROUPS = (
    Repeats(name="who", columns=("user", "age")),
    Repeats(name="past", columns=("seen", "city", "rated"), slides=("seen", "rated")),
    Repeats(name="lists", columns=("tags", "marks")),
)


def grouped(*groups: Repeats) -> Schema:
    """The schema with these groups, all of them if none is given."""
    return SCHEMA.model_copy(update={"groups": groups or GROUPS})


KEYS = st.integers(0, 5) | st.sampled_from([-1, 1 << 32, (1 << 33) + 1, -(1 << 63), (1 << 63) - 1])
PAIRS = st.tuples(KEYS, st.sampled_from([0.0, 0.5, -1.0]))


@st.composite
def histories(draw: st.DrawFn, samples: int, of: st.SearchStrategy[Any]) -> list[list[Any]]:
    """A list for each sample of a session: it stays, slides by some, grows, shrinks at either end, or is another."""
    here = draw(st.lists(of, max_size=MOST))
    made = []
    for _ in range(samples):
        made.append(list(here))
        how = draw(st.sampled_from(["stay", "stay", "slide", "slide", "cut", "shorten", "replace", "clear"]))
        if how == "slide":
            here = (here + draw(st.lists(of, min_size=1, max_size=MOST)))[-MOST:]
        elif how == "cut":
            here = here[draw(st.integers(0, len(here))) :]
        elif how == "shorten":
            here = here[: draw(st.integers(0, len(here)))]
        elif how == "replace":
            here = draw(st.lists(of, max_size=MOST))
        elif how == "clear":
            here = []
    return made


@st.composite
def steady(draw: st.DrawFn, samples: int, of: st.SearchStrategy[Any]) -> list[Any]:
    """A value for each sample of a session, most often that of the sample before."""
    made = [draw(of)]
    for _ in range(samples - 1):
        made.append(made[-1] if draw(st.integers(0, 3)) else draw(of))
    return made


@st.composite
def logs(draw: st.DrawFn, most_sessions: int = 6, most_samples: int = 7, least: int = 0) -> pa.Table:
    """Flat samples, sessions together. Key k of a sample is its number, so that a batch can be set beside the log."""
    sizes = draw(st.lists(st.integers(1, most_samples), min_size=least, max_size=most_sessions))
    columns: dict[str, list[Any]] = {name: [] for name in arrow_schema(SCHEMA).names}
    for session, size in enumerate(sizes):
        rated, marks = draw(histories(size, PAIRS)), draw(steady(size, st.lists(PAIRS, max_size=3)))
        columns["s"] += [session * 7 - 3] * size
        columns["user"] += [draw(KEYS)] * size
        columns["age"] += draw(steady(size, st.sampled_from([0.0, -0.0, 1.5, float("nan")])))
        columns["city"] += draw(steady(size, KEYS))
        columns["seen"] += draw(histories(size, KEYS))
        columns["tags"] += draw(steady(size, st.lists(KEYS, max_size=3)))
        for name, pairs in (("rated", rated), ("marks", marks)):
            columns[name] += [[key for key, _ in bag] for bag in pairs]
            columns[f"{name}_weights"] += [[weight for _, weight in bag] for bag in pairs]
    count = sum(sizes)
    columns |= {"k": list(range(count)), "t": list(range(count)), "y": [i % 2 for i in range(count)]}
    columns |= {"price": [i / 2 for i in range(count)], "w": [i + 1.0 for i in range(count)]}
    return pa.table(columns, schema=arrow_schema(SCHEMA))


def same(a: pa.Table, b: pa.Table) -> bool:
    """Equal to the bit: Arrow's own comparison takes no two NaN for equal, and -0 for 0."""

    def bits(table: pa.Table) -> list[Any]:
        columns = []
        for name in table.column_names:
            array = table.column(name).combine_chunks()
            if pa.types.is_list(array.type):
                columns.append(np.diff(array.offsets.to_numpy()).tolist())
                array = array.flatten()
            columns.append(array.to_numpy(zero_copy_only=False).tobytes())
        return columns

    return bool(a.schema.equals(b.schema)) and bits(a) == bits(b)
