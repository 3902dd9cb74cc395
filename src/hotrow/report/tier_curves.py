"""Access curves with the tiers on them: which rows of each table are on every rank, on every node, or on one rank.

Takes the plain data that `hotrow plan --topology --json` prints. Rows are on a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.plan.topology import time_text
from hotrow.report.page import Page
from hotrow.report.section import Plot, Section, Table, bar_plot
from hotrow.sizes import size_text

_TIERS = (("replicated", "on every rank"), ("node", "on every node"), ("world", "on one rank"))
_MOST = 12


def draw_tiers(data: Mapping[str, Any], path: Path | str) -> None:
    """Writes the page: each table's curve coloured by tier, the bytes of a step, and other plans beside it."""
    topology, traffic, memory = data["topology"], data["traffic"], data["memory"]
    lines = [
        f"{topology['nodes']} nodes of {topology['ranks']} ranks: {size_text(traffic['between'])} between nodes and "
        f"{size_text(traffic['within'])} within them a step, {time_text(traffic['seconds'])}.",
        f"{size_text(memory['plan'])} on the fullest rank; row-wise takes {size_text(memory['row_wise'])}.",
    ]
    reasons = [f"{name}: {table['why']}" for name, table in _largest(data)]
    sections = [
        Section("tiers", "Rows by tier", reasons, [_curves(data)]),
        Section("exchanges", "What a step exchanges", plots=[_bytes("of-exchanges", _exchanges(data))]),
    ]
    if data.get("compare"):
        plots = [_bytes("of-plans", data["compare"]), _times(data["compare"])]
        sections.append(Section("compared", "Beside other plans", plots=plots))
    Page(f"Plan for {data['data']}", lines, sections, made_by="hotrow plan").write(path)


def _largest(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables that are looked up most, as many as a picture holds."""
    return sorted(data["tables"].items(), key=lambda item: -item[1]["lookups"])[:_MOST]


def _curves(data: Mapping[str, Any]) -> Plot:
    traces: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    for name, table in _largest(data):
        begin = 0
        for at, (tier, words) in enumerate(_TIERS):
            held = table["tiers"][tier]
            rows.append((name, words, f"{held['rows']:,}", f"{held['share']:.2%}"))
            if held["rows"]:
                x, y = _stretch(data["curve"][name], begin, begin + held["rows"])
                traces.append(_line(name, words, at, x, y, first=all(t["legendgroup"] != words for t in traces)))
            begin += held["rows"]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "most used rows of a table"}, "tickformat": "~s"},
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "title": {"text": "of the table's lookups"}},
        "showlegend": True,
        "hovermode": "closest",
    }
    copied = sum(t["tiers"][tier]["rows"] for _, t in _largest(data) for tier in ("replicated", "node"))
    return Plot(
        "tiers",
        "Share of lookups that the most used rows take together",
        f"{copied:,} rows have copies; all others are on one rank each.",
        traces,
        layout,
        Table(("table", "tier", "rows", "of its lookups"), rows),
        420,
    )


def _line(name: str, words: str, colour: int, x: list[float], y: list[float], *, first: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": words,
        "legendgroup": words,
        "showlegend": first,
        "x": x,
        "y": y,
        "colour": colour,
        "line": {"width": 2, "dash": ("solid", "dash", "dot")[colour]},
        "hovertemplate": f"{name}: %{{x:,.0f}} rows take %{{y:.1%}}<extra>{words}</extra>",
    }


def _stretch(curve: Mapping[str, Sequence[float]], begin: int, end: int) -> tuple[list[float], list[float]]:
    """The part of a curve from one row to another."""
    rows, share = np.array([0.0, *curve["rows"]]), np.array([0.0, *curve["share"]])
    inside = rows[(rows > begin) & (rows < end)]
    x = np.array([max(begin, min(1, end)), *inside, end], np.float64)
    return x.tolist(), np.interp(x, rows, share).tolist()


def _exchanges(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**e, "name": f"{e['tier']}: {e['name']}"} for e in data["exchanges"]]


def _bytes(id: str, rows: Sequence[Mapping[str, Any]]) -> Plot:
    links = (("between nodes", "between"), ("within nodes", "within"))
    return bar_plot(
        id,
        "Bytes of a step",
        [r["name"] for r in rows],
        [(words, [r[what] for r in rows]) for words, what in links],
        value="bytes",
        texts=[[size_text(r[what]) for r in rows] for _, what in links],
        layout={"xaxis": {"tickformat": "~s"}},
    )


def _times(rows: Sequence[Mapping[str, Any]]) -> Plot:
    return bar_plot(
        "times",
        "Time of a step's exchanges",
        [r["name"] for r in rows],
        [("time", [1e3 * r["seconds"] for r in rows])],
        value="milliseconds",
        texts=[[time_text(r["seconds"]) for r in rows]],
    )
