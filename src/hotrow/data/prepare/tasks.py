"""`run_task`: any task of a prepare, in any process that sees the work folder.

A task is its stage and its number; all else stands in the plan and in the notes of the tasks before it. One that is
done already gives its note, so a task may be asked for twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from hotrow.data.prepare.begins import begins
from hotrow.data.prepare.cluster import cluster, finish, look
from hotrow.data.prepare.duck import Share, resident
from hotrow.data.prepare.histories import histories
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.route import route
from hotrow.data.prepare.spool import Report, convert_slice, unpack_file


def run_task(path: Path, stage: str, number: int, share: Share, report: Report) -> dict[str, Any]:
    """Does a task if it is not done, and gives what came of it."""
    work = Work(path)
    found = work.result(stage, number)
    if found is not None:
        return found

    def said(samples: int, units: int) -> None:
        report(samples, units)
        if resident() > share.memory // 2:  # Arrow keeps what it freed, for speed
            pa.default_memory_pool().release_unused()

    return work.note(stage, number, _do(work, stage, number, share, said))


def _do(work: Work, stage: str, number: int, share: Share, report: Report) -> dict[str, Any]:
    if stage == "unpack":
        return unpack_file(work, number, report)
    if stage == "convert":
        return convert_slice(work, number, report)
    if stage == "begins":
        return begins(work, share)
    if stage == "route":
        return route(work, number, share, report)
    if stage == "histories":
        return histories(work, number, report)
    if stage == "look":
        return look(work)
    if stage == "cluster":
        return cluster(work, number, share, report)
    if stage == "finish":
        return finish(work)
    raise ValueError(f"There is no stage {stage!r}.")
