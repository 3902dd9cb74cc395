"""`Plan`: all that decides what `prepare` writes, and the folder in which an unfinished one waits to go on.

The folder stands beside the output as `.NAME.prepare`. A task's output is renamed into place when it is whole, and then
a note in `done/` says so: whatever is killed at whatever moment, what has a note is there, and what has none is made
again. Two commands never work in one folder: it is locked for as long as the command, or a worker of it, lives.

Memory, threads and engine are no part of the plan: the bytes written do not depend on them. The one exception is
`keys`, how many keys of a feature the profile counts exactly, which follows from the memory that is asked for or that
the machine has: with more distinct keys than that, another memory makes another summary of them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from hotrow.data.convert import BadPolicy
from hotrow.data.folder import cannot_write
from hotrow.data.schema import Schema
from hotrow.data.sources import SourceSettings
from hotrow.errors import DataError
from hotrow.files import flush, write_text
from hotrow.locks import NAME as _LOCK
from hotrow.locks import holder, take
from hotrow.settings import Settings

LatePolicy = Literal["sort", "skip", "refuse"]
PLAN = "plan.json"
_PATIENCE = 5.0


class Input(Settings):
    """A file of the log as it was when the work began."""

    file: str
    bytes: int
    modified: int


class Plan(Settings):
    """What is prepared from what, and how."""

    made_by: str
    source: SourceSettings
    inputs: tuple[Input, ...]
    aside: dict[str, Any] = Field(description="whole files that cannot be used")
    samples: Schema = Field(description="the schema of the data set; groups are None where they are to be found")
    split: str
    validation: float = Field(ge=0, lt=1, description="share of what is not test")
    bad: BadPolicy = "refuse"
    late: LatePolicy = "sort"
    cluster: bool = True
    row_group: int | None = Field(None, gt=0)
    part: int | None = Field(None, gt=0)
    keys: int = Field(gt=0, description="distinct keys of a feature that the profile counts exactly")
    keys_a_part: int = Field(gt=0, description="the same for one part")

    @property
    def clustered(self) -> bool:
        return self.cluster and self.samples.session is not None

    @property
    def by_time(self) -> bool:
        """Whether samples come out in order of time though they have no session: event logs."""
        return self.source.kind == "events"

    @property
    def digest(self) -> str:
        """Of all but the memory there is: by it a command knows the data set that it made."""
        return sha256(self.model_dump_json(exclude={"keys", "keys_a_part"}).encode()).hexdigest()

    def differs(self, other: Plan) -> str:
        """What the other plan has different, in words."""
        changed = [name for name in Plan.model_fields if getattr(self, name) != getattr(other, name)]
        words = {
            "made_by": "version",
            "inputs": "log",
            "aside": "log",
            "source": "log",
            "samples": "schema",
            "keys": "memory",
            "keys_a_part": "memory",
        }
        return ", ".join(dict.fromkeys(words.get(name, name) for name in changed))


class Work:
    """The folder of an unfinished prepare."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._plan: Plan | None = None

    @staticmethod
    def beside(out: Path) -> Work:
        return Work(out.with_name(f".{out.name}.prepare"))

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = Plan.model_validate_json((self.path / PLAN).read_bytes())
        return self._plan

    @property
    def data(self) -> Path:
        """What becomes the data set."""
        return self.path / "data"

    def folder(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(exist_ok=True)
        return path

    def note(self, stage: str, number: int, result: dict[str, Any]) -> dict[str, Any]:
        """Says that a task is done, and what came of it."""
        path = self._note(stage, number)
        beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
        write_text(beside, json.dumps(result))
        beside.replace(path)
        flush(path.parent)
        return result

    def result(self, stage: str, number: int = 0) -> dict[str, Any] | None:
        """What came of a task; None if it is not done."""
        path = self._note(stage, number)
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found

    def results(self, stage: str, count: int) -> list[dict[str, Any]]:
        """What came of all tasks of a stage that is done."""
        found = [self.result(stage, number) for number in range(count)]
        return [result for result in found if result is not None]

    def _note(self, stage: str, number: int) -> Path:
        return self.path / "done" / f"{stage}-{number:06d}.json"

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keeps others out; gives the handle of the lock, which workers inherit so that it lasts as long as they."""
        until = time.monotonic() + _PATIENCE  # workers of a command that was just killed may need a moment to notice
        while (handle := self._lock()) is None:
            if time.monotonic() > until:
                raise DataError(
                    f"Another prepare is at work in {self.path}: {holder(self.path / _LOCK)}. Wait for it, or stop it."
                )
            time.sleep(0.05)
        try:
            yield handle
        finally:
            os.close(handle)

    def _lock(self) -> int | None:
        """The handle of the lock; None if others have it, or if it went away with a folder that they deleted."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        try:
            return take(self.path / _LOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{self.path} cannot be locked: {error.strerror or error}. Name another folder.") from None

    def begin(self, plan: Plan) -> str | None:
        """Goes on with what is there if it was begun by the same plan, else starts anew; a sentence if it matters."""
        said, before = None, self._found()
        if before is not None and before != plan:
            said = (
                f"An unfinished prepare with another {before.differs(plan)} was here; its work is thrown away and "
                f"this one starts anew."
            )
        if before == plan:
            done = sum(1 for _ in (self.path / "done").glob("*.json"))
            said = f"Going on with an unfinished prepare: {done} tasks are done." if done else None
        else:
            self.clear()
            for name in ("done", "data", "spool"):
                (self.path / name).mkdir()
            write_text(self.path / f"{PLAN}.new", plan.model_dump_json(indent=1) + "\n")
            (self.path / f"{PLAN}.new").replace(self.path / PLAN)
        shutil.rmtree(self.path / "temp", ignore_errors=True)
        for partial in self.path.glob("*/.*"):
            shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink()
        self._plan = plan
        return said

    def placed(self, plan: Plan, manifest: Path) -> bool:
        """Whether all was done and the data set is in its place, and only this folder was not yet deleted."""
        done = self._found() == plan and self.result("finish") is not None
        return done and not self.data.exists() and manifest.is_file()

    def place(self, out: Path) -> None:
        """Renames the data set into its place; what it replaces waits in this folder until then."""
        old = self.path / "old"
        if out.exists():
            if old.exists():
                shutil.rmtree(old)
            out.rename(old)
        try:
            self.data.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
        flush(out.parent)

    def _found(self) -> Plan | None:
        try:
            return Plan.model_validate_json((self.path / PLAN).read_bytes())
        except (OSError, ValueError):
            return None

    def clear(self) -> None:
        """Deletes all but the lock."""
        (self.path / PLAN).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Deletes the folder: what says that all is done after the rest, and last the lock, which keeps others out."""
        order = ("done", PLAN, _LOCK)
        for path in sorted(self.path.glob("*"), key=lambda path: path.name in order and order.index(path.name) + 1):
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # others may have made a lock of their own by now
            self.path.rmdir()
