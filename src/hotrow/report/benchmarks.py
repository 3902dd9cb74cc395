"""`hotrow bench --page`: one report of benchmarks as a page, published results and peers first."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hotrow.bench.claims import claims_table, peers_table, place
from hotrow.bench.report import figure
from hotrow.report.page import Page
from hotrow.report.section import Plot, Section, Table, bar_plot

_REACHED: Mapping[bool | None, str] = {True: "yes", False: "no", None: ""}


def benchmarks_page(report: Mapping[str, Any]) -> Page:
    """A page of one report. Without plotly the bars are left out, and the page has no script of 5 MB."""
    machine, quick = report["machine"], report["workload"].get("quick")
    lines = [
        f"Machine: {place(machine)}, {machine.get('cpu', machine['system'])}, {machine.get('memory_gib', '?')} GiB.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in report["versions"].items()) + ".",
    ]
    if quick:
        lines.append("A quick run: it shows that everything works here. Figures to cite come from full runs.")
    sections = [
        Section("published", "What the source systems published", table=_plain(*claims_table([report]))),
        Section("peers", "Against peers", table=_plain(*peers_table([report]))),
        _figures(report),
    ]
    if report["missing"]:
        gaps = [(gap["id"], gap["reason"]) for gap in report["missing"]]
        sections.append(Section("missing", "Not taken here", table=Table(("figure", "reason"), gaps)))
    return Page(f"Hotrow's benchmarks: {report['name']}", lines, sections)


def _figures(report: Mapping[str, Any]) -> Section:
    rows = [
        (
            r["id"],
            figure(r["value"], r["unit"]),
            "" if r["must"] is None else f"{r['must']:g}",
            "" if r["aim"] is None else f"{r['aim']:g}",
            _REACHED[r["met"]],
            r["note"],
        )
        for r in report["results"]
    ]
    table = Table(("figure", "value", "must", "aim", "reached", "note"), rows)
    plots = [_ratios(report)] if find_spec("plotly") else []
    return Section("figures", "Every figure", plots=[plot for plot in plots if plot is not None], table=table)


def _ratios(report: Mapping[str, Any]) -> Plot | None:
    """Ratios that must be reached, as shares of what they must be."""
    shown = [r for r in report["results"] if r["unit"] == "x" and r["must"]]
    if not shown:
        return None
    names = [r["id"] for r in shown]
    lower = [r for r in shown if r["met"] != (r["value"] >= r["must"])]
    shares = [r["must"] / r["value"] if r in lower else r["value"] / r["must"] for r in shown]
    return bar_plot(
        "ratios", "Ratios as a share of what they must be", names, [("share", shares)], value="1 is reached"
    )


def _plain(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """A table without Markdown's marks."""
    return Table(columns, [tuple(cell.replace("`", "").replace("**", "") for cell in row) for row in rows])
