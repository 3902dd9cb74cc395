"""A plan: which rows live on which tier.

Per table an ordered list of `Share`s, each a tier and the keys it holds; the last one of a table names no keys and
takes every key that no other names, seen or not. The plain plan puts everything on one tier.

A saved plan is one Arrow file: a record batch of sorted keys for each share that names some, and the rest as JSON
in its metadata, with a checksum of each batch and, since version 2, of itself. A plan made for a budget remembers the
bytes a row was counted with, so that it is refused for tables whose rows have become larger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from hotrow.errors import DataError, SettingsError, nearest
from hotrow.files import replacing
from hotrow.sealed import to_text, unsealed
from hotrow.settings import Settings, parse
from hotrow.table import Table

INDEX_BYTES = 16
"""What a row costs beside its values and optimizer state: its key (8), its slot (4) and its clock (4)."""

_FORMAT = "hotrow-plan"
_VERSION = 2
_KEYS = pa.schema({"key": pa.int64()})


def row_bytes(table: Table, index: int = INDEX_BYTES) -> int:
    """The memory one row of `table` takes on a tier that holds it: values, optimizer state and `index`."""
    width = {"float32": 4, "bfloat16": 2}[table.dtype]
    return table.dim * width + 4 * table.optimizer.state_dim(table.dim) + index


@dataclass(frozen=True)
class Share:
    """The keys of one table that one tier holds; None: all that no earlier share of the table names."""

    tier: str
    keys: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Plan:
    """For each table its shares, hottest first. `facts` is free: what its maker knows of it."""

    shares: dict[str, tuple[Share, ...]]
    row_bytes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for table, shares in self.shares.items():
            if not shares or shares[-1].keys is not None:
                raise SettingsError(f"Plan for table {table}: the last share must take the keys no other names.")
            if len({s.tier for s in shares}) < len(shares):
                raise SettingsError(f"Plan for table {table}: a tier stands twice; give it one share.")
            if any(s.keys is None for s in shares[:-1]):
                raise SettingsError(f"Plan for table {table}: only the last share may leave its keys open.")

    @staticmethod
    def all_on(tier: str, tables: Sequence[Table]) -> Plan:
        """Every row of every table on one tier."""
        return Plan({table.name: (Share(tier),) for table in tables})

    def keys_on(self, tier: str) -> dict[str, npt.NDArray[np.int64]]:
        """For each table that has some the keys that `tier` holds: those it names and no share before it does."""
        found = {}
        for table, shares in self.shares.items():
            for i, share in enumerate(shares):
                if share.tier == tier and share.keys is not None:
                    before = [s.keys for s in shares[:i] if s.keys is not None]
                    found[table] = np.setdiff1d(share.keys, np.concatenate(before)) if before else share.keys
        return found

    def check(self, tables: Sequence[Table]) -> None:
        """Raises `SettingsError` unless this is a plan for exactly these tables, with rows no larger than planned."""
        known = [table.name for table in tables]
        for name in self.shares:
            if name not in known:
                raise SettingsError(
                    f'The plan is for other tables: it has "{name}", which there is not.{nearest(name, known)}'
                )
        for table in tables:
            if table.name not in self.shares:
                raise SettingsError(f'The plan is for other tables: it says nothing of "{table.name}". Plan again.')
            counted = self.row_bytes.get(table.name)
            if counted is not None and row_bytes(table) > counted:
                raise SettingsError(
                    f"The plan counted {counted} bytes a row of table {table.name}, but with dim {table.dim}, "
                    f"{table.dtype} and {table.optimizer.name} a row takes {row_bytes(table)}: it would not keep its "
                    f"budget. Plan again with --run and this run file."
                )

    def save(self, path: Path | str, overwrite: bool = False) -> None:
        """Writes one file, whole or not at all."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise DataError(f"{path} is already there. Name another file, or replace it with --overwrite.")
        if path.exists():
            Plan.load(path)  # only a plan is replaced: a mistyped path costs nothing
        batches: list[pa.RecordBatch] = []
        said = {name: [_said(share, batches) for share in shares] for name, shares in self.shares.items()}
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "tables": said,
            "row_bytes": self.row_bytes,
            "facts": self.facts,
        }
        schema = _KEYS.with_metadata({"plan": to_text(about, indent=None)})
        with replacing(path, "The plan") as beside:
            path.parent.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)

    @staticmethod
    def load(path: Path | str) -> Plan:
        """A plan as `save` wrote it; raises `DataError` for a file that is missing, altered or something else."""
        path = Path(path)
        try:
            with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
                about = json.loads((reader.schema.metadata or {}).get(b"plan", b"null"))
                arrays = [_keys(reader.get_batch(i)) for i in range(reader.num_record_batches)]
        except FileNotFoundError:
            raise DataError(f"There is no plan {path}. Make one with: hotrow plan DATA --memory 512MiB") from None
        except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
            raise DataError(f"The plan {path} cannot be read: {error}. Plan again.") from None
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise DataError(f"{path} is not a plan: its format is not {_FORMAT}.")
        if about.get("version") not in (1, _VERSION):
            raise DataError(
                f"The plan {path} is of format version {about.get('version')}, this Hotrow reads versions 1 to "
                f"{_VERSION}. Plan again, or use the Hotrow that wrote it."
            )
        try:
            said = parse(_Saved, unsealed(about) if about["version"] == _VERSION else about, "the plan")
            shares = {name: tuple(_share(share, arrays) for share in listed) for name, listed in said.tables.items()}
            return Plan(shares, dict(said.row_bytes), dict(said.facts))
        except (IndexError, ValueError, SettingsError) as error:
            raise DataError(f"The plan {path} was altered: {str(error).rstrip('.')}. Plan again.") from None


class _SavedShare(Settings):
    tier: str
    batch: int | None = Field(None, ge=0)
    keys: int | None = None
    sha256: str | None = None


class _Saved(Settings):
    """The JSON of a plan."""

    format: str
    version: int
    tables: dict[str, tuple[_SavedShare, ...]]
    row_bytes: dict[str, int]
    facts: dict[str, Any]


def _keys(batch: pa.RecordBatch) -> pa.Array:
    batch.validate(full=True)  # Arrow takes offsets and lengths as they stand
    if batch.schema != _KEYS or batch.column(0).null_count:
        raise ValueError("it holds something else than keys")
    return batch.column(0)


def _said(share: Share, batches: list[pa.RecordBatch]) -> Mapping[str, Any]:
    """What the JSON says of a share; its keys go to `batches`."""
    if share.keys is None:
        return {"tier": share.tier}
    keys = np.unique(share.keys)
    batches.append(pa.record_batch({"key": keys}, schema=_KEYS))
    return {"tier": share.tier, "batch": len(batches) - 1, "keys": len(keys), "sha256": _sha256(keys)}


def _share(said: _SavedShare, arrays: Sequence[pa.Array]) -> Share:
    if said.batch is None:
        return Share(said.tier)
    keys = arrays[said.batch].to_numpy()
    if len(keys) != said.keys or _sha256(keys) != said.sha256:
        raise ValueError(f"the keys of tier {said.tier} are not those that were planned")
    return Share(said.tier, keys)


def _sha256(keys: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(keys, "<i8").tobytes()).hexdigest()
