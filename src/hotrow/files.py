"""Files that are on the disk when they are said to be: what checkpoints, snapshots and data sets write by."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from hotrow.errors import DataError, HotrowError


def write_text(path: Path, text: str) -> None:
    """Writes a file and sees it to the disk, so that a file written last is there last."""
    path.write_text(text, encoding="utf-8")
    flush(path)


def flush(path: Path) -> None:
    """Sees a written file, or what a folder holds, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path, what: str, error: type[HotrowError] = DataError) -> Iterator[Path]:
    """A place beside `path`; the file made there takes its place when the block ends well, or leaves nothing behind.

    What the system refuses becomes an `error`, with `what` the file is: "The plan out/a.plan could not be written".
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")
    try:
        yield beside
        flush(beside)
        beside.replace(path)
    except OSError as cause:
        raise error(f"{what} {path} could not be written: {cause.strerror or cause}.") from cause
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def sha256(path: Path) -> str:
    """The checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_whole(path: Path, digest: str | None) -> bytes:
    """A file's bytes; `ValueError` if their SHA-256 is not `digest`, where that is known."""
    data = path.read_bytes()
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("its SHA-256 is not the one that was noted when it was written")
    return data
