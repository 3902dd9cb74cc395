"""A snapshot that several ranks write together: each the rows it gives, in a folder of its own below one manifest.

    rows/
      rank-00000/000-item.arrow ...
      rank-00001/...
      manifest.json        by rank 0, last: names every rank's files

All ranks must see the folder. Nothing of it is there until every piece is: ranks write beside its place and tell
rank 0, who writes the manifest, renames the folder and tells them. If one of them fails, or is gone, all of them raise
and the snapshot counts as not taken. The result is like any other: it restores on any plan and any number of ranks.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hotrow.errors import CheckpointError, HotrowError, MissedError, NotFiniteError, ServiceError
from hotrow.files import flush, write_text
from hotrow.peers import Peers
from hotrow.sealed import to_text
from hotrow.store.snapshot import Snapshot
from hotrow.store.store import Rows

_FILES = ("rows", "erased", "sketch")
_ERRORS: dict[str, type[HotrowError]] = {"missed": MissedError, "not finite": NotFiniteError}


class RankSnapshot(Snapshot):
    """One moment of the stores of all ranks. Every rank makes one at the same step, with the same folder."""

    def __init__(
        self,
        folder: Path,
        stores: Sequence[tuple[str, Rows]],
        steps: int,
        seed: int,
        base: Path | None,
        peers: Peers,
    ) -> None:
        self._peers = peers
        known = all(store.tracks_erased() for _, store in stores)
        said = [json.loads(text) for text in peers.agree("snapshot", json.dumps([uuid.uuid4().hex, known, steps]))]
        if len({step for _, _, step in said}) > 1:
            raise CheckpointError(
                f"The ranks are at different steps ({[step for _, _, step in said]}): no common moment."
            )
        failure = ""
        try:
            super().__init__(folder, stores, steps, seed, base if all(k for _, k, _ in said) else None, id=said[0][0])
        except HotrowError as error:
            failure = str(error)
        if any(failures := peers.agree("snapshot", failure)):
            self.abort()
            raise CheckpointError(next(filter(None, failures)))

    def write(self) -> None:
        """Writes this rank's piece, and returns when the whole is there; raises on all ranks if it cannot be."""
        topic, rank, kept = f"snapshot/{self.id}", self._peers.world.rank, False
        try:
            try:
                said: dict[str, Any] = {"tables": self._write_piece(self._beside / _name(rank))}
            except OSError as error:
                said = {"tables": [], "failure": f"rank {rank} could not write its piece: {error.strerror or error}"}
            except NotFiniteError as error:
                said = {"tables": [], "failure": str(error).rstrip("."), "kind": "not finite"}
            except ServiceError as error:
                said = {"tables": [], "failure": str(error).rstrip("."), "kind": "missed"}
            self._peers.tell(f"{topic}/piece", json.dumps(said))
            if rank == 0:
                self._gather(topic)
            failure, kind = json.loads(self._peers.hear(f"{topic}/whole", [0])[0])
            self._peers.forget(f"{topic}/piece")
            if failure:
                raise _ERRORS.get(kind, CheckpointError)(
                    f"The snapshot {self.folder} could not be written: {failure}. Nothing of it is left."
                )
            kept = True
        finally:
            self._end(kept)
            if not kept:
                shutil.rmtree(self._beside if rank == 0 else self._beside / _name(rank), ignore_errors=True)

    def _write_piece(self, folder: Path) -> list[dict[str, Any]]:
        """The files of one rank, and what the manifest says of them. Of tables without rows only rank 0's are kept."""
        folder.mkdir(parents=True)
        tables = []
        for i, (name, store, cut) in enumerate(self._cuts):
            said = self._write_store(folder, f"{i:03d}-{quote(name, safe='')}", store.table, cut)
            files = [said[what] for what in _FILES if what in said]
            if self._peers.world.rank and not any(file["count"] for file in files):
                (folder / said["rows"]["file"]).unlink()
                continue
            for file in files:
                file["file"] = f"{folder.name}/{file['file']}"
            tables.append(said)
        flush(folder)
        return tables

    def _gather(self, topic: str) -> None:
        """Rank 0: waits for all pieces, finishes the folder, and tells how it went."""
        failure, kind = "rank 0 stopped", ""
        try:
            pieces = [json.loads(text) for text in self._peers.hear(f"{topic}/piece", range(self._peers.world.size))]
            failure = next((piece["failure"] for piece in pieces if "failure" in piece), "") or self._missing(pieces)
            kind = next((piece["kind"] for piece in pieces if "kind" in piece), "")
            if not failure:
                self._manifest["tables"] = [said for piece in pieces for said in piece["tables"]]
                write_text(self._beside / "manifest.json", to_text(self._manifest))
                self._beside.rename(self.folder)
                flush(self.folder.parent)
        except OSError as error:
            failure = f"rank 0 could not finish it: {error.strerror or error}"
        finally:
            self._peers.tell(f"{topic}/whole", json.dumps([failure, kind]))

    def _missing(self, pieces: Sequence[dict[str, Any]]) -> str:
        for rank, piece in enumerate(pieces):
            for said in piece["tables"]:
                for file in (said[what] for what in _FILES if what in said):
                    path = self._beside / file["file"]
                    if not path.is_file() or path.stat().st_size != file["bytes"]:
                        return (
                            f"rank 0 does not see what rank {rank} wrote ({path.name}); "
                            f"all ranks need a folder on one file system"
                        )
        return ""


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"
