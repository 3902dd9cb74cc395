"""`Profile`: how much samples repeat each other and how often each key is used, saved beside a data set.

    profile.json             counts of repetition, whose they are, and checksums of all files
    changes.npz              the sample of changes
    keys-000-user.parquet    how often each key of a feature is used; a table's counts are those of its features

`prepare` makes it in the pass that writes the train split, a share for each task, and merges them. A profile
bears the fingerprint of the files it was made from, so one that was copied from, or left by, another data set is
told apart. `Profile.read` makes one of a data set that has none. Loading compares every file with its checksum before
it is parsed; profiles of version 1 had none.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from hotrow.data.dedup import session_begins
from hotrow.data.folder import NewFolder
from hotrow.data.schema import MISSING, Column, Schema
from hotrow.errors import DataError, SettingsError, nearest
from hotrow.files import flush, read_whole, sha256, write_text
from hotrow.profile.changes import Changes
from hotrow.profile.counts import LIMIT, KeyCounts
from hotrow.profile.repetition import ColumnCounts, GroupCounts, Repetition
from hotrow.sealed import read_object, to_text, unsealed
from hotrow.settings import Settings, parse

if TYPE_CHECKING:
    from hotrow.data.dataset import DataSet
    from hotrow.data.parts import Part

PROFILE = "profile"
"""The folder in a data set that holds the profile of its train split."""

_FILE = "profile.json"
_CHANGES = "changes.npz"
_FORMAT = "hotrow-profile"
_VERSION = 2
_ONLY_READ = (errno.EACCES, errno.EPERM, errno.EROFS)


class _KeysFile(Settings):
    file: str
    table: str
    sha256: str | None = None


class _Saved(Settings):
    """`profile.json`."""

    format: str = _FORMAT
    version: int = _VERSION
    fingerprint: str = ""
    samples: int = Field(ge=0)
    session_lengths: dict[int, int]
    columns: dict[str, ColumnCounts]
    groups: dict[str, GroupCounts]
    halvings: int = Field(ge=0, lt=64)
    changes_sha256: str | None = None
    keys: dict[str, _KeysFile]


@dataclass(frozen=True)
class Profile:
    """Of some samples: `keys` by feature, and the table each feature looks up."""

    repetition: Repetition
    keys: dict[str, KeyCounts]
    table_of: dict[str, str]

    @staticmethod
    def of(samples: pa.Table, schema: Schema, *, limit: int = LIMIT) -> Profile:
        """Of flat, clustered samples of whole sessions; `limit` is how many distinct keys a feature's counts hold."""
        keys = {}
        for feature in schema.features:
            keys[feature.name] = KeyCounts(limit)
            for chunk in samples.column(feature.column).chunks:
                keys[feature.name].add(_keys(chunk, feature))
        return Profile(Repetition.of(samples, schema), keys, {f.name: f.table for f in schema.features})

    @staticmethod
    def merged(parts: Iterable[Profile]) -> Profile:
        """One profile of all parts, which are taken one after the other."""
        found: Profile | None = None
        for part in parts:
            if found is None:
                keys = {name: KeyCounts.merged([counts], counts.limit) for name, counts in part.keys.items()}
                found = Profile(part.repetition, keys, part.table_of)
                continue
            if part.table_of != found.table_of:
                raise DataError("Profiles can only be merged if they are of the same features and tables.")
            for name, counts in part.keys.items():
                found.keys[name].merge(counts)
            found = Profile(found.repetition.merge(part.repetition), found.keys, found.table_of)
        if found is None:
            raise DataError("There is no profile to merge.")
        return found

    def merge(self, other: Profile) -> Profile:
        """Of the samples of both."""
        return Profile.merged([self, other])

    @property
    def samples(self) -> int:
        return self.repetition.samples

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that are looked up."""
        return tuple(dict.fromkeys(self.table_of.values()))

    def table(self, name: str) -> KeyCounts:
        """How often each key of a table is used, by all its features together."""
        if name not in self.tables:
            raise SettingsError(f'The profile has no table "{name}".{nearest(name, self.tables)}')
        features = [self.keys[feature] for feature, table in self.table_of.items() if table == name]
        return features[0] if len(features) == 1 else KeyCounts.merged(features, max(c.limit for c in features))

    def save(self, folder: Path | str, fingerprint: str = "") -> None:
        """Writes the folder, whole or not at all; a profile that is there already is replaced."""
        found = self.repetition
        with NewFolder(folder, _FILE, overwrite=True) as new:
            keys = {}
            for at, (name, counts) in enumerate(self.keys.items()):
                file = new.work / f"keys-{at:03d}-{_safe(name)}.parquet"
                counts.save(file)
                keys[name] = _KeysFile(file=file.name, table=self.table_of[name], sha256=sha256(file))
            np.savez(new.work / _CHANGES, hashes=found.changes.hashes, bits=found.changes.bits)
            flush(new.work / _CHANGES)
            saved = _Saved(
                fingerprint=fingerprint,
                samples=found.samples,
                session_lengths=dict(found.session_lengths),
                columns=dict(found.columns),
                groups=dict(found.groups),
                halvings=found.changes.halvings,
                changes_sha256=sha256(new.work / _CHANGES),
                keys=keys,
            )
            write_text(new.work / _FILE, to_text(json.loads(saved.model_dump_json())))

    @staticmethod
    def load(folder: Path | str, fingerprint: str | None = None) -> Profile:
        """What `save` wrote; `DataError` if it is damaged or, with `fingerprint`, of another data set."""
        folder = Path(folder)
        saved = _read(folder / _FILE)
        if fingerprint is not None and saved.fingerprint != fingerprint:
            raise DataError(f"The profile {folder} is of another data set. Delete it, and run: hotrow profile DATA")
        changes = _read_changes(folder / _CHANGES, saved)
        repetition = Repetition(saved.samples, saved.session_lengths, saved.columns, saved.groups, changes)
        keys = {name: KeyCounts.load(folder / entry.file, entry.sha256) for name, entry in saved.keys.items()}
        return Profile(repetition, keys, {name: entry.table for name, entry in saved.keys.items()})

    @staticmethod
    def read(dataset: DataSet, split: str = "train", progress: Callable[[int], None] | None = None) -> Profile:
        """Made by reading a split; `progress` gets the samples read."""
        if not dataset.samples(split):
            raise DataError(f'{dataset.path}: the split "{split}" has no samples to make a profile of.')
        return Profile.merged(_shares(dataset, split, progress))

    @staticmethod
    def of_data_set(
        dataset: DataSet, split: str = "train", progress: Callable[[int], None] | None = None
    ) -> tuple[Profile, bool]:
        """The one saved beside the data set and True; else one made by reading, saved if it can be, and False."""
        folder, whose = dataset.path / PROFILE, fingerprint(dataset.parts(split))
        if (folder / _FILE).is_file() and _read(folder / _FILE).fingerprint == whose:
            return Profile.load(folder), True
        made = Profile.read(dataset, split, progress)
        if split == "train":
            try:
                made.save(folder, whose)
            except DataError as error:
                if getattr(error.__cause__, "errno", None) not in _ONLY_READ:
                    raise
        return made, False


def fingerprint(parts: Iterable[Part]) -> str:
    """Of a split's files, as the manifest knows them."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.model_dump_json(exclude={"files": {"__all__": {"checks"}}}).encode())
    return whole.hexdigest()


def _keys(chunk: pa.Array, feature: Column) -> Any:
    values = chunk if feature.kind == "key" else chunk.flatten()
    return pc.fill_null(values, MISSING).to_numpy(zero_copy_only=False)


def _shares(dataset: DataSet, split: str, progress: Callable[[int], None] | None) -> Iterator[Profile]:
    done = 0
    for table in _whole_sessions(dataset.flat(split), dataset.schema):
        yield Profile.of(table, dataset.schema)
        done += len(table)
        if progress is not None:
            progress(done)


def _whole_sessions(tables: Iterable[pa.Table], schema: Schema) -> Iterator[pa.Table]:
    """The same samples; a session that goes on in the next table waits for it."""
    waiting: pa.Table | None = None
    for table in tables:
        table = table if waiting is None else pa.concat_tables([waiting, table])
        if schema.session is None or not len(table):
            waiting = None
            yield table
            continue
        last = int(np.flatnonzero(session_begins(table.column(schema.session).to_numpy()))[-1])
        waiting = table.slice(last)
        if last:
            yield table.slice(0, last)
    if waiting is not None and len(waiting):
        yield waiting


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:80]


def _read(path: Path) -> _Saved:
    data = read_object(path, "The profile")
    if data.get("format") != _FORMAT or data.get("version") not in (1, _VERSION):
        raise DataError(f"{path} is not a profile this Hotrow reads. Make it again with: hotrow profile DATA")
    try:
        return parse(_Saved, unsealed(data) if data["version"] == _VERSION else data, str(path))
    except SettingsError as error:
        raise DataError(str(error)) from None
    except ValueError as error:
        raise DataError(f"The profile {path} was altered: {error}. Delete the folder, and make it again.") from None


def _read_changes(path: Path, saved: _Saved) -> Changes:
    try:
        with np.load(io.BytesIO(read_whole(path, saved.changes_sha256)), allow_pickle=False) as arrays:
            hashes, bits = arrays["hashes"], arrays["bits"]
    except (OSError, KeyError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"The profile's {path} cannot be read: {error}. Delete the profile and make it again."
        ) from None
    shape = (len(saved.columns), -(-hashes.size // 8))
    if hashes.dtype != np.uint64 or hashes.ndim != 1 or bits.dtype != np.uint8 or bits.shape != shape:
        raise DataError(f"The profile's {path} does not fit its {_FILE}. Delete the folder, make it again.")
    return Changes(hashes, bits, saved.halvings)
