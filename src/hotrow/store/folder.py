"""A table's rows in a folder, so that they outlive the process: who may open it, and what for.

The folder holds `head` (settings, steps, what makes rows whole again) and the records in files, all mapped into memory.
Killing the process at any instruction loses nothing, for the kernel keeps what was stored; stopping the machine does,
for nothing is flushed: that is what snapshots are for. So a folder in memory (/dev/shm) is as safe as one on a disk.
It is faster too, for rows lie in huge pages there and nobody writes them back: reading costs what it costs without a
folder, an update of a row 12 ns more; on a disk both cost half as much again, or more.

What was altered in the files is found when the folder is opened, and refused. Head and journal have sums that are right
at any time. A row has one from the moment the store is closed, or a snapshot comes by it, until it is next fetched or
changed. So after a kill, rows used since the last snapshot are taken as they stand, and so are the counts for
admission; that no row is missing is known all the same. Sums made at every update would make it 15 to 40 percent
slower; to mark a row's sum as void costs an update 4 percent at dim 64 (2 ns a row, row-wise Adagrad), and a whole push
to a shard 1 or less (`tests/checksum_cost.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotrow import _native
from hotrow.errors import StoreError
from hotrow.locks import Lock
from hotrow.table import ByCount, Table


def lock_rows(folder: Path) -> Lock:
    """Keeps a folder of rows, or of a journal, for this process."""
    return Lock(folder, "rows", "Two may not write the same rows; stop the other, or give each a folder of its own.")


def open_rows(folder: Path, table: Table, seed: int, settings: dict[str, Any], fresh: bool = False) -> _native.Store:
    """The rows in a folder that is locked: those that are there, or none if it is new or `fresh`."""
    about = _about(table, seed)
    is_new = not (folder / "head").exists()
    if is_new and any(folder.glob("rows-*")):
        raise StoreError(
            f"{folder} holds rows, but lacks its file head, without which they cannot be read. Put it back, or restore "
            f"a checkpoint into an empty folder."
        )
    if not (is_new or fresh):
        _check(folder, about)
    store = _native.Store(**settings, folder=str(folder), folder_settings=json.dumps(about), fresh=fresh or is_new)
    _remove_earlier(folder, store.life)
    return store


def _about(table: Table, seed: int) -> dict[str, Any]:
    """What must be the same when a folder is opened again; rates, schedules and eviction may change."""
    sketch = table.admission.bytes // 2 * 2 if isinstance(table.admission, ByCount) else 0
    return {
        "name": table.name,
        "dim": table.dim,
        "dtype": table.dtype,
        "optimizer": table.optimizer.name,
        "seed": seed,
        "init": table.init.model_dump(),
        "bytes of the admission sketch": sketch,
    }


def _check(folder: Path, about: dict[str, Any]) -> None:
    there = json.loads(_native.folder_settings(str(folder)))
    for what, here in about.items():
        if there.get(what) != here:
            raise StoreError(
                f"The rows in {folder} have {what} {there.get(what)}, but table {about['name']} has {here}. "
                f"Give the table's own folder, or an empty one."
            )


def _remove_earlier(folder: Path, life: int) -> None:
    """Files of rows that were cleared. Whoever still reads them keeps them until done."""
    for path in folder.glob("rows-*"):
        if not path.name.startswith(f"rows-{life}-"):
            path.unlink()
