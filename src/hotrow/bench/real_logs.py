"""Real session logs as `hotrow bench dedup` takes them: with histories, and in the order in which they were written.

They are not part of Hotrow. `HOTROW_DATA` names a folder that has them, or some of them:

    globo.parquet         clicks of a news portal (de Souza Pereira Moreira et al., 2018): user, session, article, time
                          in seconds, and six fields of context
    diginetica.txt.zst    clicks of a shop, one session a line, items in order and without a time

A sample's history is the last 20 clicks of its user before it; Diginetica has no users, so there it is those of its
session. It has no times either: its log stands session after session, so without clustering it is clustered as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotrow.data.schema import Column, Schema

FOLDER = "HOTROW_DATA"
HISTORY = 20
CONTEXT = ("environment", "deviceGroup", "os", "country", "region", "referrer_type")

Ints = NDArray[np.int64]


class RealLog(NamedTuple):
    """A log: its rows in order of time, and what they mean."""

    rows: pa.Table
    schema: Schema


def globo(file: Path, clicks: int, negatives: int = 0) -> RealLog:
    """The first clicks, each followed by `negatives` articles drawn from all clicks as samples not clicked on."""
    table = pq.read_table(file)
    order = np.argsort(table.column("click_timestamp").to_numpy(), kind="stable")[:clicks]
    table = table.take(pa.array(order))
    user, item = (_ints(table, name) for name in ("user_id", "click_article_id"))
    history = histories(user, item)
    each = 1 + negatives
    drawn = np.random.default_rng(0).choice(item, (len(item), negatives))
    rows = {
        "label": np.tile(np.arange(each) == 0, len(item)).astype(np.float32),
        "item": np.column_stack([item, drawn]).ravel(),
        "user": np.repeat(user, each),
        "session": np.repeat(_ints(table, "session"), each),
        "time": np.repeat(_ints(table, "click_timestamp"), each),
        **{name: np.repeat(_ints(table, f"click_{name}"), each) for name in CONTEXT},
        "history": history.take(pa.array(np.repeat(np.arange(len(item)), each))),
    }
    return RealLog(pa.table(rows), _schema(("user", *CONTEXT), user="user"))


def diginetica(file: Path, clicks: int) -> RealLog:
    """The sessions that have the first clicks."""
    with pa.input_stream(str(file), compression="zstd") as stream:
        lines = stream.read().splitlines()
    lengths = np.array([line.count(b" ") + 1 for line in lines])
    sessions = int(np.searchsorted(np.cumsum(lengths), clicks)) + 1
    item = np.array(b" ".join(lines[:sessions]).split(), dtype=np.int64)
    session = np.repeat(np.arange(sessions), lengths[:sessions])[: len(item)]
    rows = {
        "label": np.ones(len(item), np.float32),
        "item": item,
        "session": session,
        "time": np.arange(len(item)),
        "history": histories(session, item),
    }
    return RealLog(pa.table(rows), _schema(()))


LOGS: dict[str, tuple[str, Callable[[Path, int], RealLog]]] = {
    "globo": ("globo.parquet", globo),
    "globo_negatives": ("globo.parquet", lambda file, samples: globo(file, samples // 4, negatives=3)),
    "diginetica": ("diginetica.txt.zst", diginetica),
}
"""For each log its file and how to read about so many samples of it."""


def find(name: str, samples: int) -> RealLog | str:
    """About so many samples of a log, or why it is not here."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return f"{FOLDER} names no folder with real logs"
    file = Path(folder) / LOGS[name][0]
    if not file.is_file():
        return f"the folder that {FOLDER} names has no {file.name}"
    return LOGS[name][1](file, samples)


def histories(owner: Ints, item: Ints) -> pa.ListArray:
    """For each row, in order of time, the last items that its owner has before it."""
    by_owner = np.argsort(owner, kind="stable")
    sorted_owner = owner[by_owner]
    place = np.arange(len(owner))
    lengths = np.minimum(place - np.searchsorted(sorted_owner, sorted_owner), HISTORY)
    ends = np.cumsum(lengths)
    at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(place - ends, lengths)
    offsets = np.append(0, ends).astype(np.int32)
    of_sorted = pa.ListArray.from_arrays(pa.array(offsets), pa.array(item[by_owner][at]))
    return of_sorted.take(pa.array(np.argsort(by_owner)))


def _schema(fields: tuple[str, ...], user: str | None = None) -> Schema:
    history = Column(name="history", kind="keys", table="item", pooling="sequence", max_length=HISTORY)
    return Schema(
        label="label",
        features=(Column(name="item"), history, *(Column(name=name) for name in fields)),
        session="session",
        time="time",
        user=user,
    )


def _ints(table: pa.Table, name: str) -> Ints:
    ints: Ints = table.column(name).to_numpy().astype(np.int64)
    return ints
