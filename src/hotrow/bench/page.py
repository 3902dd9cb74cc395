"""docs/benchmarks.md from the JSON of benchmark runs, so that no figure in it is typed by hand.

python -m hotrow.bench.page docs/benchmarks/*.json > docs/benchmarks.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrow.bench.claims import PARTS, claims_table, peers_table
from hotrow.bench.report import figure

HEAD = """# Benchmarks

Made by `python -m hotrow.bench.page docs/benchmarks/*.json` from the JSON of full runs; the raw readings are in those
files. `must` is what a figure has to reach (a peer's or the source system's own result), `aim` is what we want. Both
sides of a ratio took turns in one run on one machine, each turn after a pause of 0.4 s, so that threads of the other
side that spin after their work are asleep; peers run with their default settings. A figure that was not reached
stands here as not reached.

A figure of kind *product* is of what users run: `hotrow prepare`, or a run by `hotrow train` or its `Trainer`, with
reading, logging and metrics. One of kind *part* is of a part with a loop of its own: what the part can do, not what a
run of yours reaches. Each section says what it runs; the [README](../README.md#how-fast) has what `hotrow train` does.
"""

CURVE = "cache.auc.wide_deep.s"


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """What was published and what peers do first, then one section a report."""
    published = ["## What the source systems published", "", *_rows(*claims_table(reports)), ""]
    peers = ["## Against peers", "", *_rows(*peers_table(reports)), ""]
    return "\n".join([HEAD, *published, *peers, *(_section(report) for report in reports)])


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _section(report: Mapping[str, Any]) -> str:
    lines = [f"## {report['name']}", ""]
    lines += [f"Command: `hotrow bench {report['name']}`. Machine: {_words(report['machine'])}. "]
    lines += [f"Versions: {_words(report['versions'])}. Workload: {_words(report['workload'])}.", ""]
    if report["name"] in PARTS:
        lines += [f"What it runs: {PARTS[report['name']]}", ""]
    lines += ["| figure | value | must | aim | reached | ours | baseline | note |", "| --- " * 8 + "|"]
    for r in report["results"]:
        reached = {True: "yes", False: "**no**", None: ""}[r["met"]]
        cells = [r["id"], figure(r["value"], r["unit"]), _number(r["must"]), _number(r["aim"]), reached]
        lines.append("| " + " | ".join([*cells, _reading(r["ours"]), _reading(r["baseline"]), r["note"]]) + " |")
    if report["missing"]:
        lines += ["", "Not taken: " + "; ".join(f"{m['id']} ({m['reason']})" for m in report["missing"]) + "."]
    return "\n".join([*lines, *_curve(report), ""])


def _curve(report: Mapping[str, Any]) -> list[str]:
    """AUC over the bound on staleness, as a drawing, where the report has it."""
    points = [(r["id"].removeprefix(CURVE), r["value"]) for r in report["results"] if r["id"].startswith(CURVE)]
    if len(points) < 3:
        return []
    values = [value for _, value in points]
    return [
        "",
        "```mermaid",
        "xychart-beta",
        '    title "AUC over the bound on staleness, Wide&Deep"',
        f'    x-axis "s" [{", ".join(name for name, _ in points)}]',
        f'    y-axis "AUC" {min(values) - 0.005:.3f} --> {max(values) + 0.005:.3f}',
        f"    line [{', '.join(f'{value:.4f}' for value in values)}]",
        "```",
    ]


def _words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _reading(reading: Mapping[str, Any]) -> str:
    if "median_ms" in reading:
        return f"{reading['median_ms']:.2f} ms ({reading['p10_ms']:.2f} to {reading['p90_ms']:.2f})"
    parts = []
    for name, value in reading.items():
        inner = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, Mapping) else value
        parts.append(f"{name.replace('_', ' ')} {inner}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page([json.loads(Path(path).read_text()) for path in sys.argv[1:]]))
