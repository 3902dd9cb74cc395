"""What a page consists of: sections of plots, each plot with the same figures as a table.

A plot is what plotly.js takes, as plain data, but for its colours: a trace says `"colour": n`, and the page picks the
n-th colour of the palette that suits a light or a dark screen. Nothing here needs plotly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

POINTS = 1200
"""Points of a line that are drawn, at most: more than a screen has columns."""
ROWS = 30
"""Rows of a table that stands beside lines, at most."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


@dataclass(frozen=True)
class Table:
    """The figures behind a plot, as text; the first column heads its rows."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Plot:
    """`said` is one sentence on what there is to see, for those who cannot."""

    id: str
    title: str
    said: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    height: int = 320

    def as_data(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {"id": f"plot-{self.id}", "traces": self.traces, "layout": self.layout}


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it; `missing` says what would give what is not there."""

    id: str
    title: str
    lines: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    table: Table | None = None
    missing: str = ""


@dataclass(frozen=True)
class Series:
    """One line: a name and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def thinned(count: int, most: int) -> list[int]:
    """Positions of at most `most` of `count` things, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [int(at) for at in np.unique(np.linspace(0, count - 1, most).round().astype(int))]


def line_plot(
    id: str,
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    numbers: str = ",.4~g",
    layout: Mapping[str, Any] | None = None,
) -> Plot:
    """Lines over a common axis, told apart by colour, dash and mark; a few points get marks."""
    traces = []
    for at, line in enumerate(series):
        chosen = thinned(len(line.x), POINTS)
        few = len(chosen) <= 40
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if few else "lines",
                "name": line.name,
                "x": [line.x[i] for i in chosen],
                "y": [line.y[i] for i in chosen],
                "colour": at,
                "line": {"dash": DASHES[at % len(DASHES)], "width": 2},
                "marker": {"symbol": MARKS[at % len(MARKS)], "size": 7},
                "hovertemplate": f"%{{y:{numbers}}}",
            }
        )
    rows = [
        (line.name, _number(line.x[i]), _number(line.y[i]))
        for line in series
        for i in thinned(len(line.x), max(4, ROWS // max(len(series), 1)))
    ]
    axes: dict[str, Any] = {
        "xaxis": {"title": {"text": x}, "tickformat": "~s", "rangemode": "tozero"},
        "yaxis": {"title": {"text": y}},
        "hovermode": "x unified",
        "showlegend": len(series) > 1,
    }
    said = "; ".join(f"{line.name}: {_number(line.y[0])} to {_number(line.y[-1])}" for line in series if len(line.y))
    return Plot(id, title, f"{y} by {x}. {said}.", traces, _over(axes, layout), Table(("line", x, y), rows))


def bar_plot(
    id: str,
    title: str,
    names: Sequence[str],
    bars: Sequence[tuple[str, Sequence[float | None]]],
    *,
    value: str,
    numbers: str = ",.3~g",
    stacked: bool = False,
    texts: Sequence[Sequence[str]] | None = None,
    layout: Mapping[str, Any] | None = None,
) -> Plot:
    """Lying bars, one group a name; `texts` are the figures as the table gives them."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "y": list(names),
            "x": list(values),
            "colour": at,
            "hovertemplate": f"%{{y}}: %{{x:{numbers}}}",
        }
        for at, (words, values) in enumerate(bars)
    ]
    told = texts or [[_number(v) for v in values] for _, values in bars]
    rows = [(name, *(column[i] for column in told)) for i, name in enumerate(names)]
    axes: dict[str, Any] = {
        "barmode": "stack" if stacked else "group",
        "xaxis": {"title": {"text": value}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "ticklabelstandoff": 6},
        "showlegend": len(bars) > 1,
        "hovermode": "closest",
    }
    height = 130 + len(names) * (34 if stacked or len(bars) == 1 else 16 * len(bars) + 14)
    said = f"{value} for {len(names)} rows: {', '.join(words for words, _ in bars)}. The table has the figures."
    return Plot(id, title, said, traces, _over(axes, layout), Table(("", *(w for w, _ in bars)), rows), height)


def _over(base: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """A layout with what a plot has of its own, axis by axis."""
    return {**base, **{k: {**base.get(k, {}), **v} if isinstance(v, Mapping) else v for k, v in (own or {}).items()}}


def _number(value: float | None) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, int) or (abs(value) >= 1000 and float(value).is_integer()):
        return f"{value:,.0f}"
    return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
