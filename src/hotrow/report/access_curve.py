"""The cumulative access curve with a plan's cut on it: how little memory takes how much of the accesses.

Takes the plain data that `hotrow plan --json` prints. Memory is on a logarithmic axis, for the first rows take most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.report.page import COLOURS, plotly, write_page
from hotrow.sizes import size_text

_BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_curve(data: Mapping[str, Any], path: Path | str) -> None:
    """Writes the page: the curve with the cut, and each table's part of the budget."""
    cut = f"{size_text(data['bytes'])} of rows take {data['share']['value']:.1%} of all accesses"
    lines = [f"{cut}; {data['samples']['value']:.1%} of samples touch hot rows only."]
    write_page(path, f"Plan for {data['data']}", lines, [_curve(data, cut), _tables(data)])


def _curve(data: Mapping[str, Any], cut: str) -> Any:
    figure = plotly().Figure()
    curve = data["curve"]
    figure.add_scatter(
        x=curve["bytes"],
        y=curve["share"],
        mode="lines",
        line={"color": COLOURS[0], "shape": "linear"},
        customdata=[size_text(b) for b in curve["bytes"]],
        hovertemplate="%{customdata}: %{y:.1%}<extra></extra>",
        name="hottest rows",
    )
    figure.add_vline(x=data["memory"], line={"color": COLOURS[2], "dash": "dash"})
    figure.add_annotation(  # plotly takes a line's place on a logarithmic axis as it is, a text's as its logarithm
        x=math.log10(data["memory"]), y=1.05, yref="paper", text=cut, showarrow=False
    )
    ticks = _ticks(curve["bytes"])
    figure.update_layout(
        title="Share of accesses that the rows worth most take together",
        xaxis={"type": "log", "title": "memory", "tickvals": ticks, "ticktext": [size_text(t) for t in ticks]},
        yaxis={"range": [0, 1], "tickformat": ".0%"},
        height=480,
    )
    return figure


def _tables(data: Mapping[str, Any]) -> Any:
    figure = plotly().Figure()
    tables = sorted(data["tables"].items(), key=lambda item: -item[1]["bytes"])
    names = [name for name, _ in tables]
    for label, values, colour in (
        ("of the table's accesses", [t["share"]["value"] for _, t in tables], COLOURS[0]),
        ("of the table's keys", [t["rows"] / max(t["keys"], 1) for _, t in tables], COLOURS[1]),
        ("of the budget", [t["bytes"] / data["memory"] for _, t in tables], COLOURS[2]),
    ):
        figure.add_bar(
            y=names, x=values, name=label, orientation="h", marker_color=colour, hovertemplate="%{y}: %{x:.1%}"
        )
    figure.update_layout(
        title="What each table has on the hot tier",
        yaxis_autorange="reversed",
        xaxis={"range": [0, 1], "tickformat": ".0%"},
        height=160 + 44 * len(names),
    )
    return figure


def _ticks(sizes: Sequence[int]) -> list[int]:
    return [1 << power for power in range(int(math.log2(sizes[0])), int(math.log2(sizes[-1])) + 2, 2)]


def curve_as_text(curve: Mapping[str, Sequence[float]], memory: int, width: int = 64, height: int = 8) -> list[str]:
    """The curve for a terminal: columns of memory, each twice as much every few, and a mark under the budget."""
    sizes, shares = np.asarray(curve["bytes"], np.float64), np.asarray(curve["share"], np.float64)
    first, last = math.log2(sizes[0]), math.log2(max(sizes[-1], memory, sizes[0] * 2))
    at = 2 ** np.linspace(first, last, width)
    eighths = np.rint(np.interp(at, sizes, shares) * height * 8).astype(int)
    lines = []
    for row in reversed(range(height)):
        label = f"{(row + 1) / height:4.0%} " if row % 2 else "     "
        lines.append(label + "".join(_BLOCKS[v] for v in np.clip(eighths - 8 * row, 0, 8)))
    mark = round((math.log2(memory) - first) / (last - first) * (width - 1)) if memory > sizes[0] else 0
    lines.append("     " + "".join("▲" if i == mark else "─" for i in range(width)))
    ends = size_text(sizes[0]), size_text(max(sizes[-1], memory))
    middle = f"▲ {size_text(memory)}"
    lines.append("     " + ends[0] + middle.center(width - len(ends[0]) - len(ends[1])) + ends[1])
    return lines
