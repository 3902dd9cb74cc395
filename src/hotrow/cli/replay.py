"""`hotrow replay`: a step of a run again, and what it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, TrustModel, _give, app


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int, typer.Option("--step", metavar="N", help="The step, counted from 1 as metrics do.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where it is written; RUN/replay/step-N if not given.")
    ] = None,
    trust_model: TrustModel = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a step of a run again: its loss, gradients and rows, what in it is not finite, and its batch as Parquet.

    The steps since the last checkpoint before it are made again as the run made them. The run itself is not changed.

    \b
    Example:
      hotrow replay runs/demo/run --step 37
    """
    from hotrow.train.progress import watching
    from hotrow.train.replay import replay as make_again

    found = make_again(run, step, out=out, overwrite=overwrite, trust_model=trust_model, progress=watching())
    _give(found, as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _number, _pairs, _table

    said = f"the same at {data['logged']:,} lines" if data["differs_at"] is None else "another"
    other = "" if data["differs_at"] is None else f", first at step {data['differs_at']:,}"
    rows = [
        ("step", f"{data['step']:,}"),
        ("made again from", f"step {data['began']:,}"),
        ("samples", f"{data['samples']:,}"),
        ("loss", _finite(data["loss"], _number)),
        ("the run logged", f"{said}{other}" if data["logged"] else "none of these steps"),
        *([("not finite", data["wrong"])] if data["wrong"] else []),
        *(("note", note) for note in data["notes"]),
    ]
    _pairs("Replay", rows)
    for kind in ("weight", "feature"):
        grads = data["gradients" if kind == "weight" else "features"]
        cells = [(g[kind], _finite(g["largest"], _number), _finite(g["norm"], _number)) for g in grads]
        _table("", (f"gradients of {kind}", "largest", "norm"), cells)
    longest = [
        (table["table"], f"{table['rows']:,}", _finite(table["mean"], _number), _longest(table["largest"], _number))
        for table in data["rows"]
    ]
    _table("", ("rows of table", "rows", "mean norm", "longest"), longest)
    _pairs("", [("written", data["out"])])


def _longest(rows: list[dict[str, Any]], number: Any) -> str:
    return ", ".join(f"{row['key']}: {_finite(row['norm'], number)}" for row in rows[:3])


def _finite(value: float | None, number: Any) -> str:
    return "not finite" if value is None else str(number(value))
