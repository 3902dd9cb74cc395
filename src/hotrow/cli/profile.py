"""`hotrow profile`: how much the samples of a data set repeat each other, and how unequal its keys are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, _give, _percent, app


@app.command()
def profile(
    data: Annotated[Path, typer.Argument(help="The data set.")],
    split: Annotated[str, typer.Option("--split", help="The split to look at.")] = "train",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples a batch.")] = 4096,
    batches: Annotated[
        int, typer.Option("--batches", min=0, help="Batches to read to see what they reach; 0 reads none.")
    ] = 20,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.html", help="Also draw it, as one page to open or send.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much samples repeat each other, what keeping repeats once brings, and how unequal keys are.

    A data set made by prepare has its profile beside it; of another one it is made now, by reading it.

    \b
    Example:
      hotrow profile data/clicks --batch-size 8192 --picture clicks.html
    """
    from hotrow.data import DataSet
    from hotrow.profile import Profile
    from hotrow.profile.summary import summarise

    dataset = DataSet.open(data)
    total = dataset.samples(split)
    percent = None

    def progress(done: int) -> None:
        nonlocal percent
        percent = percent or _percent("Reading, percent")
        percent(done, done, total)

    found, saved = Profile.of_data_set(dataset, split, progress)
    summary = {**summarise(dataset, found, split, batch_size, batches), "profile": "saved" if saved else "made"}
    if picture is not None:
        from hotrow.report import draw_profile

        draw_profile(summary, picture)
    _give(summary, as_json, _show)


_FACTORS = ("expected", "in_files", "in_batches")
_HEADS = ("factor", "files", "batches")


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs, _table

    _pairs("Profile", _facts(data))
    _table(
        "",
        ("feature", "length", "keys", "top 1%", "Zipf"),
        [(f["name"], *_skew(f)) for f in data["features"]],
    )
    if data["sessions"] is None:
        return
    _table(
        "",
        ("column", "unchanged", "█ ▒ slid", *_HEADS),
        [
            (c["name"], f"{c['unchanged']:.3f}", _bar(c["unchanged"], c["unchanged_or_slid"]), *_factors(c))
            for c in (*data["features"], *data["dense"])
        ],
    )
    _table(
        "",
        ("group", "columns", "slide", *_HEADS),
        [(g["name"], " ".join(g["columns"]), " ".join(g["slides"]), *_factors(g)) for g in data["groups"]],
    )


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    from hotrow.cli.show import _number, size

    facts = [
        ("path", data["path"]),
        ("split", f"{data['split']}, {data['samples']:,} samples, {size(data['bytes'])}"),
    ]
    if data["sessions"] is not None:
        exact, slid = data["exact_repeats"], data["repeats_with_slides"]
        clustered, shuffled = data["met_in_batch"], data["met_in_batch_unclustered"]
        facts += [
            (
                "sessions" if data["clustered"] else "runs of a session",
                f"{data['sessions']:,} of {_number(data['samples_per_session'])} samples"
                + ("" if data["clustered"] else "; not clustered, in the order of the log"),
            ),
            ("repeated values", f"{exact:.1%} exactly, {slid:.1%} with lists that slid"),
            (
                f"in a batch of {data['batch_size']:,}",
                f"{clustered:.2f} samples of a session; {shuffled:.2f} if shuffled",
            ),
            ("factor", _told(data["factor"])),
        ]
    if not data["kept_once"]:
        found = "; the groups below are those that would pay" if data["groups"] else ""
        facts.append(("kept once", f"nothing{found}"))
    return facts


def _skew(feature: Mapping[str, Any]) -> tuple[str, ...]:
    from hotrow.cli.show import _number

    return (
        _number(feature["length"]),
        ("" if feature["counts_exact"] else "~") + f"{feature['distinct']:,}",
        f"{feature['top_1_percent']:.1%}",
        f"{feature['zipf']:.2f}",
    )


def _told(factor: Mapping[str, float | None]) -> str:
    told = [f"{factor['expected']:.2f} expected"]
    told += [f"{factor[kind]:.2f} {kind.replace('_', ' ')}" for kind in _FACTORS[1:] if factor[kind] is not None]
    return ", ".join(told)


def _factors(column: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple("" if column.get(kind) is None else f"{column[kind]:.2f}" for kind in _FACTORS)


def _bar(share: float, with_slides: float = 0.0, width: int = 20) -> str:
    """Full as far as `share`, light as far as `with_slides`."""
    full = round(share * width)
    light = max(round(with_slides * width) - full, 0)
    return ("█" * full + "▒" * light).ljust(width, "·")
