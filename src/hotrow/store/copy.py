"""`Changes`: snapshots on their way into a read-only copy of tables, checked and mapped before anything is touched.

Who only reads needs neither optimizer state nor use counts: a row of a copy takes its values and 26 to 30 bytes,
where the trainer's takes its optimizer state besides. A copy that stands at one snapshot of a chain becomes a later one
by the changes since then: keys that were erased go, rows that changed are written over. Applying costs memory for none
of it, for files are read where they are mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotrow.errors import CheckpointError
from hotrow.store.optimizers import SGD
from hotrow.store.snapshot import read_manifest, verify
from hotrow.store.store import Columns
from hotrow.table import Eviction, Table
from hotrow.tiers.router import Router


def read_only(table: Table) -> Table:
    """The table without what only training needs; a row past its `ttl` still reads as one that is not there."""
    ttl = None if table.eviction is None else table.eviction.ttl
    eviction = None if ttl is None else Eviction(ttl=ttl)
    return table.model_copy(update={"optimizer": SGD(), "admission": None, "eviction": eviction})


def after(folders: Sequence[Path], snapshot: str) -> list[Path] | None:
    """Those of a chain's snapshots that come after one of them; None if that one is not on the chain."""
    ids = [read_manifest(folder)["id"] for folder in folders]
    return list(folders[ids.index(snapshot) + 1 :]) if snapshot in ids else None


class Changes:
    """What some snapshots of a chain, one after the other, erase and write."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._snapshots = [_open(folder, verify(folder)) for folder in folders]

    def apply(self, router: Router) -> None:
        """Makes the router's tables those of the last snapshot."""
        for erased, rows in self._snapshots:
            for name, keys in erased:  # first, for a key erased on one tier may have a row on another
                for tier, parts in router.route([name], [keys], [0]):
                    tier.stores()[name].erase(parts[0].keys)
            for name, file in rows:
                for i in range(file.num_record_batches):
                    router.give(name, _columns(file.get_batch(i)))


def _columns(rows: pa.RecordBatch) -> Columns:
    """Rows as a store takes them, without state and counts."""
    zeros = np.zeros(len(rows), np.uint32)
    return {
        "keys": rows.column("key").to_numpy(),
        "values": np.asarray(rows.column("values").flatten().to_numpy(zero_copy_only=False)),
        "state": np.empty(0, np.float32),
        "clocks": zeros,
        "uses": zeros,
        "last": rows.column("last_used").to_numpy(),
    }


_Opened = tuple[list[tuple[str, np.ndarray[Any, Any]]], list[tuple[str, Any]]]
"""The erased keys of tables, and their rows as Arrow files that are mapped."""


def _open(folder: Path, manifest: dict[str, Any]) -> _Opened:
    erased, rows = [], []
    try:
        for said in manifest["tables"]:
            if "erased" in said:
                with pa.ipc.open_file(pa.memory_map(str(folder / said["erased"]["file"]))) as file:
                    erased.append((said["name"], file.read_all().column("erased").to_numpy()))
            rows.append((said["name"], pa.ipc.open_file(pa.memory_map(str(folder / said["rows"]["file"])))))
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from None
    return erased, rows
