"""`hotrow prepare`: a raw log becomes a data set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, _give, app


@app.command()
def prepare(
    source: Annotated[
        Path, typer.Argument(help="The log: a file or a folder of Parquet, CSV or TSV, also .gz or .zst.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the data set is put.")],
    schema: Annotated[
        Path | None, typer.Option("--schema", help="TOML or JSON that says what the columns are.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="criteo, avazu, events, table, or auto to find out.")] = "auto",
    split: Annotated[
        str | None,
        typer.Option("--split", help="What is test: last:0.1, time:T, samples:N, users:0.1 or none."),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            "--validation",
            help="Share of what is not test to stop early and tune by; 0.1 if not given, 0 for none.",
        ),
    ] = None,
    bad: Annotated[
        str,
        typer.Option("--bad", help="Rows that cannot be used: refuse, skip, or missing to take values as missing."),
    ] = "refuse",
    late: Annotated[
        str,
        typer.Option("--late", help="Samples that stand after a later one of their session: sort, skip or refuse."),
    ] = "sort",
    cluster: Annotated[
        bool, typer.Option("--cluster/--no-cluster", help="Bring sessions together, or keep the order of the log.")
    ] = True,
    dedup: Annotated[
        bool, typer.Option("--dedup/--no-dedup", help="Keep what repeats in a session once, or write every value.")
    ] = True,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="At most so much, workers included, as 2GiB; half the machine's if not given."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes at most; one a core if not given.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="local, or ray to run the tasks on a Ray cluster.")] = "local",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a data set of a log: checked, hashed, split, clustered by session, what repeats kept once.

    If it is stopped, or killed, the same command goes on where it was.

    \b
    Example:
      hotrow prepare day_0.tsv.zst data/criteo --format criteo --split last:0.1
      hotrow prepare clicks.parquet data/clicks --schema clicks.toml --memory 4GiB
    """
    from hotrow.data import prepare as prepare_log
    from hotrow.inspect import inspect as look
    from hotrow.train.progress import watching

    try:
        prepare_log(
            source,
            folder,
            schema=schema,
            format=form,  # type: ignore[arg-type]  # `prepare` names what it does not know
            split=split,
            validation=validation,
            bad=bad,  # type: ignore[arg-type]
            late=late,  # type: ignore[arg-type]
            cluster=cluster,
            dedup=dedup,
            memory=memory,
            workers=workers,
            engine=engine,  # type: ignore[arg-type]
            overwrite=overwrite,
            progress=watching(),
        )
    except KeyboardInterrupt:
        print("hotrow: stopped. The same command goes on from here.", file=sys.stderr)
        raise typer.Exit(130) from None
    _give(look(folder), as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli import show

    show.inspected(data)
    facts = data["facts"]
    lines = []
    if aside := facts.get("set_aside"):
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in aside["reasons"].items())
        lines.append(f"Set aside: {aside['rows']:,} rows ({reasons}). For example: {aside['examples'][0]}")
    lines += [f"Set aside: {file}" for file in facts.get("files_set_aside", ())]
    if missing := facts.get("taken_as_missing"):
        cells = ", ".join(f"{column}: {count:,}" for column, count in missing.items())
        lines.append(f"Taken as missing, cells that could not be used: {cells}.")
    if late := facts.get("late"):
        lines.append(f"Late: {late['samples']:,} samples stood after a later one of their session; {late['were']}.")
    if lines:
        print("\n" + "\n".join(lines))
