"""Checkpoints of a run: a folder each, complete or not there at all, in open formats, nothing pickled.

    step-00001200/
      rows/           snapshot of the tables, with a manifest of its own (see `Embeddings.snapshot`)
      dense.npz       dense weights, dense optimizer state, random generators: plain arrays under names
      trainer.json    position in the data, early stopping, counters
      manifest.json   written last: size and sha256 of the files above, and its own checksum

A folder is written beside its place under a hidden name and renamed, so whatever is killed, a folder with a
`step-` name is whole. The cut is made in the caller's thread and copies the dense part; writing goes on in
another thread while training does. Row files are hashed once, by the snapshot; here only its manifest is.

Several ranks cut and write the rows together, each its own, into a folder that all of them see; the rest is the first
rank's. A checkpoint says nothing of ranks, shards or tiers: any number of any of them can go on from it.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hotrow.errors import CheckpointError, MissedError, NotFiniteError, SettingsError
from hotrow.files import flush, sha256, write_text
from hotrow.peers import Peers
from hotrow.sealed import read_object, to_text, unsealed
from hotrow.settings import Settings, parse
from hotrow.train.finite import left
from hotrow.world import World

FORMAT = "hotrow-checkpoint"
VERSION = 2
"""Manifests of version 1 had no checksum of their own."""


class Snapshot(Protocol):
    def write(self) -> None: ...
    def abort(self) -> None: ...


class Snapshots(Protocol):
    """What a checkpoint needs of `Embeddings`."""

    def snapshot(self, folder: Path, base: Path | None = None) -> Snapshot: ...


class Checkpoint:
    """One checkpoint on disk, its own files checked against the manifest when it is opened."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        for name, said in self.manifest["files"].items():
            _check(self.folder / name, said)
        self.state: dict[str, Any] = json.loads((self.folder / "trainer.json").read_text())

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def rows(self) -> Path:
        """The snapshot of the tables."""
        return self.folder / "rows"

    def arrays(self) -> dict[str, Tensor]:
        """What was given to `Checkpoints.save`, under the same names."""
        path = self.folder / "dense.npz"
        try:
            with np.load(path, allow_pickle=False) as stored:
                return {name: torch.from_numpy(stored[name]) for name in stored.files}
        except (ValueError, BadZipFile) as error:
            raise CheckpointError(f"{path} does not hold plain arrays: {error}.") from None


class Checkpoints:
    """The checkpoints of one run: writes them, finds them, and takes old ones away."""

    def __init__(self, folder: Path, *, keep: int = 2, incremental: int = 0, peers: Peers | None = None) -> None:
        self.folder = folder
        self._peers = peers or Peers(World())
        self._keep = keep
        self._incremental = incremental
        self._chain: list[Path] = []  # the last full checkpoint of this process and the incremental ones on it
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.missed = ""  # why the last one was not written, if it can be taken again

    def all(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if (p / "manifest.json").is_file())

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self.all()
        return found[-1] if found else None

    def chosen(self) -> Path | None:
        """The checkpoint that the run stands for: its best where it is to stop early, else the newest."""
        while (latest := self.latest()) is not None:
            try:
                said = read_manifest(latest)["files"]["trainer.json"]
                _check(latest / "trainer.json", said)
                best = json.loads((latest / "trainer.json").read_text()).get("best_step")
            except (CheckpointError, OSError):
                if self.latest() == latest:
                    raise
                continue  # it was taken away while it was read
            kept = latest if best is None else self.at(best)
            return kept if (kept / "manifest.json").is_file() else latest
        return None

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def clean(self) -> None:
        """Removes what a killed process left unfinished."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in set(self.folder.glob("step-*")) - set(self.all()):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        arrays: Mapping[str, Tensor],
        state: Mapping[str, Any],
        embeddings: Snapshots,
        *,
        protect: int | None = None,
        done: Callable[[Path], None] | None = None,
    ) -> None:
        """Cuts a checkpoint now and writes it in the background; waits for one that is still being written.

        `arrays` must not change any more. `protect` is a step whose checkpoint is not taken away. `done` is
        called in the background with the finished folder. `wait()` and the next `save` raise what went wrong.
        """
        self.wait()
        self.missed = ""
        final = self.at(step)
        base = self._base(final)
        if base == final:
            return
        beside = self.folder / f".{final.name}"
        first = self._peers.world.rank == 0
        try:
            if first:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir()
            snapshot = embeddings.snapshot(beside / "rows", base / "rows" if base else None)
        except OSError as error:
            raise self._failed(step, error) from error

        def write() -> None:
            try:
                snapshot.write()
                if first:
                    self._write(beside, step, arrays, state, base)
                    beside.rename(final)
                    flush(self.folder)
                self._chain = [*self._chain, final] if base else [final]
                if first:
                    self._prune(protect)
            except BaseException as error:
                snapshot.abort()
                if first:
                    shutil.rmtree(beside, ignore_errors=True)
                self._chain = []  # the tables may count as changed only what came after the rows just removed
                if isinstance(error, MissedError):
                    self.missed = str(error)
                    return
                if isinstance(error, NotFiniteError):
                    error = NotFiniteError(f"{error} {left(self.latest())}")
                cause = error.__cause__ if isinstance(error, CheckpointError) else error
                self._error = self._failed(step, cause) if isinstance(cause, OSError) else error
            else:
                if done is not None:
                    done(final)

        thread = threading.Thread(target=write, name="hotrow-checkpoint")
        thread.start()
        self._thread = thread

    def _base(self, final: Path) -> Path | None:
        """What a new checkpoint stands on, as the first of several ranks knows it; itself if it is there already."""
        base = self._chain[-1] if 0 < len(self._chain) <= self._incremental else None
        if (final / "manifest.json").is_file():
            base = final
        name = self._peers.agree("checkpoint", "" if base is None else base.name)[0]
        return self.folder / name if name else None

    def wait(self) -> None:
        """Returns when nothing is being written; raises `CheckpointError` if the last one could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the background since the last look, without waiting."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(
        self,
        folder: Path,
        step: int,
        arrays: Mapping[str, Tensor],
        state: Mapping[str, Any],
        base: Path | None,
    ) -> None:
        with (folder / "dense.npz").open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in arrays.items()})  # type: ignore[arg-type]
        flush(folder / "dense.npz")
        write_text(folder / "trainer.json", json.dumps(state, indent=1))
        names = ["dense.npz", "trainer.json", "rows/manifest.json"]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "base": base.name if base else None,
            "files": {name: _described(folder / name) for name in names},
        }
        write_text(folder / "manifest.json", to_text(manifest))

    def _prune(self, protect: int | None) -> None:
        found = self.all()
        kept = set(found[-self._keep :])
        if protect is not None and self.at(protect) in found:
            kept.add(self.at(protect))
        for path in list(kept):
            kept |= set(chain_of(path))
        for path in set(found) - kept:
            (path / "manifest.json").unlink()  # first, so that a half-removed folder is not taken for a checkpoint
            shutil.rmtree(path)

    def _failed(self, step: int, error: OSError) -> CheckpointError:
        last = self.latest()
        rest = f"the last complete one is {last}" if last else "there is no earlier one"
        return CheckpointError(
            f"The checkpoint of step {step} could not be written to {self.folder}: "
            f"{error.strerror or error}. Nothing of it was left behind; {rest}."
        )


def chain_of(folder: Path) -> list[Path]:
    """The checkpoints that an incremental one stands on, nearest first."""
    out: list[Path] = []
    base = read_manifest(folder)["base"]
    while base is not None:
        out.append(folder.parent / base)
        if out[-1] == folder or out[-1] in out[:-1]:
            raise CheckpointError(f"{folder} builds on a checkpoint, {out[-1]}, that builds on it.")
        base = read_manifest(out[-1])["base"]
    return out


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder; `CheckpointError` if it is none, or of another version."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no manifest.json.")
    data = read_object(path, "The manifest", CheckpointError)
    if data.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint of a run: {path} says {data['format']!r}.")
    if data.get("version", VERSION) not in (1, VERSION):
        raise CheckpointError(
            f"{folder} has checkpoint version {data['version']}; this Hotrow reads versions 1 to {VERSION}."
        )
    try:
        manifest = parse(_Manifest, unsealed(data) if data.get("version") == VERSION else data, str(path))
        if not {"dense.npz", "trainer.json", "rows/manifest.json"} <= set(manifest.files):
            raise ValueError("it does not name all files of a checkpoint")
    except (SettingsError, ValueError) as error:
        raise CheckpointError(f"{path} was altered or truncated: {error}.") from None
    return manifest.model_dump(mode="json")


class _File(Settings):
    """A file of a checkpoint, as the manifest knows it."""

    bytes: int
    sha256: str


class _Manifest(Settings):
    format: str
    version: int
    step: int = Field(ge=0)
    base: str | None
    files: dict[str, _File]


def _check(path: Path, said: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing from the checkpoint.")
    size = path.stat().st_size
    if size != said["bytes"]:
        raise CheckpointError(f"{path} was truncated or altered: {size} bytes instead of {said['bytes']}.")
    if sha256(path) != said["sha256"]:
        raise CheckpointError(f"{path} was altered: its checksum is not the one in the manifest.")


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
