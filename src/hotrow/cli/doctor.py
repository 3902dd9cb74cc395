"""`hotrow doctor`: what this machine can run of Hotrow, and the command that gets what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from hotrow.cli import AsJson, _give, app

_MARKS = {"ok": "yes", "missing": "no", "broken": "BROKEN"}


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine has and can run, what is missing, and the command that gets it.

    Ends with code 1 if something is missing without which nothing trains.

    \b
    Example:
      hotrow doctor
      hotrow doctor --json
    """
    from hotrow.doctor import diagnose

    found = diagnose()
    _give(found, as_json, _show)
    if not found["healthy"]:
        raise typer.Exit(1)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _console, _pairs, _table

    _table(
        f"Hotrow {data['hotrow']} on this machine",
        ("", "there", "found", "good for"),
        [(f["name"], _MARKS[f["state"]], f["found"], f["good_for"]) for f in data["findings"]],
        left=True,
    )
    _console().print()
    _pairs("It can", [(words, "yes" if can else "no") for words, can in data["can"].items()])
    fixes = [(f["name"], f["fix"]) for f in data["findings"] if f["fix"]]
    if fixes:
        _console().print()
        _pairs("To get what is missing", fixes)
