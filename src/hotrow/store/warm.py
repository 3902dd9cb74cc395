"""`take_rows`: rows of another run's snapshot to begin with, for the tables that both have with one name and dim.

Values are taken in whatever dtype the table has here. The optimizer's state and the clocks come along where the
optimizer is the same, but for Adam's: its moments go with a count of steps, which begins anew. Rows count as used last
before the first step, and admission counts anew. Where the rows lived there and live here does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotrow.peers import Peers
from hotrow.store.snapshot import checked, fill, read_manifest
from hotrow.store.store import Columns
from hotrow.table import Table
from hotrow.tiers.router import Router


def compare(folder: Path, tables: Sequence[Table]) -> dict[str, str]:
    """For each table here and there a sentence that begins with what becomes of it: taken, fresh or left."""
    stored = {said["name"]: said for said in read_manifest(folder)["tables"]}
    found = {table.name: _compared(table, stored.get(table.name)) for table in tables}
    return found | {name: "left: this run has no such table" for name in stored if name not in found}


def take_rows(folder: Path, router: Router, tables: Sequence[Table], peers: Peers) -> None:
    """Gives the rows of all tables that `compare` calls taken to the router's tiers, which have none yet."""
    folders, manifests = checked(folder, peers, lambda manifest: None)
    stored = {said["name"] for said in manifests[-1]["tables"]}
    wanted = {table.name: table for table in tables if table.name in stored}
    wanted = {
        name: table
        for name, table in wanted.items()
        if all(said["dim"] == table.dim for said in manifests[-1]["tables"] if said["name"] == name)
    }
    fill(folders, manifests, router, wanted, lambda said, columns: _as_here(said, columns, wanted[said["name"]]))
    peers.agree("taken", "")  # nobody reads a row before who gives it has


def _compared(table: Table, said: Mapping[str, Any] | None) -> str:
    if said is None:
        return "fresh: there is no such table there"
    if said["dim"] != table.dim:
        return f"fresh: its rows have dim {table.dim} here and {said['dim']} there"
    return f"taken, {_state_in_words(table, said['optimizer'])}"


def _state_in_words(table: Table, optimizer: str) -> str:
    if _keeps_state(table, optimizer):
        return "with the optimizer's state"
    if optimizer == table.optimizer.name:
        return "without the moments of adam, whose steps begin anew"
    return f"without the optimizer's state: it is {table.optimizer.name} here and was {optimizer} there"


def _keeps_state(table: Table, optimizer: str) -> bool:
    return optimizer == table.optimizer.name != "adam"


def _as_here(said: Mapping[str, Any], columns: Columns, table: Table) -> Columns:
    """Rows as the table has them here."""
    count = len(columns["keys"])
    found = {**columns, "values": _values(columns["values"], said["dtype"], table.dtype)}
    found["last"] = np.zeros_like(columns["last"])
    if not _keeps_state(table, said["optimizer"]):
        size = count * table.optimizer.state_dim(table.dim)
        found["state"] = np.full(size, getattr(table.optimizer, "initial", 0.0), np.float32)
        found["clocks"] = np.zeros_like(columns["clocks"])
    return found


def _values(values: np.ndarray[Any, Any], was: str, now: str) -> np.ndarray[Any, Any]:
    if was == now:
        return values
    if now == "float32":
        return (values.astype(np.uint32) << 16).view(np.float32)
    rounded = torch.from_numpy(np.array(values, np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)
