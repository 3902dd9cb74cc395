"""`KeyCounts`: how often each key of a table is used, in memory that has a bound.

Up to `limit` distinct keys every count is exact. Beyond, the same counters become a summary of Misra and Gries: the
keys that matter keep theirs, which may be too low by at most `error`, and `error` <= `total` / (limit / 2 + 1),
whatever the keys and their order. Then `distinct` is an estimate with a standard error of 0.8% (HyperLogLog);
`total` is always exact. A counter costs 21 to 43 bytes: at most 256 MiB with the default limit, 12.5 million keys,
which holds every table of Criteo's Kaggle log. Counts of parts, hosts and days merge: exactly while they fit, and
within the sum of their errors beyond.

A file of counts is Parquet (`key`, `count`, by key) and depends on the counts alone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow import _native
from hotrow.errors import DataError, SettingsError
from hotrow.files import read_whole, replacing
from hotrow.profile import sketch

Ints = npt.NDArray[np.int64]

LIMIT = 12_500_000
"""Distinct keys that are counted exactly, unless told otherwise."""

_FORMAT = "hotrow-counts-1"


class Histogram(NamedTuple):
    """How many keys have each count, the largest count first."""

    counts: Ints
    keys: Ints


class Curve(NamedTuple):
    """The hottest `rows` keys together take `share` of all accesses; a point for each count there is."""

    rows: Ints
    share: npt.NDArray[np.float64]


class KeyCounts:
    """How often each key was used. Several threads may add at once."""

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise SettingsError(f"Counts need room for at least one key, not {limit}.")
        self._native = _native.Counts(limit)

    def add(self, keys: Ints, times: Ints | None = None) -> None:
        """Counts each of `keys` once, or as often as `times` says."""
        self._native.add(_ints(keys), None if times is None else _ints(times))

    def merge(self, other: KeyCounts) -> None:
        """Counts what `other` counted as well."""
        keys, counts = other._native.above(1)
        self._native.merge(keys, counts, other.total, other.error, other._native.registers())

    @staticmethod
    def merged(parts: Iterable[KeyCounts], limit: int = LIMIT) -> KeyCounts:
        """One count of all parts."""
        out = KeyCounts(limit)
        for part in parts:
            out.merge(part)
        return out

    @property
    def limit(self) -> int:
        """Distinct keys up to which counts are exact."""
        return self._native.limit

    @property
    def total(self) -> int:
        """Accesses counted, those of keys that are no longer kept included."""
        return self._native.total

    @property
    def kept(self) -> int:
        """Keys that have a counter."""
        return self._native.used

    @property
    def error(self) -> int:
        """The most that a key's count can be too low; a key without a counter was used at most as often."""
        return self._native.error

    @property
    def exact(self) -> bool:
        """Whether no key was ever dropped and no count rounded."""
        return self._native.exact and self.error == 0

    @property
    def distinct(self) -> int:
        """Distinct keys seen; an estimate where counts are not exact."""
        return self.kept if self._native.exact else max(self.kept, round(sketch.distinct(self._native.registers())))

    @property
    def bytes(self) -> int:
        """Memory the counters take."""
        return self._native.bytes

    def of(self, keys: Ints) -> Ints:
        """The count of each key; 0 where it has none."""
        return self._native.of(_ints(keys))

    def above(self, least: int) -> tuple[Ints, Ints]:
        """The keys counted at least `least` times and their counts, hottest first; `order` among equals."""
        keys, counts = self._native.above(least)
        by = np.lexsort((order(keys), -counts))
        return keys[by], counts[by]

    def chosen(self, count: int, extra: int) -> Ints:
        """The keys counted more than `count` times and the first `extra` of those counted as often, sorted by key."""
        keys, counts = self._native.above(count)
        equal = keys[counts == count] if extra else keys[:0]
        if extra < len(equal):
            equal = equal[np.argpartition(order(equal), extra)[:extra]]
        return np.sort(np.concatenate([keys[counts > count], equal]))

    def hottest(self, n: int) -> tuple[Ints, Ints]:
        """The `n` keys used most and their counts, hottest first."""
        classes = self.histogram()
        if n < 1 or len(classes.counts) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        reached = int(np.searchsorted(np.cumsum(classes.keys), n))
        keys, counts = self.above(int(classes.counts[min(reached, len(classes.counts) - 1)]))
        return keys[:n], counts[:n]

    def histogram(self) -> Histogram:
        """The kept keys by count."""
        return Histogram(*self._native.classes())

    def curve(self) -> Curve:
        """The share of accesses that the hottest keys take together; where counts are not exact, at least that."""
        classes = self.histogram()
        taken = np.cumsum(classes.counts * classes.keys)
        return Curve(np.cumsum(classes.keys), taken / max(self.total, 1))

    def halved(self) -> KeyCounts:
        """Half of every count, so that what was counted weighs half of what comes; keys below 1 are dropped.

        Halves are rounded down, which `error` says; `total` keeps half of all accesses.
        """
        keys, counts = self._native.above(2)
        out = KeyCounts(self.limit)
        out._native.merge(keys, counts // 2, self.total // 2, (self.error + 2) // 2, self._native.registers())
        return out

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All there is to know, as arrays that depend on the counts alone; `of_arrays` takes them back."""
        keys, counts = self._native.above(1)
        by = np.argsort(keys)
        about = np.array([self.limit, self.total, self.error], np.int64)
        return {"keys": keys[by], "counts": counts[by], "about": about, "registers": self._native.registers()}

    @staticmethod
    def of_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> KeyCounts:
        """Counts as `arrays` gave them."""
        limit, total, error = arrays["about"].tolist()
        out = KeyCounts(limit)
        out._native.merge(_ints(arrays["keys"]), _ints(arrays["counts"]), total, error, arrays["registers"])
        return out

    def save(self, path: Path | str) -> None:
        """Writes one Parquet file, whole or not at all."""
        path = Path(path)
        keys, counts = self._native.above(1)
        by = np.argsort(keys)
        about = {
            "format": _FORMAT,
            "limit": str(self.limit),
            "total": str(self.total),
            "error": str(self.error),
            "registers": base64.b64encode(self._native.registers().tobytes()).decode(),
        }
        table = pa.table({"key": keys[by], "count": counts[by]}).replace_schema_metadata(about)
        with replacing(path, "The counts") as beside:
            pq.write_table(
                table,
                beside,
                compression="zstd",
                use_dictionary=False,
                column_encoding={"key": "DELTA_BINARY_PACKED", "count": "DELTA_BINARY_PACKED"},
            )

    @staticmethod
    def load(path: Path | str, digest: str | None = None) -> KeyCounts:
        """Counts as `save` wrote them; raises `DataError` for a file that is something else, or not of that SHA-256."""
        try:
            table = pq.read_table(pa.BufferReader(read_whole(Path(path), digest)))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"The counts {path} cannot be read: {error}.") from None
        try:
            about = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if k != b"ARROW:schema"}
            if about.get("format") != _FORMAT:
                raise DataError(f"{path} does not hold counts: its format is not {_FORMAT}.")
            keys, counts = (table.column(name).to_numpy() for name in ("key", "count"))
            out = KeyCounts(int(about["limit"]))
            registers = np.frombuffer(base64.b64decode(about["registers"]), np.uint8)
            out._native.merge(_ints(keys), _ints(counts), int(about["total"]), int(about["error"]), registers)
        except (KeyError, ValueError, TypeError, OverflowError, SettingsError) as error:
            raise DataError(f"The counts {path} were altered: {error}. Make them again.") from None
        if out.kept != len(table) or int(counts.sum()) > out.total or (out.exact and int(counts.sum()) < out.total):
            raise DataError(f"The counts {path} were altered: keys and total do not agree. Make them again.")
        return out

    def __repr__(self) -> str:
        about = "exact" if self.exact else f"too low by at most {self.error:,}"
        return f"KeyCounts({self.total:,} accesses, {self.distinct:,} keys, {about})"


def order(keys: Ints) -> npt.NDArray[np.uint64]:
    """Where a key stands among keys of the same count: random to look at, the same everywhere."""
    return _native.hash_keys(_ints(keys))


def _ints(values: Ints) -> Ints:
    return np.ascontiguousarray(values, np.int64)
