"""A folder that appears whole or not at all: written beside its place, then renamed into it.

A folder that is already there is kept unless it is empty or the caller overwrites, and even then only one
that carries the same `mark` file is replaced, so that a mistyped path cannot cost a home directory.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from hotrow.errors import DataError


class NewFolder:
    """`with NewFolder(path, mark) as new:` write into `new.work`; without an error it ends up at `path`."""

    def __init__(self, path: Path | str, mark: str, overwrite: bool = False) -> None:
        self.path = Path(path).absolute()
        self.mark = mark
        self.overwrite = overwrite
        self.work = self.path.with_name(f".{self.path.name}.{uuid4().hex[:12]}.partial")

    def __enter__(self) -> NewFolder:
        refuse_in_use(self.path, self.mark, self.overwrite)
        try:
            self.work.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._put_in_place()
            except OSError as failed:
                shutil.rmtree(self.work, ignore_errors=True)
                raise cannot_write(self.path, failed) from failed
            return
        shutil.rmtree(self.work, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise cannot_write(self.path, error) from error

    def _put_in_place(self) -> None:
        if not self.path.exists():
            self.work.rename(self.path)
            return
        old = self.path.with_name(f".{self.path.name}.{uuid4().hex[:12]}.old")
        self.path.rename(old)
        try:
            self.work.rename(self.path)
        except OSError:
            old.rename(self.path)
            raise
        shutil.rmtree(old)


def refuse_in_use(path: Path, mark: str, overwrite: bool) -> None:
    """Raises `DataError` where something is that may not be replaced."""
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file; a folder is to be written there. Name another place.")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise DataError(f"{path} is not empty. Name another folder, or overwrite it with --overwrite.")
        if not (path / mark).is_file():
            raise DataError(
                f"{path} is not empty and has no {mark}, so it was not written by this command "
                f"and is not overwritten. Name another folder."
            )


def cannot_write(path: Path, error: OSError) -> DataError:
    """What a full or broken disk did, as a sentence."""
    if error.errno == errno.ENOSPC:
        return DataError(f"The disk is full: {path} could not be written, and nothing of it was left behind.")
    return DataError(f"{path} could not be written: {error.strerror or error}. Nothing of it was left behind.")
