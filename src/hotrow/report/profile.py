"""The profile of a data set as a page: what repeats, what keeping it once brings, how long sessions are, skew.

Takes the plain data that `hotrow profile --json` prints, so a page can be made from a saved result as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotrow.report.page import Page
from hotrow.report.section import Plot, Section, Table, bar_plot

_FACTORS = (("expected", "expected"), ("in_files", "reached in files"), ("in_batches", "reached in batches"))


def draw_profile(summary: Mapping[str, Any], path: Path | str) -> None:
    """Writes the page."""
    lines = [f"{summary['split']}: {summary['samples']:,} samples, {summary['samples_per_session']:.2f} a session."]
    lines.append(
        f"{summary['exact_repeats']:.1%} of all values repeat the sample before exactly, "
        f"{summary['repeats_with_slides']:.1%} counting lists that slid."
    )
    if not summary["kept_once"]:
        lines.append("The data set keeps nothing once; the groups shown are those that would pay.")
    sections = [Section("repeats", "What repeats", plots=[_repeats(summary), _factors(summary)])]
    if summary["sessions"] is not None:
        sections.append(Section("sessions", "Sessions", plots=[_sessions(summary)]))
    if summary["features"]:
        sections.append(Section("skew", "Skew of the keys", plots=[_skew(summary)]))
    Page(f"Profile of {summary['path']}", lines, sections, made_by="hotrow profile").write(path)


def _repeats(summary: Mapping[str, Any]) -> Plot:
    columns = [*summary["features"], *summary["dense"]]
    bars = [
        ("unchanged", [c["unchanged"] for c in columns]),
        ("slid", [c["unchanged_or_slid"] - c["unchanged"] for c in columns]),
    ]
    return bar_plot(
        "chance", "Chance that a value is the one of the sample before it in its session",
        [c["name"] for c in columns], bars, value="chance", stacked=True, layout={"xaxis": {"range": [0, 1]}},
    )  # fmt: skip


def _factors(summary: Mapping[str, Any]) -> Plot:
    rows = [{"name": "all features", **summary["factor"]}, *summary["groups"], *summary["features"]]
    bars = [
        (words, [row[kind] for row in rows]) for kind, words in _FACTORS if any(row[kind] is not None for row in rows)
    ]
    title = f"Factor of deduplication in batches of {summary['batch_size']:,}"
    return bar_plot("factors", title, [row["name"] for row in rows], bars, value="times fewer values")


def _sessions(summary: Mapping[str, Any]) -> Plot:
    lengths = {int(length): count for length, count in summary["session_lengths"].items()}
    trace = {
        "type": "bar", "x": list(lengths), "y": list(lengths.values()), "colour": 0,
        "hovertemplate": "%{x} samples: %{y:,} sessions<extra></extra>",
    }  # fmt: skip
    rows = [(f"{length:,}", f"{count:,}") for length, count in sorted(lengths.items())]
    layout = {"xaxis": {"title": {"text": "samples"}}, "yaxis": {"title": {"text": "sessions"}}}
    said = f"Sessions of {min(lengths)} to {max(lengths)} samples, {summary['samples_per_session']:.1f} on average."
    return Plot("lengths", "Samples a session", said, [trace], layout, Table(("samples", "sessions"), rows))


def _skew(summary: Mapping[str, Any]) -> Plot:
    features = summary["features"]
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [f["distinct"] for f in features],
        "y": [f["top_1_percent"] for f in features],
        "text": [f["name"] for f in features],
        "customdata": [f["zipf"] for f in features],
        "textposition": "top center",
        "colour": 0,
        "marker": {"size": 9},
        "hovertemplate": "%{text}: %{x:,} keys, the top 1% take %{y:.1%}, Zipf exponent %{customdata:.2f}"
        "<extra></extra>",
    }
    layout = {
        "xaxis": {"type": "log", "title": {"text": "distinct keys"}},
        "yaxis": {"range": [0, 1.1], "tickformat": ".0%", "title": {"text": "share of the top 1% of keys"}},
    }
    rows = [(f["name"], f"{f['distinct']:,}", f"{f['top_1_percent']:.1%}", f"{f['zipf']:.2f}") for f in features]
    table = Table(("feature", "distinct keys", "top 1% take", "Zipf exponent"), rows)
    said = "How many keys each feature has, and what share of its accesses the hottest 1% take."
    return Plot("skew-plot", "What the hottest keys take", said, [trace], layout, table, 420)
