"""Sections on the data: how unequal accesses are and where the plan puts rows, and what samples repeat.

Both come from the profile beside a run's data set, so they cost no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hotrow.data import DataSet
from hotrow.data.steps import schema_after
from hotrow.errors import HotrowError
from hotrow.plan import Plan, row_bytes
from hotrow.plan.hot import curve
from hotrow.profile import Profile
from hotrow.profile.factor import expected
from hotrow.report.access_curve import Cut, access_plot
from hotrow.report.runs import RunData, said
from hotrow.report.section import Plot, Section, bar_plot, thinned
from hotrow.sizes import size_text
from hotrow.table import Table as TableSettings

_POINTS = 400


def access(runs: Sequence[RunData]) -> Section:
    """For each run the access curve of its data set with what the plan holds on each tier."""
    title = "Accesses and the plan"
    plots: list[Plot] = []
    lines: list[str] = []
    unknown: list[str] = []
    drawn: set[str] = set()
    for at, r in enumerate(runs):
        try:
            plan = plan_of(r)
            whose = f"{r.run.data.path} {r.run.tables!r}" if plan is None else r.name
            if whose in drawn:
                continue
            drawn.add(whose)
            plot, line = _access(r, plan, f"access-{at}")
        except HotrowError as error:
            unknown.append(f"{r.name}: {said(error)}")
            continue
        plots.append(plot)
        lines.append(line)
    if not plots:
        return Section("access", title, missing=" ".join(unknown))
    return Section("access", title, lines + unknown, plots)


def plan_of(r: RunData) -> Plan | None:
    """The plan that the run began with: the one it names, or the one it made for itself."""
    settings = r.run.plan
    if settings is None:
        return None
    return Plan.load(settings.path if settings.path is not None else r.folder.plan)


def _access(r: RunData, plan: Plan | None, id: str) -> tuple[Plot, str]:
    dataset = DataSet.open(r.run.data.path)
    if r.run.data.steps:
        raise HotrowError("data.steps changes keys on their way, so the profile of the data set does not know them.")
    profile, _ = Profile.of_data_set(dataset, r.run.data.train)
    tables = r.run.tables_of(profile.tables)
    widths = {t.name: row_bytes(t) for t in tables}
    classes = {t.name: profile.table(t.name).histogram() for t in tables}
    total = sum(profile.table(t.name).total for t in tables)
    whole = curve(classes, widths, total)
    at = thinned(len(whole.bytes), _POINTS)
    points = {"bytes": whole.bytes[at].tolist(), "share": whole.share[at].tolist()}
    cuts = [] if plan is None else _cuts(plan, tables, profile, widths, total)
    plot = access_plot(id, f"{r.name}: share of accesses that the hottest rows take", points, cuts)
    half = float(np.interp(0.5, whole.share, whole.bytes))
    line = (
        f"{r.name}: half of all accesses go to {size_text(half)} of rows, of {size_text(int(whole.bytes[-1]))} in all"
    )
    if plan is None:
        return plot, f"{line}. There is no plan; hotrow plan DATA --memory 512MiB shows what one would hold."
    held = ", ".join(f"{cut.tier} takes {cut.share:.1%}" for cut in cuts)
    return plot, f"{line}. Of the accesses {held}, and the last tier the rest."


def _cuts(
    plan: Plan, tables: Sequence[TableSettings], profile: Profile, widths: Mapping[str, int], total: int
) -> list[Cut]:
    """What each tier that names its rows holds, over all tables, hottest tier first."""
    found: dict[str, list[int]] = {}
    for table in tables:
        counts = profile.table(table.name)
        for share in plan.shares.get(table.name, ()):
            if share.keys is None:
                continue
            held = found.setdefault(share.tier, [0, 0, 0])
            held[0] += len(share.keys)
            held[1] += len(share.keys) * widths[table.name]
            held[2] += int(counts.of(share.keys).sum())
    return [Cut(tier, rows, size, accesses / max(total, 1)) for tier, (rows, size, accesses) in found.items()]


def repetition(runs: Sequence[RunData]) -> Section:
    """The factor of deduplication by feature, for each data set and batch size."""
    title = "Repetition"
    columns: dict[str, dict[str, float]] = {}
    lines: list[str] = []
    for r in runs:
        name = f"{r.run.data.path.name}, batch {r.run.data.batch_size:,}"
        if name in columns:
            continue
        try:
            dataset = DataSet.open(r.run.data.path)
            profile, _ = Profile.of_data_set(dataset, r.run.data.train)
        except HotrowError as error:
            lines.append(f"{r.name}: {said(error)}")
            continue
        schema = dataset.schema if r.run.data.steps else schema_after((), dataset.schema)
        factors = expected(profile.repetition, schema, r.run.data.batch_size)
        columns[name] = {"all features": factors.total, **factors.features}
        lines.append(_repeats(name, dataset, factors.total))
    if not columns:
        return Section("repetition", title, missing=" ".join(lines))
    names = list(dict.fromkeys(feature for found in columns.values() for feature in found))
    bars = [(words, [found.get(feature) for feature in names]) for words, found in columns.items()]
    plot = bar_plot("factor", "Factor of deduplication by feature", names, bars, value="times fewer values in a batch")
    return Section("repetition", title, lines, [plot])


def _repeats(name: str, dataset: DataSet, factor: float) -> str:
    if dataset.schema.groups:
        return f"{name}: batches hold {factor:.2f} times fewer values than their samples spelled out."
    if dataset.schema.session is None:
        return f"{name}: the log has no session, so nothing is kept once. A schema can name one: session = COLUMN."
    return f"{name}: the data set keeps nothing once."
