"""`Lock`: a folder for one process at a time: run folders, rows of shards, the work of `prepare`.

A lock is a file in the folder, locked by `flock` and holding who has it. The kernel releases it when that process ends,
however it ends, so none is ever left behind; the file is removed on release, and what a kill leaves of it is taken
over. Whoever finds a folder locked is told process, host, command and since when.

Processes that one run consists of share its lock: the first takes it and hands `Lock.shared` on in their environment.
On several hosts that works too, for they find the same token in the file. Where a file system has no locks, `needed`
decides whether the folder is refused or used without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from hotrow.errors import HotrowError, StoreError

NAME = "lock"
_SHARED = "HOTROW_LOCK"
_WRITTEN_S = 1.0
"""Seconds in which who has just taken a lock has written who it is."""


class Lock:
    """Keeps a folder for this process until it is released. `remedy` says what to do where another one has it."""

    def __init__(
        self,
        folder: Path,
        what: str,
        remedy: str,
        *,
        error: type[HotrowError] = StoreError,
        needed: bool = True,
    ) -> None:
        """Takes it, or shares that of the process that started this one; raises `error` if another has it.

        `what` is what the folder would hold, as in "cannot hold rows".
        """
        self.folder, self.note = folder, ""
        self._handle: int | None = None
        self._of = os.getpid()  # a forked child has the object and the handle, but nothing to release
        self._made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while (handle := take(folder / NAME)) is None:
                found = _found(folder / NAME)
                if found and found.get("token") == os.environ.get(_SHARED, ""):
                    return
                if found is not None:
                    raise error(f"{folder} is in use: {in_words(found)}. {remedy}")
            self._handle = handle
        except OSError as cause:
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise error(f"{folder} cannot hold {what}: {cause.strerror or cause}.") from None
            self.note = f"{folder} cannot be locked: {cause.strerror or cause}."
            if needed:
                raise error(f"{self.note} Give one on a file system that has locks.") from None
            self.note += " Take care that no other command uses it meanwhile."

    @property
    def shared(self) -> dict[str, str]:
        """The environment with which processes that this one starts share the lock."""
        if self._handle is None:
            return {}
        os.fsync(self._handle)  # other hosts of a network file system see it from now on
        return {_SHARED: json.loads(os.pread(self._handle, 1 << 16, 0))["token"]}

    def release(self) -> None:
        """Lets go of the folder, and removes it if this made it and nothing else is in it."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if os.getpid() == self._of:
            with contextlib.suppress(OSError):
                (self.folder / NAME).unlink()
            if self._made:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
        os.close(handle)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.release()


def take(file: Path) -> int | None:
    """The handle of a lock on `file`, which says who has it; None if another has it. Closing the handle releases it."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), file.stat()):  # else it was removed by who had it
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(_this_process()).encode(), 0)
                    return handle
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise


def holder(file: Path) -> str:
    """Who has a lock that `take` did not get, in words."""
    return in_words(_found(file) or {})


def in_words(found: dict[str, Any]) -> str:
    """ "process 4242 on mia has had it since 2026-03-01 10:00:00 (hotrow train run.toml)" """
    if not found:
        return "another process has it"
    if (found["pid"], found["host"]) == (os.getpid(), socket.gethostname()):
        who = "this process"
    else:
        who = f"process {found['pid']} on {found['host']}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["since"]))
    return f"{who} has had it since {since} ({found['command']})"


def _this_process() -> dict[str, Any]:
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if command[0] in ("__main__.py", "tied.py"):
        command[0] = "hotrow"
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(command),
        "since": time.time(),
        "token": uuid4().hex,
    }


def _found(file: Path) -> dict[str, Any] | None:
    """Who has the lock; nothing if the file does not say, None if there is no such file any more."""
    until = time.monotonic() + _WRITTEN_S
    while True:
        try:
            found = json.loads(file.read_bytes())
            return found if isinstance(found, dict) and {"pid", "host", "command", "since"} <= found.keys() else {}
        except FileNotFoundError:
            return None
        except ValueError:  # it is being written at this moment
            if time.monotonic() > until:
                return {}
            time.sleep(0.01)
