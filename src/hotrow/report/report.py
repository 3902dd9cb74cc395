"""The report on one run, or on several beside each other: all sections, from the run folders and their data sets.

Sections whose figures a run does not have stay, with a line saying what would give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hotrow import __version__
from hotrow.data import DataSet
from hotrow.errors import HotrowError
from hotrow.metric_names import metric_names, words
from hotrow.report import rows, tiers, training
from hotrow.report.page import Page
from hotrow.report.runs import RunData, read_runs
from hotrow.report.section import Section


def report(paths: Sequence[Path]) -> Page:
    """The page on the runs in these folders."""
    runs = read_runs(paths)
    return page_of(runs, of_rows(runs))


def page_of(runs: Sequence[RunData], rows: Sequence[Section], live: float = 0.0) -> Page:
    """The page; `rows` are the sections that do not change while a run goes on."""
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(r.name for r in runs)}"
    lines = [f"{r.name}: {r.run.model.name} on {r.run.data.path}." for r in runs]
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    made_by = f"hotrow report, version {__version__}" + ("" if live else f", on {when}")
    now, told = (_now(runs), _told(runs)) if live else ("", "")
    return Page(title, lines, [*of_training(runs), *rows], live, now, told, made_by)


def of_training(runs: Sequence[RunData]) -> list[Section]:
    """The sections that grow with the run."""
    return [
        training.overview(runs),
        training.progress(runs),
        training.quality(runs, _best(runs)),
        training.throughput(runs),
        training.step_time(runs),
        tiers.hits(runs),
        tiers.traffic(runs),
        training.memory(runs),
    ]


def of_rows(runs: Sequence[RunData]) -> list[Section]:
    """The sections that follow from data sets and plans."""
    return [rows.access(runs), rows.repetition(runs)]


def _best(runs: Sequence[RunData]) -> float | None:
    """The AUC that cannot be passed, where all runs share a data set that knows it."""
    if len({r.run.data.path for r in runs}) != 1:
        return None
    try:
        found = DataSet.open(runs[0].run.data.path).facts.get("best_auc")
    except HotrowError:
        return None
    return found if isinstance(found, float) else None


def _now(runs: Sequence[RunData]) -> str:
    return "; ".join(f"{r.name}: step {r.last['step']:,}" if r.last else f"{r.name}: no step logged yet" for r in runs)


def _told(runs: Sequence[RunData]) -> str:
    """What is worth interrupting a listener for: evaluations."""
    last = [(r, r.lines["evaluate"][-1]) for r in runs if r.lines.get("evaluate")]
    return "; ".join(
        f"{r.name} evaluated at step {line['step']:,}: {words(names[0])} {line[names[0]]:.4f}"
        for r, line in last
        if (names := metric_names([line]))
    )
