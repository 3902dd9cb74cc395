"""The stages of a prepare, one after the other: which tasks each has, and what may go when it is over."""

from __future__ import annotations

import shutil

from hotrow.data.convert import BadRows
from hotrow.data.prepare.begins import begins_of, refuse_nothing_left
from hotrow.data.prepare.engine import Inline
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.route import routes
from hotrow.data.prepare.spool import slices_of
from hotrow.data.sources import Slice
from hotrow.train.progress import Progress


def run_stages(work: Work, engine: Inline, progress: Progress) -> None:
    """All that is not done yet; then the data set is whole, in `work.data`."""
    run = _Stages(work, engine, progress)
    plan, source = work.plan, work.plan.source.source()
    sizes = [file.stat().st_size for file in source.packed]
    run.stage("unpack", "Unpacking, MB", sizes, 1 << 20)
    if work.result("slices") is None:
        unpacked = work.results("unpack", len(sizes))
        pieces = {found["file"]: [Slice.model_validate(p) for p in found["pieces"]] for found in unpacked}
        work.note("slices", 0, {"slices": [part.model_dump() for part in source.slices(pieces)]})
    slices = slices_of(work)
    run.stage("convert", "Converting, MB", [part.bytes for part in slices], 1 << 20)
    run.drop("unpacked")
    found = [result["found"] for result in work.results("convert", len(slices))]
    refuse_nothing_left(work, BadRows.of(plan.bad, [plan.aside, *found]).skipped)
    progress.say("Looking when sessions begin" if plan.clustered else "Dividing into parts")
    run.stage("begins")
    ahead = begins_of(work)
    if plan.clustered or plan.by_time:
        taken = [sum((work.result("convert", i) or {"rows": 0})["rows"] for i in route) for route in routes(work)]
        run.stage("route", "Routing, samples", taken)
        run.drop("spool")
    if plan.by_time:
        run.stage("histories", "Making histories, samples", [ahead.samples // ahead.buckets] * ahead.buckets)
        run.drop("routed")
    if plan.clustered and plan.samples.groups is None:
        progress.say("Looking for what repeats")
        run.stage("look")
    run.stage("cluster", "Writing, samples", [part.rows for part in ahead.parts])
    run.stage("finish")


class _Stages:
    """Runs stages, leaving out what is done, and shows how far they are."""

    def __init__(self, work: Work, engine: Inline, progress: Progress) -> None:
        self._work, self._engine, self._progress = work, engine, progress

    def stage(self, name: str, shown: str = "", sizes: list[int] | None = None, unit: int = 1) -> None:
        """Tasks of so many units of work each; without `sizes` it is one task, and nothing is shown."""
        sizes = [1] if sizes is None else sizes
        left = [number for number in range(len(sizes)) if self._work.result(name, number) is None]
        if not left:
            return
        whole = sum(sizes)
        done, total = whole - sum(sizes[number] for number in left), -(-whole // unit)

        def report(samples: int, units: int) -> None:
            nonlocal done
            done = min(whole, done + units)
            if shown:
                self._progress.step(total if done == whole else done // unit, samples, None)

        if shown:
            self._progress.start(total, done // unit, shown)
        try:
            self._engine.run(self._work, name, left, report)
            if done < whole:  # chunks are counted in rounded bytes, and blank lines not at all
                report(0, whole - done)
        finally:
            if shown:
                self._progress.stop()

    def drop(self, folder: str) -> None:
        """What no later task reads."""
        shutil.rmtree(self._work.path / folder, ignore_errors=True)
