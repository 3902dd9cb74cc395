"""A folder that files are put into, as a log that grows.

Files are taken in the order of their names; one that comes later under an earlier name is taken when it comes. A file
must be there whole: written beside (a name that begins with a dot or an underscore, or has no known ending, is not
looked at) and renamed. No batch spans two files, so the last one of a file may be small.

The place in the log is the names of the files that are done and the number of samples taken of the one that is not. A
name is forgotten when its file is gone: who takes trained files away keeps checkpoints small.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from hotrow.data.convert import BadRows, convert
from hotrow.data.growing import Arrived, Follow, GrowingLog, check_same, clustered
from hotrow.data.schema import Schema
from hotrow.data.sources import Format, Source, find_source, kind_of
from hotrow.data.sources.source import EmptyFile
from hotrow.data.sources.tabular import SCHEMAS
from hotrow.data.sources.text import TEXT_ENDINGS, unpack
from hotrow.errors import DataError, SettingsError

_ENDINGS = (".parquet", *TEXT_ENDINGS)


class _Done(NamedTuple):
    """A file that has come to its end."""

    name: str
    bytes: int
    samples: int
    set_aside: int


class _Upto(NamedTuple):
    """A file and how many of its samples are taken, once the files in `done` are."""

    done: list[_Done]
    name: str
    samples: int


class FolderLog(GrowingLog):
    """The files of a folder."""

    def __init__(self, settings: Follow, schema: Schema, batch_size: int) -> None:
        super().__init__(schema, batch_size)
        self.folder = Path(settings.path)
        if not self.folder.is_dir():
            raise DataError(f"There is no folder {self.folder} to follow. Make it; files may come later.")
        self._settings = settings
        self._log = self._own_schema()
        self._done: dict[str, int] = {}  # the bytes that each file had
        self._file, self._samples = "", 0
        self._empty: set[str] = set()  # files that had nothing to train on, in this process
        self._altered: set[str] = set()
        self._rest: list[_Done] = []

    def arrived(self) -> bool:
        return bool(self._new(self._done))

    def read(self) -> Iterator[Arrived]:
        done: dict[str, int] = dict(self._done)
        first = (self._file, self._samples)
        ended: list[_Done] = []
        while new := self._new(done):
            if first[0] in new:  # the file that a checkpoint stands in the middle of
                new = {first[0]: new[first[0]], **new}
            for name, size in new.items():
                skipped = first[1] if name == first[0] else 0
                taken, bad = skipped, BadRows(self._settings.bad)
                held: pa.Table | None = None
                for samples in self._batches(name, skipped, bad):
                    if held is not None:
                        taken += len(held)
                        yield Arrived(clustered(held, self.schema), _Upto(ended, name, taken))
                        ended = []
                    held = samples
                count = taken + (0 if held is None else len(held))
                ended = [*ended, _Done(name, size, count, bad.skipped)]
                done[name] = size
                self.notes += bad.files
                if held is None:
                    self._empty.add(name)
                    continue
                yield Arrived(clustered(held, self.schema), _Upto(ended, "", 0))
                ended = []
        self._rest = ended

    def trained(self, arrived: Arrived) -> list[dict[str, Any]]:
        upto: _Upto = arrived.upto
        self._file, self._samples = upto.name, upto.samples
        return self._ended(upto.done)

    def rest(self) -> list[dict[str, Any]]:
        rest, self._rest = self._rest, []
        return self._ended(rest)

    def _ended(self, files: Sequence[_Done]) -> list[dict[str, Any]]:
        self._done |= {file.name: file.bytes for file in files}
        return [{"file": f.name, "samples": f.samples, "set_aside": f.set_aside} for f in files]

    def state(self) -> dict[str, Any]:
        there = {entry.name for entry in os.scandir(self.folder)}
        self._done = {name: size for name, size in self._done.items() if name in there}
        return {"done": self._done, "file": self._file, "samples": self._samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._done = dict(state.get("done", {}))
        self._file, self._samples = state.get("file", ""), state.get("samples", 0)
        if self._file and not (self.folder / self._file).is_file():
            raise DataError(
                f"{self.folder / self._file} is gone, and the checkpoint stands after {self._samples} of its samples. "
                f"Put it back; a file may be taken away when metrics.jsonl says that it was trained on."
            )

    def _new(self, done: Mapping[str, int]) -> dict[str, int]:
        """The files that are not done, by name, with their sizes."""
        found: dict[str, int] = {}
        for entry in os.scandir(self.folder):
            name = entry.name
            if name.startswith((".", "_")) or not name.endswith(_ENDINGS) or name in self._empty or not entry.is_file():
                continue
            size = entry.stat().st_size
            if name not in done:
                found[name] = size
            elif done[name] != size and name not in self._altered:
                self._altered.add(name)
                self.notes.append(
                    f"{self.folder / name} had {done[name]:,} bytes when it was trained on and has {size:,} now, which "
                    f"is not looked at. Write a file beside, rename it into the folder, and then leave it."
                )
        return dict(sorted(found.items()))

    def _batches(self, name: str, skipped: int, bad: BadRows) -> Iterator[pa.Table]:
        """The samples of a file after the first `skipped`, a batch at a time."""
        waiting: list[pa.RecordBatch] = []
        size = 0
        for rows in self._rows(name, bad):
            left = rows.slice(min(skipped, len(rows)))
            skipped -= len(rows) - len(left)
            waiting.append(left)
            size += len(left)
            if size >= self.batch_size:
                table = pa.Table.from_batches(waiting).combine_chunks()
                for at in range(0, size - self.batch_size + 1, self.batch_size):
                    yield table.slice(at, self.batch_size)
                rest = table.slice(size - size % self.batch_size)
                waiting, size = rest.to_batches(), len(rest)
        if size:
            yield pa.Table.from_batches(waiting).combine_chunks()

    def _rows(self, name: str, bad: BadRows) -> Iterator[pa.RecordBatch]:
        """The samples of a file as they are converted."""
        try:
            try:
                source = self._source(self.folder / name)
            except EmptyFile as error:
                bad.refuse_or_skip_file(str(error), 0, "empty file")
                return
            check_same(source.schema, self.schema, str(self.folder / name))
            if not source.usable(bad):
                return
            with tempfile.TemporaryDirectory() as folder:
                pieces = {str(f): unpack(f, Path(folder), "piece", lambda read: None) for f in source.packed}
                for part in source.slices(pieces):
                    for chunk in source.chunks(part, bad):
                        yield convert(chunk, source.schema, self.schema, bad)
        except FileNotFoundError:
            raise DataError(
                f"{self.folder / name} went away while it was read. Take a file away when it was trained on."
            ) from None

    def _source(self, file: Path) -> Source:
        return source_of(file, self._settings.format, self._log, self.schema)

    def _own_schema(self) -> Schema | None:
        """What the log's columns mean, where somebody says it."""
        given = self._settings.columns or own_schema(self.folder)
        if given is None:
            return None
        log = Schema.read(given)
        check_same(log, self.schema, str(given))
        return log


def own_schema(folder: Path) -> Path | None:
    """The schema that a folder brings."""
    return next((folder / name for name in SCHEMAS if (folder / name).is_file()), None)


def source_of(file: Path, form: Format, log: Schema | None, schema: Schema) -> Source:
    """One file of a log by itself, read as `log` says; if nobody says, by its kind, or as a data set has it."""
    kind = "table" if log is not None else form
    if kind == "auto":
        kind = kind_of(file, None)
    if kind == "events":
        raise SettingsError(
            f"{file} is a log of bare events, whose histories are made of all of it. Only `hotrow prepare` can make "
            f"them; give a log that brings each sample's history."
        )
    return find_source(file, kind, (log or schema) if kind == "table" else None).source()
