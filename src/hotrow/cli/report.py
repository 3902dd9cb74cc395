"""`hotrow report`: one page on a run, or on several beside each other; `--live` while it goes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, _give, app, refuse_unread
from hotrow.errors import SettingsError


@app.command()
def report(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are laid over each other.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Where the page is written; else RUN/report.html.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine and keep it up to date until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="For --live; 0 takes any that is free.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make one HTML page on how a run went: it opens in any browser, without a network, and can be sent.

    Loss and quality, throughput, where the time of a step goes, accesses and the plan, hits, traffic, repetition,
    memory. What a run has no figures for is named, with what would give them.

    \b
    Example:
      hotrow report runs/first
      hotrow report runs/first runs/second --out compared.html
      hotrow report runs/first --live
    """
    if live:
        if out is not None or as_json:
            raise SettingsError("--live serves the page and writes none; leave out --out and --json.")
        _serve(runs, port)
        return
    from hotrow.report.report import report as make_report

    refuse_unread(context, "the page is written, not served; give --live.", "port")
    place = out or runs[0] / "report.html"
    page = make_report(runs)
    page.write(place)
    sections = [{"id": s.id, "title": s.title, "plots": len(s.plots), "missing": s.missing} for s in page.sections]
    _give({"report": str(place), "title": page.title, "sections": sections}, as_json, _show)


def _serve(runs: list[Path], port: int) -> None:
    from hotrow.report.live import LivePages, LiveServer

    pages = LivePages(runs)
    pages()  # what is wrong with the folders is said here, and not in a browser
    with LiveServer(pages, port) as server:
        print(f"Open {server.url} in a browser. Ctrl-C ends it.", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs

    found = ", ".join(s["title"].lower() for s in data["sections"] if not s["missing"])
    left_out = ", ".join(s["title"].lower() for s in data["sections"] if s["missing"])
    _pairs("Report", [("page", data["report"]), ("has", found), ("has not", left_out or "nothing that is missing")])
