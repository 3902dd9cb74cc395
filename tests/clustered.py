"""Clustered samples for the tests of the profile: small ones by hypothesis, larger ones with planted clocks."""

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from hotrow.data.flat import arrow_schema
from hotrow.data.schema import Column, Repeats, Schema

SCHEMA = Schema(
    label="label",
    dense=("age", "price"),
    features=(
        Column(name="user"),
        Column(name="item"),
        Column(name="history", kind="keys"),
        Column(name="tags", kind="keys", weights="tags_weights"),
        Column(name="words", kind="keys"),
    ),
    session="session",
)
COLUMNS = ("user", "item", "history", "tags", "words", "age", "price")
GROUPS = (
    Repeats(name="slowly", columns=("user", "tags", "age")),
    Repeats(name="sliding", columns=("history", "words", "item"), slides=("history",)),
)
GROUPED = SCHEMA.model_copy(update={"groups": GROUPS})


@st.composite
def clustered(draw):
    """Some sessions of few samples, each column of a sample kept, slid or drawn anew."""
    rows = []
    for session in range(draw(st.integers(1, 5))):
        row = None
        for _ in range(draw(st.integers(1, 7))):
            row = {
                name: _next(draw, name, row) for name in ("user", "item", "history", "tags", "words", "age", "price")
            }
            row["tags_weights"] = [draw(st.sampled_from([0.5, 0.0, -0.0])) if k == 2 else 1.0 for k in row["tags"]]
            rows.append({**row, "session": session * 7 - 3, "label": 0.0})
    return pa.Table.from_pylist(rows, schema=arrow_schema(SCHEMA))


def _next(draw, name, before):
    what = draw(st.integers(0, 3))
    if before is not None and what > 1:
        return before[name]
    if name in ("age", "price"):
        return draw(st.sampled_from([0.0, -0.0, 1.5, float("nan")]))
    if name in ("user", "item"):
        return draw(st.integers(0, 2))
    if before is not None and what == 1:  # drops some on the left, adds some on the right
        kept = before[name][draw(st.integers(0, 2)) :]
        return (kept + draw(st.lists(st.integers(0, 3), max_size=2)))[-5:]
    return draw(st.lists(st.integers(0, 3), max_size=4))


def planted(chances, sessions=400, length=16, seed=0):
    """Clustered samples with a column for each name, a number that changes with the chance given; as a table."""
    rng = np.random.default_rng(seed)
    session = np.repeat(np.arange(sessions), length)
    begins = np.append(True, session[1:] != session[:-1])
    columns = {"session": session, "label": np.zeros(len(session), np.float32)}
    for names, chance in chances.items():
        ticked = np.cumsum(begins | (rng.random(len(session)) < chance))
        for at, name in enumerate(names.split()):
            columns[name] = ticked + at * len(session)
    return pa.table(columns)


def keys_schema(*names):
    """A schema of one-key features in sessions."""
    return Schema(label="label", session="session", features=tuple(Column(name=name) for name in names))
