"""Criteo's display-ad logs: label, 13 integers, 26 hashed categories, tab-separated, no header.

Integers become log(1 + max(x, 0)), as the field does since the 2014 challenge; a missing one is 0. Categories
are hexadecimal and become the number they spell; a missing one is the key -1. Each has its own table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.data.columns import Made
from hotrow.data.convert import BadRows, Checked, Chunk
from hotrow.data.schema import MISSING, Column, Schema
from hotrow.data.sources.source import Slice
from hotrow.data.sources.text import Dialect, TextSource, read_text

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))


class Criteo(TextSource):
    """The Kaggle and Terabyte layout."""

    schema = Schema(label="label", dense=INTEGERS, features=tuple(Column(name=name) for name in CATEGORIES))

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files, Dialect(delimiter="\t", columns=("label", *INTEGERS, *CATEGORIES)))

    def chunks(self, part: Slice, bad: BadRows) -> Iterator[Chunk]:
        for chunk in read_text(part, self.dialect, bad):
            yield _typed(chunk, bad)


def _typed(chunk: Chunk, bad: BadRows) -> Chunk:
    checked = Checked(chunk, bad)
    checked.columns["label"] = chunk.column("label")
    for name in INTEGERS:
        checked.put(name, name, _logarithm(chunk.column(name)), "it takes an integer, or nothing", may_miss=True)
    for name in CATEGORIES:
        takes = "it takes a hexadecimal number of at most 15 digits, or nothing"
        checked.put(name, name, _number(chunk.column(name)), takes, may_miss=True)
    return checked.chunk()


def _logarithm(cells: pa.Array) -> Made:
    """log(1 + max(x, 0)) of integers in text, and which cells are none."""
    wrong = None
    try:
        integers = pc.cast(cells, pa.int64())
    except pa.ArrowInvalid:
        fits = pc.fill_null(pc.match_substring_regex(cells, r"^-?\d{1,18}$"), True)
        wrong = ~fits.to_numpy(zero_copy_only=False)
        integers = pc.cast(pc.if_else(fits, cells, None), pa.int64())
    values = pc.fill_null(integers, 0).to_numpy()
    return pa.array(np.log1p(np.maximum(values, 0)).astype(np.float32)), wrong


def _number(cells: pa.Array) -> Made:
    """Hexadecimal text as a number, and which cells are none; only distinct texts are looked at."""
    coded = pc.dictionary_encode(cells)
    texts = coded.dictionary
    fits = pc.match_substring_regex(texts, "^[0-9a-fA-F]{1,15}$").to_numpy(zero_copy_only=False)
    numbers = [int(text, 16) if fit else MISSING for text, fit in zip(texts.to_pylist(), fits, strict=True)]
    keys = np.array([*numbers, MISSING], dtype=np.int64)
    at = pc.fill_null(coded.indices, len(texts)).to_numpy(zero_copy_only=False)
    return pa.array(keys[at]), None if fits.all() else np.append(~fits, False)[at]
