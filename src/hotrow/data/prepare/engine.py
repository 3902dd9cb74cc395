"""Who runs the tasks: this process, or processes of its own, as many as cores and memory allow.

`Inline` is for small logs. `Processes` starts workers anew for every stage, so that each begins with empty hands, and
divides memory and threads among them. Workers get tasks as lines of JSON; when the command dies, however it dies, their
input ends and so do they. The first fault in the order of the log is the one that is told, though slices are converted
all at once.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hotrow
from hotrow import errors
from hotrow.data.prepare.duck import MIB, Share, resident
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.spool import Report
from hotrow.data.prepare.tasks import run_task
from hotrow.errors import HotrowError
from hotrow.settings import Settings

LEAST = 384 * MIB
"""What `prepare` cannot do without."""
_WORKER = 320 * MIB
_SMALL = 16 * MIB
_TIGHT = 512 * MIB


class TaskLost(HotrowError):
    """A worker is gone, and not by its own fault; what is done stays done."""


class Limits(Settings):
    """What a prepare may use of the machine."""

    memory: int
    workers: int


class Inline:
    """Tasks one after the other, in this process."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def run(self, work: Work, stage: str, numbers: Sequence[int], report: Report) -> None:
        """Does the tasks; raises what the first of them raised."""
        share = Share(memory=self.limits.memory, threads=self.limits.workers)
        for number in numbers:
            run_task(work.path, stage, number, share, report)


class Processes(Inline):
    """Tasks side by side, in workers that hold the lock of the work folder; a small log is not worth their start."""

    def __init__(self, limits: Limits, lock: int) -> None:
        super().__init__(limits)
        self._lock = lock

    def run(self, work: Work, stage: str, numbers: Sequence[int], report: Report) -> None:
        if _is_small(work):
            super().run(work, stage, numbers, report)
            return
        room = self.limits.memory - resident()
        count = max(1, min(len(numbers), self.limits.workers, room // _WORKER))
        share = Share(memory=room // count, threads=max(1, self.limits.workers // count))
        crew = _Crew(work.path, stage, numbers, share)
        workers = [_Worker(self._lock, share.memory) for _ in range(count)]
        threads = [threading.Thread(target=crew.serve, args=(worker,), daemon=True) for worker in workers]
        try:
            for thread in threads:
                thread.start()
            for samples, units in crew.progress(len(workers)):
                report(samples, units)
        finally:
            for worker in workers:
                worker.stop()
        crew.raise_first()


def _is_small(work: Work) -> bool:
    slices = work.result("slices")
    if slices is not None:
        return sum(int(part["bytes"]) for part in slices["slices"]) < 4 * _SMALL
    return sum(file.bytes for file in work.plan.inputs) < _SMALL


class _Crew:
    """Hands out the tasks of a stage and takes in what workers say."""

    def __init__(self, path: Path, stage: str, numbers: Sequence[int], share: Share) -> None:
        self._path, self._stage, self._share = path, stage, share
        self._left = iter(numbers)
        self._lock = threading.Lock()
        self._failed: dict[int, BaseException] = {}
        self._said: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()

    def serve(self, worker: _Worker) -> None:
        """Keeps one worker busy; runs in a thread."""
        try:
            while (number := self._next()) is not None:
                task = {"path": str(self._path), "stage": self._stage, "number": number}
                try:
                    for said in worker.do({**task, "share": self._share.model_dump()}):
                        self._said.put(said)
                except BaseException as error:
                    self._failed[number] = error
        finally:
            self._said.put(None)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._failed else next(self._left, None)

    def progress(self, workers: int) -> Iterator[tuple[int, int]]:
        """What workers say, until the last of them has nothing left to do."""
        while workers:
            said = self._said.get()
            if said is None:
                workers -= 1
            else:
                yield said

    def raise_first(self) -> None:
        """The fault that comes first in the order of tasks, if there was one."""
        if self._failed:
            raise self._failed[min(self._failed)]


class _Worker:
    """A process of `hotrow.data.prepare.worker`."""

    def __init__(self, lock: int, memory: int) -> None:
        home = str(Path(hotrow.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        lean = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        if memory < _TIGHT:  # what is freed goes back to the system at once, which costs time
            lean["MIMALLOC_PURGE_DELAY"] = "0"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hotrow.data.prepare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **lean, "PYTHONPATH": paths},
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the command, which then stops its workers
        )

    def do(self, task: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Does a task; what it says on the way. Raises what it raised."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost(task) from None
        for line in self._process.stdout:
            said = json.loads(line)
            if "samples" in said:
                yield said["samples"], said["units"]
            elif "error" in said:
                raise raised(said)
            else:
                return
        raise self._lost(task)

    def _lost(self, task: dict[str, Any]) -> TaskLost:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return TaskLost(
            f"A worker {how} during {task['stage']} {task['number']}. What is done is kept: the same command goes on "
            f"from here. If the system ran out of memory, give it a smaller --memory."
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was still to be written has no reader any more
                    pipe.close()


def told(error: BaseException) -> dict[str, Any]:
    """An error as plain data, for another process to raise."""
    import traceback

    if isinstance(error, HotrowError):
        return {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, OSError):
        return {"error": "OSError", "text": error.strerror or str(error), "errno": error.errno}
    return {"error": "", "text": "".join(traceback.format_exception(error))}


def raised(said: dict[str, Any]) -> BaseException:
    """The error that `told` told."""
    if said["error"] == "OSError":
        return OSError(said["errno"], said["text"])
    kind = getattr(errors, said["error"], None) if said["error"] else None
    return kind(said["text"]) if kind is not None else RuntimeError(said["text"])
