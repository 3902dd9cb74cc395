"""Sections on tiers: how often rows were at hand, how stale they were, and what travelled for them.

They come from lines of kind "tier", whatever of `Tier.counters` a tier gave, and of kind "staleness", what rows missed
under the policy of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.report.runs import RunData
from hotrow.report.section import Plot, Section, Series, Table, bar_plot, line_plot
from hotrow.sizes import size_text


def hits(runs: Sequence[RunData]) -> Section:
    """Hit shares over time, and how old the copies were that reads saw."""
    title = "Hit rate and staleness"
    found = [s for r in runs if (s := r.series("train", "hit_share")) is not None]
    found += [s for r in runs for tier in _tiers(r) if (s := _rate(r, tier)) is not None]
    plots = []
    if found:
        plots.append(
            line_plot(
                "hits",
                "Share of accesses that found their row on the faster tier",
                found,
                x="samples trained on",
                y="hit share",
                numbers=".2%",
                layout={"yaxis": {"range": [0, 1.02], "tickformat": ".0%"}, "showlegend": len(runs) > 1},
            )
        )
    aged = [(r.name, missed) for r in runs if (missed := _missed(r))]
    aged += [(f"{r.name}, {tier}", ages) for r in runs for tier in _tiers(r) if (ages := _ages(r, tier))]
    if aged:
        plots.append(_staleness(aged))
    if not plots:
        missing = (
            "No tier of these runs counts hits. Hot rows on the device do ([plan] with memory in the run file), and so "
            "does a cache in front of shards."
        )
        return Section("hits", title, missing=missing)
    lines = [] if aged else ["No tier of these runs reads stale copies, so there is no histogram of staleness."]
    return Section("hits", title, lines, plots)


def traffic(runs: Sequence[RunData]) -> Section:
    """Bytes a step, over each link of each tier."""
    title = "Traffic by tier and link"
    names: list[str] = []
    ways: dict[str, list[float | None]] = {"bytes_in": [], "bytes_out": []}
    for r in runs:
        for tier in _tiers(r):
            last = _lines(r, tier)[-1]
            steps = max(int(last["step"]) - _first_step(r), 1)
            links = last.get("links") or {"": last}
            for link, counted in links.items():
                if "bytes_in" in counted or "bytes_out" in counted:
                    names.append(", ".join(part for part in (r.name if len(runs) > 1 else "", tier, link) if part))
                    for way, values in ways.items():
                        values.append(counted[way] / steps if way in counted else None)
    if not names:
        missing = (
            "Every row is in the process that trains, so nothing travels. Tiers on other ranks and hosts count their "
            "bytes: served, cached, node, world."
        )
        return Section("traffic", title, missing=missing)
    words = {"bytes_in": "received", "bytes_out": "sent"}
    bars = [(words[way], values) for way, values in ways.items() if any(v is not None for v in values)]
    plot = bar_plot(
        "traffic",
        "Bytes a step",
        names,
        bars,
        value="bytes a step",
        numbers=".3s",
        texts=[["" if v is None else size_text(v) for v in values] for _, values in bars],
        layout={"xaxis": {"tickformat": "~s"}},
    )
    return Section("traffic", title, [], [plot])


def _staleness(aged: Sequence[tuple[str, Mapping[int, int]]]) -> Plot:
    bins = _bins(max(age for _, counts in aged for age in counts))
    names = [str(low) if low == high else f"{low:,} to {high:,}" for low, high in bins]
    traces: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    for at, (name, counts) in enumerate(aged):
        total = max(sum(counts.values()), 1)
        shares = [sum(n for age, n in counts.items() if low <= age <= high) / total for low, high in bins]
        hover = "%{x} updates behind: %{y:.2%}"
        traces.append({"type": "bar", "name": name, "x": names, "y": shares, "colour": at, "hovertemplate": hover})
        rows += [(name, age, f"{share:.2%}") for age, share in zip(names, shares, strict=True)]
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "updates that a row had missed"}, "type": "category"},
        "yaxis": {"title": {"text": "share of reads"}, "tickformat": ".0%", "rangemode": "tozero"},
        "showlegend": len(aged) > 1,
    }
    text = f"How many updates the rows that were read had missed: 0 to {bins[-1][1]:,}."
    heads = ("", "updates missed", "share of reads")
    return Plot("staleness", "Staleness of the rows that were read", text, traces, layout, Table(heads, rows))


def _bins(most: int) -> list[tuple[int, int]]:
    """Each count for itself where they are few, else twice as many in every next one."""
    if most <= 16:
        return [(age, age) for age in range(most + 1)]
    return [(0, 0), *((1 << power, (2 << power) - 1) for power in range(most.bit_length()))]


def _missed(r: RunData) -> dict[int, int]:
    """What rows had missed under the run's policy, over the whole run."""
    total: dict[int, int] = {}
    for line in r.lines.get("staleness", ()):
        for age, count in enumerate(line.get("rows", ())):
            total[age] = total.get(age, 0) + int(count)
    return total


def _tiers(r: RunData) -> list[str]:
    return list(dict.fromkeys(str(line["tier"]) for line in r.lines.get("tier", ()) if "tier" in line))


def _lines(r: RunData, tier: str) -> list[dict[str, Any]]:
    return [line for line in r.lines.get("tier", ()) if line.get("tier") == tier]


def _first_step(r: RunData) -> int:
    """The step after which this process's counters began: they start anew when a run is resumed."""
    began, before = 0, 0
    for line in r.lines.get("machine", ()):
        if line["step"] - line.get("steps", 0) != before:
            began = line["step"] - line.get("steps", 0)
        before = line["step"]
    return began


def _rate(r: RunData, tier: str) -> Series | None:
    """The hit share between two lines; a tier that the run itself reports on (`hit_share`) is left out."""
    lines = [line for line in _lines(r, tier) if "hits" in line and "misses" in line]
    if not lines or (tier == "device" and r.of("train", "hit_share")):
        return None
    at = r.at(lines).tolist()
    x, y, before = [], [], (0, 0)
    for sample, line in zip(at, lines, strict=True):
        now = (int(line["hits"]), int(line["misses"]))
        if sum(now) < sum(before):
            before = (0, 0)
        seen = sum(now) - sum(before)
        if seen:
            x.append(sample)
            y.append((now[0] - before[0]) / seen)
        before = now
    return Series(f"{r.name}, {tier}", x, y) if x else None


def _ages(r: RunData, tier: str) -> dict[int, int]:
    """The last histogram of staleness that a tier gave."""
    given = next((line["staleness"] for line in reversed(_lines(r, tier)) if line.get("staleness")), None)
    if isinstance(given, Mapping):
        return {int(age): int(count) for age, count in given.items()}
    return {age: int(count) for age, count in enumerate(given or ())}
