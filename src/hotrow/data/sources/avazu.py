"""Avazu's mobile-ad log: a CSV with a header, `click` as the label, every other column a category.

`hour` (YYMMDDHH) becomes the time, in seconds since 1970 (UTC), and two features: the hour of the day and the
day of the week. The log has no user; `id` is the sample's own number and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.data.convert import BadRows, Checked, Chunk
from hotrow.data.schema import Column, Schema
from hotrow.data.sources.source import Slice
from hotrow.data.sources.text import Dialect, TextSource, first_line, read_text
from hotrow.errors import DataError

_NOT_CATEGORIES = ("id", "click", "hour")


class Avazu(TextSource):
    """The Kaggle layout; the categories are whatever other columns the header has."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files, Dialect())
        names = [name.strip() for name in first_line(self.files[0]).split(",")]
        for needed in ("click", "hour"):
            if needed not in names:
                raise DataError(f'{self.files[0]}:1: there is no column "{needed}" in the header; is it an Avazu log?')
        categories = [name for name in names if name not in _NOT_CATEGORIES]
        features = [*categories, "hour_of_day", "day_of_week"]
        self.schema = Schema(label="click", features=tuple(Column(name=n) for n in features), time="time")

    def chunks(self, part: Slice, bad: BadRows) -> Iterator[Chunk]:
        for chunk in read_text(part, self.dialect, bad):
            yield _with_time(chunk, bad)


def _with_time(chunk: Chunk, bad: BadRows) -> Chunk:
    checked = Checked(chunk, bad)
    checked.columns |= {name: chunk.column(name) for name in chunk.rows.schema.names if name != "hour"}
    coded = pc.dictionary_encode(pc.fill_null(chunk.column("hour"), ""))
    known = [_seconds(text) for text in coded.dictionary.to_pylist()]
    wrong = np.array([seconds is None for seconds in known], dtype=bool)
    at = coded.indices.to_numpy()
    seconds = np.array([s or 0 for s in known], dtype=np.int64)[at]
    made = pa.array(seconds), wrong[at] if wrong.any() else None
    checked.put("time", "hour", made, "it takes a date and hour as YYMMDDHH")
    checked.columns["hour_of_day"] = pa.array(seconds // 3600 % 24)
    checked.columns["day_of_week"] = pa.array((seconds // 86400 + 3) % 7)
    return checked.chunk()


def _seconds(text: str) -> int | None:
    try:
        return int(datetime.strptime(text, "%y%m%d%H").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None
