"""`hotrow flatten`: a data set back to one flat Parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, _give, _percent, app


@app.command()
def flatten(
    data: Annotated[Path, typer.Argument(help="The data set.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="The file to write.")],
    split: Annotated[
        list[str] | None,
        typer.Option("--split", help="A split to write; can be given several times. All of them if not given."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a data set as one flat Parquet file: one row a sample, what was kept once spelled out again.

    The file holds exactly the samples that were prepared, in the order of the data set.

    \b
    Example:
      hotrow flatten data/clicks clicks.parquet --split train
    """
    from hotrow.data import DataSet
    from hotrow.data.flatten import flatten as flatten_data

    percent = _percent("Writing, percent")
    written = flatten_data(
        DataSet.open(data),
        out,
        splits=split or (),
        overwrite=overwrite,
        progress=lambda done, total: percent(done, done, total),
    )
    _give(written, as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs, size

    rows = [
        ("file", data["path"]),
        ("splits", ", ".join(data["splits"])),
        ("samples", f"{data['samples']:,}"),
        ("size", size(data["bytes"])),
        ("in the data set", size(data["data_set_bytes"])),
    ]
    _pairs("Flat", rows)
