"""Files that are on the disk when they are said to be: what checkpoints, snapshots and data sets write by."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


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


def sha256(path: Path) -> str:
    """The checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
