"""The profile of a data set as a page: what repeats, what keeping it once brings, how long sessions are, skew.

Takes the plain data that `hotrow profile --json` prints, so a page can be made from a saved result as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotrow.report.page import COLOURS, plotly, write_page

_FACTORS = (("expected", "expected"), ("in_files", "reached in files"), ("in_batches", "reached in batches"))


def draw_profile(summary: Mapping[str, Any], path: Path | str) -> None:
    """Writes the page."""
    figures = [_repeats(summary), _factors(summary)]
    if summary["sessions"] is not None:
        figures.append(_sessions(summary))
    if summary["features"]:
        figures.append(_skew(summary))
    lines = [f"{summary['split']}: {summary['samples']:,} samples, {summary['samples_per_session']:.2f} a session."]
    lines.append(
        f"{summary['exact_repeats']:.1%} of all values repeat the sample before exactly, "
        f"{summary['repeats_with_slides']:.1%} counting lists that slid."
    )
    if not summary["kept_once"]:
        lines.append("The data set keeps nothing once; the groups shown are those that would pay.")
    write_page(path, f"Profile of {summary['path']}", lines, figures)


def _repeats(summary: Mapping[str, Any]) -> Any:
    columns = [*summary["features"], *summary["dense"]]
    names = [c["name"] for c in columns]
    slid = [c["unchanged_or_slid"] - c["unchanged"] for c in columns]
    groups = [c["group"] or "none" for c in columns]
    figure = plotly().Figure()
    for name, values, colour in (
        ("unchanged", [c["unchanged"] for c in columns], COLOURS[0]),
        ("slid", slid, COLOURS[1]),
    ):
        figure.add_bar(
            y=names, x=values, name=name, orientation="h", marker_color=colour, customdata=groups,
            hovertemplate="%{y}: %{x:.3f}<br>group: %{customdata}",
        )  # fmt: skip
    figure.update_layout(barmode="stack", yaxis_autorange="reversed", xaxis_range=[0, 1], height=160 + 22 * len(names))
    return _titled(figure, "Chance that a value is the one of the sample before it in its session", "chance")


def _factors(summary: Mapping[str, Any]) -> Any:
    rows = [{"name": "all features", **summary["factor"]}, *summary["groups"], *summary["features"]]
    figure = plotly().Figure()
    for at, (kind, words) in enumerate(_FACTORS):
        if any(row[kind] is not None for row in rows):
            figure.add_bar(
                y=[row["name"] for row in rows], x=[row[kind] for row in rows], name=words, orientation="h",
                marker_color=COLOURS[at], hovertemplate="%{y}: %{x:.2f}",
            )  # fmt: skip
    figure.update_layout(barmode="group", yaxis_autorange="reversed", height=160 + 40 * len(rows))
    return _titled(figure, f"Factor of deduplication in batches of {summary['batch_size']:,}", "times fewer values")


def _sessions(summary: Mapping[str, Any]) -> Any:
    lengths = {int(length): count for length, count in summary["session_lengths"].items()}
    figure = plotly().Figure()
    figure.add_bar(
        x=list(lengths), y=list(lengths.values()), marker_color=COLOURS[0], hovertemplate="%{x} samples: %{y:,}"
    )
    figure.update_layout(height=360, yaxis_title="sessions")
    return _titled(figure, "Samples a session", "samples")


def _skew(summary: Mapping[str, Any]) -> Any:
    features = summary["features"]
    figure = plotly().Figure()
    figure.add_scatter(
        x=[f["distinct"] for f in features],
        y=[f["top_1_percent"] for f in features],
        text=[f["name"] for f in features],
        customdata=[f["zipf"] for f in features],
        mode="markers+text",
        textposition="top center",
        marker_color=COLOURS[2],
        hovertemplate="%{text}: %{x:,} keys, the top 1% take %{y:.1%}, Zipf exponent %{customdata:.2f}",
    )
    figure.update_layout(
        height=420, xaxis_type="log", yaxis={"range": [0, 1.05], "title": "share of the top 1% of keys"}
    )
    return _titled(figure, "Skew of the keys", "distinct keys")


def _titled(figure: Any, title: str, x: str) -> Any:
    figure.update_layout(title=title, xaxis_title=x, template="simple_white", margin={"l": 160})
    return figure
