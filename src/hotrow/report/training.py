"""Sections on how training went: what the runs are, progress, quality, throughput, time of a step, memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from hotrow.metric_names import by_slice, metric_names, words
from hotrow.report.runs import RunData
from hotrow.report.section import Plot, Section, Series, Table, bar_plot, line_plot
from hotrow.sizes import size_text
from hotrow.train.phases import BESIDE, IN_TURN
from hotrow.train.progress import duration

_SAMPLES = "samples trained on"
_WORDS = {
    "wait": "wait for a batch",
    "fetch": "fetch rows",
    "read_again": "read changed rows again",
    "reduce": "reduce dense gradients",
    "update": "update rows",
    "drain": "drain updates",
    "group": "group keys",
    "fetch_ahead": "fetch rows ahead",
    "read_behind": "read rows",
    "update_behind": "update rows",
    "held_back": "held back by the policy",
}


def overview(runs: Sequence[RunData]) -> Section:
    """What the runs are and how far they came."""
    metrics = metric_names(line for r in runs for line in r.lines.get("evaluate", []))
    rows = []
    for r in runs:
        last, evaluations = r.last, r.lines.get("evaluate", [])
        done = [""] * 4
        if last:
            a_second = last["samples"] / max(last["seconds"], 1e-9)
            done = [f"{last['step']:,}", f"{last['samples']:,}", duration(last["seconds"]), f"{a_second:,.0f}"]
        rows.append(
            (
                r.name,
                r.run.model.name,
                r.run.data.path.name,
                f"{r.run.data.batch_size:,}",
                r.run.policy.name,
                *done,
                *(_metric(evaluations, name) for name in metrics),
            )
        )
    heads = ("run", "model", "data set", "batch", "policy", "steps", "samples", "time", "samples a second")
    return Section("runs", "Runs", table=Table((*heads, *(words(name) for name in metrics)), rows))


def progress(runs: Sequence[RunData]) -> Section:
    """The training loss."""
    found = _all(runs, "train", "loss")
    if not found:
        return Section("progress", "Progress", missing="No line of metrics yet: the first comes after train.log_every.")
    lines = ["The mean loss between two lines of metrics, on samples the model had not been trained on in this epoch."]
    plot = line_plot("loss", "Training loss", found, x=_SAMPLES, y="loss")
    return Section("progress", "Progress", lines, [plot])


def quality(runs: Sequence[RunData], best: float | None = None) -> Section:
    """Evaluations; `best` is the AUC that nobody can pass, where the data set knows it."""
    plots = []
    names = metric_names(line for r in runs for line in r.lines.get("evaluate", []))
    for name in names:
        found = _by_split(runs, name)
        if not found:
            continue
        if name == "auc" and best is not None:
            reach = max(max(s.x) for s in found)
            found.append(Series("best reachable", [0.0, reach], [best, best]))
        plots.append(line_plot(f"quality-{_id(name)}", words(name), found, x=_SAMPLES, y=words(name)))
    for name in metric_names(line for r in runs for line in r.lines.get("progressive", [])):
        found, title = _all(runs, "progressive", name), f"{words(name)} of samples before they were trained on"
        plots.append(line_plot(f"progressive-{_id(name)}", title, found, x=_SAMPLES, y=words(name)))
    by_time = _by_split(runs, names[0], over="seconds") if names else []
    if len(runs) > 1 and len(by_time) > 1:
        first, title = words(names[0]), f"{words(names[0])} by training time"
        plots.append(line_plot(f"{_id(names[0])}-by-time", title, by_time, x="seconds of training", y=first))
    if not plots:
        missing = "No evaluation yet: data.validation names the split, train.evaluate_every how often."
        return Section("quality", "Quality", missing=missing)
    splits = " and ".join(dict.fromkeys(split for r in runs for split in r.splits if split)) or "test"
    lower = "Log loss, normalized entropy, RMSE and MAE are better when lower, calibration when near 1."
    lines = [f"On {splits}. {lower}"]
    lines += [said for r in runs if (said := _best(r))]
    return Section("quality", "Quality", lines, plots, _slices(runs))


def throughput(runs: Sequence[RunData]) -> Section:
    """Samples a second between two lines."""
    found = []
    for r in runs:
        lines = [{"samples": 0, "seconds": 0.0}, *r.of("train", "samples", "seconds")]
        rates = [
            (b["samples"], (b["samples"] - a["samples"]) / (b["seconds"] - a["seconds"]))
            for a, b in pairwise(lines)
            if b["seconds"] > a["seconds"]
        ]
        if rates:
            found.append(Series(r.name, [x for x, _ in rates], [y for _, y in rates]))
    if not found:
        return Section("throughput", "Throughput", missing="No line of metrics yet.")
    plot = line_plot(
        "throughput", "Samples a second", found, x=_SAMPLES, y="samples a second", numbers=",.3s",
        layout={"yaxis": {"rangemode": "tozero", "tickformat": "~s"}},
    )  # fmt: skip
    return Section("throughput", "Throughput", ["Time for evaluations is not counted."], [plot])


def step_time(runs: Sequence[RunData]) -> Section:
    """Milliseconds a step, by phase: in the thread that trains, and beside it."""
    title = "Where the time of a step goes"
    named: list[str] = []
    spent: list[dict[str, float]] = []
    for r in runs:
        lines = r.of("machine", "steps")
        steps = sum(line["steps"] for line in lines)
        if not steps:
            continue
        phases = {p: 1000 * sum(line.get(f"seconds_{p}") or 0 for line in lines) / steps for p in (*IN_TURN, *BESIDE)}
        whole = 1000 * (r.last["seconds"] / max(r.last["step"], 1)) if r.last else 0.0
        phases["other"] = max(0.0, whole - sum(phases[p] for p in IN_TURN))
        named.append(r.name)
        spent.append(phases)
    if not named:
        missing = "The run wrote no lines of kind machine; train it with this version of Hotrow."
        return Section("step", title, missing=missing)
    in_turn = _visible((*IN_TURN, "other"), spent)
    beside = _visible(BESIDE, spent)
    plots = [_phases("step-in-turn", "In the thread that trains", named, spent, in_turn)]
    if beside:
        plots.append(_phases("step-beside", "In threads beside it", named, spent, beside))
    said = (
        "What runs beside training costs nothing unless training waits for it. Checkpoints and metrics are in other; "
        "evaluations are not counted."
    )
    return Section("step", title, [said], plots)


def memory(runs: Sequence[RunData]) -> Section:
    """The process, its tables, and the accelerator."""
    plots = []
    layout = {"yaxis": {"rangemode": "tozero"}, "showlegend": len(runs) > 1}
    for id, title, kind, column in (
        ("memory-process", "Memory of the process", "machine", "memory_bytes"),
        ("memory-tables", "Memory of the tables' rows", "machine", "table_bytes"),
        ("memory-gpu", "Memory on the GPU", "machine", "gpu_bytes"),
        ("memory-device-rows", "Hot rows on the device", "train", "device_bytes"),
    ):
        found = _all(runs, kind, column)
        if found:
            unit, size = _unit(max(max(s.y) for s in found))
            found = [Series(s.name, s.x, [value / size for value in s.y]) for s in found]
            plots.append(line_plot(id, title, found, x=_SAMPLES, y=unit, layout=layout))
    if not any(plot.id != "memory-device-rows" for plot in plots):
        missing = "The run wrote no lines of kind machine; train it with this version of Hotrow."
        return Section("memory", "Memory", missing=missing)
    rows = _all(runs, "machine", "table_rows")
    plots.append(
        line_plot(
            "table-rows",
            "Rows in all tables",
            rows,
            x=_SAMPLES,
            y="rows",
            numbers=",.3s",
            layout={"yaxis": {"rangemode": "tozero", "tickformat": "~s"}},
        )
    )
    lines = [f"{s.name}: {s.y[-1]:,.0f} rows at the end." for s in rows]
    tables = _all(runs, "machine", "table_bytes")
    lines = [f"{line[:-1]}, {size_text(t.y[-1])}." for line, t in zip(lines, tables, strict=True)]
    return Section("memory", "Memory", lines, plots)


def _phases(id: str, title: str, named: list[str], spent: list[dict[str, float]], phases: Sequence[str]) -> Plot:
    bars = [(_WORDS.get(p, p), [s[p] for s in spent]) for p in phases]
    return bar_plot(id, title, named, bars, value="milliseconds a step", stacked=True)


def _visible(phases: Sequence[str], spent: Sequence[dict[str, float]]) -> list[str]:
    """The phases that take a part of some run's step that can be seen."""
    return [p for p in phases if any(s[p] > 0.001 * sum(s[q] for q in phases) for s in spent)]


def _unit(most: float) -> tuple[str, int]:
    """The unit in which values up to `most` bytes are easy to read."""
    units = ("KiB", "MiB", "GiB", "TiB")
    power = next((p for p in range(1, len(units)) if most < 1024 ** (p + 1)), len(units))
    return units[power - 1], 1024**power


def _all(runs: Sequence[RunData], kind: str, column: str) -> list[Series]:
    return [series for r in runs if (series := r.series(kind, column)) is not None]


def _by_split(runs: Sequence[RunData], column: str, over: str = "samples") -> list[Series]:
    """A column of the evaluations: a line for each run, and where there are several, for each split."""
    several = len({split for r in runs for split in r.splits}) > 1
    found = [
        (split, series)
        for r in runs
        for split in r.splits
        if (series := r.series("evaluate", column, over=over, split=split)) is not None
    ]
    return [Series(f"{s.name}, {split}" if several else s.name, s.x, s.y) for split, s in found]


def _best(run: RunData) -> str:
    """What a run that stopped early stands for."""
    line = (run.lines.get("evaluate") or [{}])[-1]
    if "best_step" not in line:
        return ""
    return (
        f"{run.name} was best at step {line['best_step']:,} of {line['step']:,}; its last figures, on {line['split']}, "
        f"are of that step."
    )


def _slices(runs: Sequence[RunData]) -> Table | None:
    """The metrics of slices in each run's last evaluation."""
    found = [(r.name, part, of) for r in runs for part, of in by_slice((r.lines.get("evaluate") or [{}])[-1]).items()]
    if not found:
        return None
    names = metric_names(of for _, _, of in found)
    rows = [(run, part, *(_metric([of], name) for name in ("samples", *names))) for run, part, of in found]
    return Table(("run", "slice", *(words(name) for name in ("samples", *names))), rows)


def _id(name: str) -> str:
    """A metric's name as part of an id."""
    return re.sub(r"[^\w-]", "-", name)


def _metric(evaluations: Sequence[dict[str, object]], name: str) -> str:
    value = evaluations[-1].get(name) if evaluations else None
    if not isinstance(value, float):
        return ""
    return f"{value:,.0f}" if name == "samples" else f"{value:.4f}"
