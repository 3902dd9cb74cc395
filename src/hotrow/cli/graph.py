"""`hotrow graph`: who used what in a data set, for the step `neighbours`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, _give, app
from hotrow.errors import SettingsError


@app.command()
def graph(
    data: Annotated[Path, typer.Argument(help="The data set.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the graph is written; else DATA.graph.")
    ] = None,
    between: Annotated[
        str, typer.Option("--between", metavar="A,B", help="The two features whose keys are its nodes.")
    ] = "user,item",
    split: Annotated[str, typer.Option("--split", help="The split whose positive samples are its edges.")] = "train",
    positive: Annotated[float, typer.Option("--positive", help="The label from which a sample is an edge.")] = 0.5,
    label: Annotated[str, typer.Option("--label", help="Which label, where samples have several.")] = "",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the graph of the keys that two features have together in positive samples.

    A run draws neighbours from it by the step "neighbours"; the model "graph" is GraphSAGE on them.

    \b
    Example:
      hotrow graph data/clicks --between user,item --out clicks.graph
    """
    from hotrow.data import DataSet
    from hotrow.data.graph import Graph

    ends = [name.strip() for name in between.split(",")]
    if len(ends) != 2 or not all(ends):
        raise SettingsError(f'--between names two features, as in user,item, not "{between}".')
    place = out or data.with_name(f"{data.absolute().name}.graph")
    made = Graph.of_data_set(DataSet.open(data), split, ends, positive, label)
    made.save(place, overwrite)
    nodes = {end: len(side.keys) for end, side in zip(made.between, made.sides, strict=True)}
    _give({"graph": str(place), "nodes": nodes, "edges": made.edges, "bytes": place.stat().st_size}, as_json, _show)


def _show(data: dict[str, Any]) -> None:
    from hotrow.cli.show import _pairs
    from hotrow.sizes import size_text

    nodes = [
        (name, f"{count:,} nodes, {data['edges'] / max(count, 1):.1f} edges each")
        for name, count in data["nodes"].items()
    ]
    _pairs(
        "Graph", [*nodes, ("edges", f"{data['edges']:,}"), ("graph", f"{data['graph']}, {size_text(data['bytes'])}")]
    )
