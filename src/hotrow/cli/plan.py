"""`hotrow plan`: which rows are worth a place in a small fast memory, and how accesses have moved since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, Settings, _give, _percent, app, refuse_unread
from hotrow.errors import SettingsError

if TYPE_CHECKING:
    from hotrow.profile.counts import KeyCounts
    from hotrow.run import Run


@app.command()
def plan(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(help="The data set.")],
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="What hot rows may take in all, as in 512MiB.")
    ] = "",
    run_file: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.toml", help="The run whose tables they are; else dim 16.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the plan is written; else DATA.plan.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="The split that is counted.")] = "train",
    profile: Annotated[
        Path | None, typer.Option("--profile", help="A profile of this data set; else the one beside it.")
    ] = None,
    share: Annotated[
        float | None, typer.Option("--sample", metavar="SHARE", help="Count a sample instead, as in 0.05.")
    ] = None,
    thresholds: Annotated[
        list[int] | None,
        typer.Option("--threshold", min=1, help="Also say what rows used at least so often cost; several times."),
    ] = None,
    other: Annotated[
        Path | None, typer.Option("--drift", metavar="OTHER", help="A data set or profile: how far it has moved.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.html", help="Also draw the access curve and the cut.")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", metavar="CLUSTER.toml", help="Plan for these ranks and links, not for a budget."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Beside it what row-wise, table-wise and column-wise would take.")
    ] = False,
    extra: Annotated[
        str, typer.Option("--extra", metavar="SIZE", help="What copies may take on each rank; else all its memory.")
    ] = "",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Samples a rank takes in a step; else the run's, or 4096.")
    ] = None,
    wire: Annotated[
        str, typer.Option("--wire", help="Rows and gradients between ranks: float32, bfloat16 or float16.")
    ] = "float32",
    since: Annotated[
        Path | None, typer.Option("--since", metavar="PLAN", help="An earlier plan: what must move from it.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Choose the rows of all tables that take most accesses within a memory budget, and write the plan.

    A row costs its values, its optimizer state and its place in the index. Shares are certain where the whole data
    set was counted; from a sample they are 99% intervals. With --drift and without --memory nothing is planned.

    With --topology rows are placed on the ranks of a cluster instead: on every rank, on every node, or on one rank of
    the world, whichever makes a step's exchanges quickest within the memory of each rank.

    \b
    Example:
      hotrow plan data/criteo --memory 512MiB --run run.toml --picture plan.html
      hotrow plan data/criteo --memory 512MiB --sample 0.05 --threshold 1000
      hotrow plan data/monday --drift data/tuesday
      hotrow plan data/criteo --topology cluster.toml --compare --extra 64MiB
    """
    from hotrow.data import DataSet
    from hotrow.plan.budget import count_keys, plan_data_set
    from hotrow.sizes import parse_size

    if topology is not None and memory:
        raise SettingsError("--memory is a budget on one device and --topology has each rank's; give one of them.")
    if topology is None and (compare or extra or since is not None or batch_size is not None or wire != "float32"):
        raise SettingsError(
            "--compare, --extra, --since, --batch-size and --wire are about ranks; give their --topology CLUSTER.toml."
        )
    if not memory and other is None and topology is None:
        raise SettingsError("Say how much memory hot rows may take, as in --memory 512MiB.")
    if not memory:
        refuse_unread(context, "it is about rows chosen for a budget; give --memory.", "thresholds")
    if not memory and topology is None:
        refuse_unread(context, "without --memory nothing is planned.", "out", "picture", "overwrite")
    if share is not None and profile is not None:
        raise SettingsError("--sample counts anew and --profile does not; give one of them.")
    dataset = DataSet.open(data)
    run = _run(run_file, settings)
    steps = run.data.steps if run is not None else ()
    if steps:
        refuse_unread(context, "keys are counted anew as data.steps of the run leave them.", "profile")
    shown: dict[str, Any] = {"data": str(data)}
    counted = count_keys(
        dataset, split=split, profile=profile, share=share, steps=steps, progress=_reading(dataset.samples(split))
    )
    if memory:
        place = out or data.with_name(f"{data.absolute().name}.plan")
        tables = _tables(run, settings, list(counted.counts))
        made, shown = plan_data_set(
            dataset, tables, parse_size(memory, "a memory budget"), counted, split=split, thresholds=thresholds or ()
        )
        made.save(place, overwrite)
        shown["plan"] = str(place)
    if topology is not None:
        from hotrow.cli.plan_ranks import plan_ranks

        made, shown = plan_ranks(
            dataset,
            counted,
            run,
            _tables(run, settings, list(counted.counts)),
            topology,
            extra=extra,
            batch_size=batch_size,
            wire=wire,
            compare=compare,
            since=since,
            split=split,
        )
        place = out or data.with_name(f"{data.absolute().name}.plan")
        made.save(place, overwrite)
        shown["plan"] = str(place)
    if other is not None:
        shown["drift"] = {"other": str(other), "tables": _drift(counted.counts, other, split)}
    if picture is not None and "plan" in shown:
        from hotrow.report.access_curve import draw_curve
        from hotrow.report.tier_curves import draw_tiers

        (draw_curve if topology is None else draw_tiers)(shown, picture)
        shown["picture"] = str(picture)
    _give(shown, as_json, _show)


def _run(run_file: Path | None, settings: list[str] | None) -> Run | None:
    from hotrow.run import load_run

    return None if run_file is None else load_run(run_file, settings or [])


def _tables(run: Run | None, settings: list[str] | None, names: Sequence[str]) -> list[Any]:
    """The tables with their settings: the run's, or the defaults with what --set says of [tables]."""
    from hotrow.run import Tables
    from hotrow.settings import parse
    from hotrow.toml import override_setting

    if run is not None:
        return run.tables_of(names)
    said: dict[str, Any] = {"tables": {}}
    for setting in settings or []:
        override_setting(said, setting)
    for name in said:
        if name != "tables":
            raise SettingsError(f"--set {name}...: without --run only tables can be set, as in tables.dim=64.")
    defaults = parse(Tables, said["tables"], "tables")
    return [defaults.table(name) for name in names]


def _drift(counts: Mapping[str, KeyCounts], other: Path, split: str) -> dict[str, Any]:
    from hotrow.data import DataSet
    from hotrow.data.dataset import MANIFEST
    from hotrow.profile import Profile
    from hotrow.profile.drift import drift

    if (other / MANIFEST).is_file():
        dataset = DataSet.open(other)
        known, _ = Profile.of_data_set(dataset, split, _reading(dataset.samples(split)))
    else:
        known = Profile.load(other)
    found = drift(counts, {table: known.table(table) for table in known.tables})
    return {name: moved.as_data() for name, moved in found.items()}


def _reading(total: int) -> Callable[[int], None]:
    """Shows progress once there is some: a saved profile needs no reading."""
    percent: Callable[[int, int, int], None] | None = None

    def progress(done: int) -> None:
        nonlocal percent
        percent = percent or _percent("Reading, percent")
        percent(done, done, total)

    return progress


def _show(data: Mapping[str, Any]) -> None:
    if "topology" in data:
        from hotrow.cli.plan_ranks import show_ranks

        show_ranks(data)
    elif "plan" in data:
        _show_plan(data)
    if "drift" in data:
        _show_drift(data["drift"])


def _show_plan(data: Mapping[str, Any]) -> None:
    from hotrow.capabilities import kept_in_words
    from hotrow.cli.show import _console, _pairs, _table
    from hotrow.report.access_curve import curve_as_text
    from hotrow.sizes import size_text

    counted = "all samples" if data["counted"] == "all" else f"{data['fraction']:.1%} of the samples"
    _pairs(
        "Plan",
        [
            ("data", f"{data['data']}, split {data['split']}; counted {counted}"),
            ("memory", f"{size_text(data['bytes'])} of {size_text(data['memory'])}, {data['rows']:,} rows"),
            ("accesses to hot rows", _interval(data["share"])),
            ("samples with hot rows only", _interval(data["samples"])),
            *([("kept", kept_in_words(data["kept"]))] if data["kept"] else []),
            ("plan", data["plan"]),
            *([("picture", data["picture"])] if "picture" in data else []),
        ],
    )
    rows = [
        (name, f"{t['rows']:,}", f"{t['keys']:,}", str(t["row_bytes"]), size_text(t["bytes"]), _interval(t["share"]))
        for name, t in sorted(data["tables"].items(), key=lambda item: -item[1]["bytes"])
    ]
    _table("", ("table", "hot rows", "keys", "bytes a row", "memory", "of its accesses"), rows)
    _console().print("\nShare of accesses by memory, best rows first", highlight=False)
    for line in curve_as_text(data["curve"], data["memory"]):
        _console().print(line, highlight=False, markup=False, soft_wrap=True)
    costs = [
        (name, f"{c['threshold']:,}", _count(c["rows"]), size_text(c["bytes"]["value"]), _interval(c["share"]))
        for name, of in data["thresholds"].items()
        for c in of
    ]
    _table("", ("table", "used at least", "rows", "memory", "of its accesses"), costs)


def _show_drift(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _console, _table

    rows = [
        (
            name,
            f"{d['new']:.1%}",
            f"{d['total_variation']:.3f}",
            f"{d['noise']:.3f}",
            f"{d['jensen_shannon']:.3f}",
            *(f"{h['kept']:.0%} / {h['overlap']:.0%}" for h in d["hot"]),
        )
        for name, d in data["tables"].items()
    ]
    heads = ("table", "new keys", "distance", "noise", "JS bits", "top 0.1%", "top 1%", "top 10%")
    _table(f"Drift to {data['other']}", heads, rows)
    _console().print(
        "new keys: accesses to them. distance: total variation, of which noise is to be expected of any two samples.\n"
        "top: what the hottest rows here take there, as a share of what the hottest there do / rows in common.",
        highlight=False,
        soft_wrap=True,
    )


def _interval(share: Mapping[str, float]) -> str:
    if share["low"] == share["high"]:
        return f"{share['value']:.2%}"
    sure = "at least, at most" if share["level"] == 1 else f"{share['level']:.0%}"
    return f"{share['value']:.2%} ({share['low']:.2%} to {share['high']:.2%}, {sure})"


def _count(rows: Mapping[str, float]) -> str:
    if rows["low"] == rows["high"]:
        return f"{rows['value']:,.0f}"
    return f"{rows['value']:,.0f} ({rows['low']:,.0f} to {rows['high']:,.0f})"
