"""The cumulative access curve with a plan's cuts on it: how little memory takes how much of the accesses.

Memory is on a logarithmic axis, for the first rows take most. `draw_curve` takes the plain data that
`hotrow plan --json` prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotrow.report.page import Page
from hotrow.report.section import Plot, Section, Table, bar_plot, thinned
from hotrow.sizes import size_text

_BLOCKS = " ▁▂▃▄▅▆▇█"


class Cut(NamedTuple):
    """What one tier of a plan holds: so many rows and bytes, which take `share` of the accesses."""

    tier: str
    rows: int
    bytes: int
    share: float


def draw_curve(data: Mapping[str, Any], path: Path | str) -> None:
    """Writes the page: the curve with the cut, and each table's part of the budget."""
    share, samples = data["share"]["value"], data["samples"]["value"]
    lines = [
        f"{size_text(data['bytes'])} of rows take {share:.1%} of all accesses; {samples:.1%} of samples touch hot rows "
        f"only."
    ]
    cut = Cut("hot rows", data["rows"], data["bytes"], share)
    curve = access_plot("curve", "Share of accesses that the rows worth most take together", data["curve"], [cut])
    sections = [
        Section("accesses", "Accesses by memory", plots=[curve]),
        Section("tables", "What each table has on the hot tier", plots=[_tables(data)]),
    ]
    Page(f"Plan for {data['data']}", lines, sections, made_by="hotrow plan").write(path)


def access_plot(id: str, title: str, curve: Mapping[str, Sequence[float]], cuts: Sequence[Cut]) -> Plot:
    """The curve, with a mark where each tier's rows end, the hottest first."""
    sizes, shares = curve["bytes"], curve["share"]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "hottest rows",
            "x": list(sizes),
            "y": list(shares),
            "colour": 0,
            "text": [size_text(size) for size in sizes],
            "hovertemplate": "%{text}: %{y:.1%}<extra></extra>",
        }
    ]
    shapes, held, share = [], 0, 0.0
    for at, cut in enumerate(cuts, start=1):
        held, share = held + cut.bytes, share + cut.share
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{cut.tier}: {size_text(cut.bytes)}, {cut.share:.1%}",
                "x": [held],
                "y": [share],
                "colour": at,
                "marker": {"size": 11, "symbol": "diamond"},
                "hovertemplate": f"{cut.tier}: {cut.rows:,} rows<extra></extra>",
            }
        )
        shapes.append(
            {"type": "line", "x0": held, "x1": held, "y0": 0, "y1": share, "colour": at, "line": {"dash": "dash"}}
        )
    ticks = _ticks(sizes)
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "memory for rows"},
            "tickvals": ticks,
            "ticktext": [size_text(t) for t in ticks],
        },
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "title": {"text": "of all accesses"}},
        "shapes": shapes,
        "showlegend": bool(cuts),
        "hovermode": "closest",
    }
    rows = [(size_text(sizes[i]), f"{shares[i]:.2%}") for i in thinned(len(sizes), 20)]
    rows += [(f"{cut.tier}: {cut.rows:,} rows, {size_text(cut.bytes)}", f"{cut.share:.2%}") for cut in cuts]
    points = ", ".join(f"{size_text(float(np.interp(p, shares, sizes)))} take {p:.0%}" for p in (0.5, 0.9))
    return Plot(id, title, f"{points} of accesses.", traces, layout, Table(("memory", "of all accesses"), rows), 380)


def _tables(data: Mapping[str, Any]) -> Plot:
    tables = sorted(data["tables"].items(), key=lambda item: -item[1]["bytes"])
    bars = [
        ("of the table's accesses", [t["share"]["value"] for _, t in tables]),
        ("of the table's keys", [t["rows"] / max(t["keys"], 1) for _, t in tables]),
        ("of the budget", [t["bytes"] / data["memory"] for _, t in tables]),
    ]
    return bar_plot(
        "tables-shares", "Shares on the hot tier, by table", [name for name, _ in tables], bars, value="share",
        numbers=".1%", texts=[[f"{v:.2%}" for v in values] for _, values in bars],
        layout={"xaxis": {"range": [0, 1], "tickformat": ".0%"}},
    )  # fmt: skip


def _ticks(sizes: Sequence[float]) -> list[int]:
    """Powers of two, at most seven of them."""
    first, last = int(math.log2(max(sizes[0], 1))), math.ceil(math.log2(max(sizes[-1], 2)))
    return [1 << power for power in range(first, last + 1, max(1, -(-(last - first) // 6)))]


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
