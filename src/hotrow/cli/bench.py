"""`hotrow bench`: one of Hotrow's claims measured on this machine, or all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hotrow.cli import app, refuse_unread
from hotrow.errors import SettingsError, nearest
from hotrow.files import replacing

ALL = "all"


@app.command()
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which benchmark, or all; without it, their names.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A small run, to see that it works; all is so.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON here.")] = None,
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Also write one HTML page here.")] = None,
) -> None:
    """Measure one of Hotrow's claims against a peer, in one run on this machine.

    "all" runs every benchmark in its quick form, each in a process of its own, and writes hotrow-bench.json and
    hotrow-bench.html unless told otherwise: what each source system published, what came out here, and what differs.

    \b
    Example:
      hotrow bench store --quick --json store.json
      hotrow bench all
    """
    from hotrow.bench import BENCHES
    from hotrow.cli import show

    if not name:
        refuse_unread(context, "it is about a benchmark; name one, or all.", "quick", "json_file", "page")
        print("\n".join([*sorted(BENCHES), ALL]))
        return
    if name not in BENCHES and name != ALL:
        raise SettingsError(f'There is no benchmark "{name}".{nearest(name, [*BENCHES, ALL])}')
    if name == ALL:
        json_file, page = json_file or Path("hotrow-bench.json"), page or Path("hotrow-bench.html")
    for file in (json_file, page):
        if file is not None and not file.absolute().parent.is_dir():
            raise SettingsError(f"There is no folder {file.parent} to write {file.name} in; make it first.")
    if name == ALL:
        from hotrow.bench.everything import run

        report = run(_say)
    else:
        from hotrow.bench.report import told

        with told(_say):
            report = BENCHES[name](quick)
    show.benchmarked(report)
    if json_file is not None:
        with replacing(json_file, "The report") as beside:
            beside.write_text(json.dumps(report, indent=1) + "\n")
    if page is not None:
        from hotrow.report.benchmarks import benchmarks_page

        benchmarks_page(report).write(page)
    _written(json_file, page)


def _written(*files: Path | None) -> None:
    if names := [str(file) for file in files if file is not None]:
        _say(f"Written: {', '.join(names)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
