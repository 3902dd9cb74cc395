"""Results as tables for people. Each function takes the plain data that `--json` would print."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotrow.metric_names import by_slice, metric_names, words
from hotrow.train.progress import duration

if TYPE_CHECKING:
    from hotrow.train.state import Result

_WHOLE_LINES = 4096  # columns, where nobody reads them on a screen


def made(data: Mapping[str, Any]) -> None:
    """A synthetic log."""
    rows = [(name.replace("_", " "), _fact(v)) for name, v in data.items() if not isinstance(v, dict)]
    _pairs("Log", [*rows, ("next", f"hotrow prepare {data['path']} DATA")])


def demonstrated(data: Mapping[str, Any]) -> None:
    """The demo: reached beside reachable, then where everything is."""
    rows = [
        (words, _number(data[name]), _number(best), _number(abs(best - data[name])))
        for words, name, best in (
            ("AUC", "auc", data["best_auc"]),
            ("log loss", "log_loss", data["best_log_loss"]),
        )
    ]
    _table("", ("on the test split", "reached", "best reachable", "gap"), rows)
    _console().print()
    steps = [(name, duration(seconds)) for name, seconds in data["seconds"].items()]
    _pairs(
        "",
        [
            ("samples", f"{data['samples']:,}"),
            ("samples a second", f"{data['samples_per_second']:,.0f}"),
            *steps,
        ],
    )
    _console().print()
    _pairs("Written", [(name, data[name]) for name in ("log", "data", "run_file", "run")])
    _console().print(f"\nGo on with: hotrow report {data['run']}", highlight=False, soft_wrap=True)


def result_as_data(result: Result) -> dict[str, Any]:
    """A training result as plain data."""
    return {**asdict(result), "samples_per_second": result.samples_per_second}


def trained(data: Mapping[str, Any]) -> None:
    """What a run came to."""
    ends = {
        "end": "to the end",
        "early": "until no evaluation was better",
        "idle": "until nothing had come for a while",
    }
    rows = [
        ("trained", ends.get(data["stopped"], f"until {data['stopped']}")),
        ("steps", f"{data['steps']:,}"),
        ("samples", f"{data['samples']:,}"),
        ("time", duration(data["seconds"])),
        ("samples a second", f"{data['samples_per_second']:,.0f}"),
        *_metrics(data["metrics"]),
    ]
    if data["best_step"] is not None:
        is_it = str(data["checkpoint"]).endswith(f"step-{data['best_step']:08d}")
        rows.append(("best at step", f"{data['best_step']:,}" + (", as are metrics and checkpoint" if is_it else "")))
    rows += [("run folder", str(data["folder"])), ("checkpoint", str(data["checkpoint"]))]
    _pairs("", rows)
    _slices(data["metrics"])


def evaluated(data: Mapping[str, Any]) -> None:
    """Metrics of a split."""
    rows = [("checkpoint", data["checkpoint"]), ("split", data["split"]), *_metrics(data["metrics"])]
    _pairs("", rows)
    _slices(data["metrics"])


def inspected(data: Mapping[str, Any]) -> None:
    """A data set, checkpoint or run."""
    {"data set": _data_set, "checkpoint": _checkpoint, "run": _run}[data["kind"]](data)


def benchmarked(report: Mapping[str, Any]) -> None:
    """Figures beside what they must be, and those that are missing."""
    met = {True: "yes", False: "NO", None: ""}
    rows = [
        (r["id"], _number(r["value"]), r["unit"], _number(r["must"]), _number(r["aim"]), met[r["met"]])
        for r in report["results"]
    ]
    _table(report["name"], ("figure", "value", "unit", "must", "aim", "met"), rows)
    notes = [f"{r['id']}: {r['note']}" for r in report["results"] if r.get("note")]
    notes += [f"missing: {m['id']}: {m['reason']}" for m in report.get("missing", ())]
    for note in notes:
        _console().print(note, highlight=False, markup=False, soft_wrap=True)


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _data_set(data: Mapping[str, Any]) -> None:
    facts = [(name.replace("_", " "), _fact(v)) for name, v in data["facts"].items() if not isinstance(v, dict)]
    _pairs(
        "Data set",
        [
            ("path", data["path"]),
            ("size", size(data["bytes"])),
            ("label" if len(data["labels"]) == 1 else "labels", ", ".join(data["labels"]) or "none"),
            *facts,
        ],
    )
    splits = [(name, f"{s['samples']:,}", str(s["files"])) for name, s in data["splits"].items()]
    _table("", ("split", "samples", "files"), splits)
    features = [(f["name"], f["kind"], f["table"], f["pooling"]) for f in data["features"]]
    _table("", ("feature", "kind", "table", "pooling"), features)
    samples = sum(split["samples"] for split in data["splits"].values())
    kept = [
        (
            g["name"],
            ", ".join(g["columns"]),
            ", ".join(g["slides"]),
            f"{g['rows']:,}",
            f"{samples / max(1, g['rows']):.1f}",
        )
        for g in data["groups"]
    ]
    if kept:
        _table("", ("group", "kept once", "slides", "rows", "samples a row"), kept)
    if data["dense"]:
        _console().print(f"dense: {', '.join(data['dense'])}", highlight=False, soft_wrap=True)


def _checkpoint(data: Mapping[str, Any]) -> None:
    rows = [
        ("path", data["path"]),
        ("step", f"{data['step']:,}"),
        ("samples", f"{data['samples']:,}"),
        ("size", size(data["bytes"])),
        ("dense weights", f"{sum(math.prod(shape) for shape in data['dense'].values()):,}"),
        *[("stands on", base) for base in data["stands_on"]],
        *_metrics(data["metrics"]),
    ]
    _pairs("Checkpoint", rows)
    _tables(data["tables"], "changed rows" if data["stands_on"] else "rows")


def _run(data: Mapping[str, Any]) -> None:
    rows = [(name, data[name]) for name in ("path", "data", "model", "policy")]
    if data["last"]:
        rows.append(("last logged step", f"{data['last']['step']:,}"))
        rows.append(("samples a second", f"{data['last']['samples_per_second']:,.0f}"))
    if data["checkpoint"]:
        rows.append(("stands for", data["checkpoint"]))
    _pairs("Run", rows)
    names = metric_names(data["evaluations"])
    evaluations = [
        (f"{e.get('best_step', e['step']):,}", e["split"], *(_number(e.get(name)) for name in names))
        for e in data["evaluations"]
    ]
    _table("", ("step", "split", *(words(name) for name in names)), evaluations)
    _table("", ("checkpoint", "size"), [(c["path"], size(c["bytes"])) for c in data["checkpoints"]])
    _tables(data["tables"])


def _tables(tables: Mapping[str, Mapping[str, Any]], count: str = "rows") -> None:
    rows = [
        (name, str(t["dim"]), t["dtype"], t["optimizer"], f"{t['rows']:,}", size(t["bytes"]))
        for name, t in tables.items()
    ]
    _table("", ("table", "dim", "dtype", "optimizer", count, "size"), rows)


def _metrics(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [(words(name), _number(metrics[name])) for name in metric_names([metrics])]


def _slices(metrics: Mapping[str, float | None]) -> None:
    """A table of the metrics of slices, where there are some."""
    found = by_slice(metrics)
    if not found:
        return
    names = ["samples", *metric_names(found.values())]
    _console().print()
    rows = [(name, *(_fact(of.get(metric, "")) for metric in names)) for name, of in found.items()]
    _table("", ("slice", *(words(name) for name in names)), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) >= 10 else f"{value:.4f}"


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(str(value)))
    _console().print(table, highlight=False)


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, left: bool = False) -> None:
    """Columns of figures stand right, of words (`left`) left."""
    table = Table(title=title, title_justify="left", pad_edge=False, box=None, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i and not left else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if table.rows:
        _console().print()
        _console().print(table, highlight=False)


def _console() -> Console:
    """Standard output; into a pipe or a file lines are whole, so that paths can be taken from there."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_WHOLE_LINES if piped else None)
