"""`hotrow simulate`: plans replayed over a data set or a distribution, for clusters there need not be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Settings, _give, app, refuse_unread
from hotrow.cli.plan_ranks import BATCH, show_compared, wire_of
from hotrow.errors import SettingsError


@app.command()
def simulate(
    context: typer.Context,
    data: Annotated[Path | None, typer.Argument(help="A data set to replay; or give --zipf.")] = None,
    topology: Annotated[
        Path | None, typer.Option("--topology", metavar="CLUSTER.toml", help="The ranks and links to simulate.")
    ] = None,
    zipf: Annotated[
        float | None, typer.Option("--zipf", metavar="S", help="Draw keys from Zipf's law with this exponent.")
    ] = None,
    rows: Annotated[float, typer.Option("--rows", help="With --zipf: rows of a table.")] = 1e6,
    tables: Annotated[int, typer.Option("--tables", min=1, help="With --zipf: how many tables.")] = 1,
    dim: Annotated[int, typer.Option("--dim", min=1, help="With --zipf: values of a row.")] = 64,
    lookups: Annotated[
        int, typer.Option("--lookups", min=1, help="With --zipf: keys a rank looks up of a table in a step.")
    ] = 8192,
    run_file: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.toml", help="With DATA: the run whose tables they are.")
    ] = None,
    settings: Settings = None,
    split: Annotated[str, typer.Option("--split", help="With DATA: the split that is replayed.")] = "train",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="With DATA: samples a rank takes in a step.")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="A plan to replay; else the best is made.")
    ] = None,
    extra: Annotated[
        str, typer.Option("--extra", metavar="SIZE", help="What copies of a plan made now may take on each rank.")
    ] = "",
    wire: Annotated[str, typer.Option("--wire", help="float32, bfloat16 or float16.")] = "float32",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to replay.")] = 3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="With --zipf: of what is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Count what the ranks of a cluster would exchange, entry by entry, with a plan and with row-wise beside it.

    Bytes are exact for the batches replayed; times are those bytes over the topology's links. Beside them stands what
    the cost model expected of the same plan.

    \b
    Example:
      hotrow simulate --zipf 1.05 --rows 1e7 --tables 4 --topology cluster.toml
      hotrow simulate data/clicks --topology cluster.toml --plan clicks.plan --steps 10
    """
    from hotrow.plan.replay import replay_data_set, replay_zipf
    from hotrow.plan.topology import load_topology
    from hotrow.sizes import parse_size

    if (data is None) == (zipf is None):
        raise SettingsError("Say what to replay, one of two: a data set, or a distribution as in --zipf 1.05.")
    if topology is None:
        raise SettingsError("Say for which cluster, as in --topology cluster.toml; hotrow topology measures one.")
    if data is None:
        refuse_unread(
            context, "it is about a data set, and --zipf needs none.", "run_file", "settings", "split", "batch_size"
        )
    else:
        refuse_unread(context, "it is for --zipf.", "rows", "tables", "dim", "lookups", "seed")
    if plan_file is not None:
        refuse_unread(context, "it is for a plan made now, and --plan gives one.", "extra")
    cluster = load_topology(topology)
    asked: dict[str, Any] = {
        "wire": wire_of(wire),
        "steps": steps,
        "extra": parse_size(extra, "a size of memory") if extra else None,
        "plan": _plan(plan_file),
    }
    if data is None:
        assert zipf is not None
        shown = replay_zipf(cluster, zipf, int(rows), lookups, tables=tables, dim=dim, seed=seed, **asked)
    else:
        from hotrow.cli.plan import _reading, _run, _tables
        from hotrow.data import DataSet
        from hotrow.plan.budget import count_keys

        dataset, run = DataSet.open(data), _run(run_file, settings)
        changes = run.data.steps if run is not None else ()
        counted = count_keys(dataset, split=split, steps=changes, progress=_reading(dataset.samples(split)))
        batch = batch_size or (run.data.batch_size if run is not None else BATCH)
        known = _tables(run, settings, list(counted.counts))
        shown = replay_data_set(dataset, known, counted, cluster, batch, split=split, changes=changes, **asked)
    _give(shown, as_json, _show)


def _plan(path: Path | None) -> Any:
    from hotrow.plan import Plan

    return None if path is None else Plan.load(path)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.plan_ranks import _ranks
    from hotrow.cli.show import _pairs
    from hotrow.sizes import size_text

    copies, memory, off = data["copies"], data["memory"], data["compare"][-1]["error"]
    _pairs(
        "Simulated",
        [
            ("keys", data["keys"]),
            ("ranks", _ranks(data["topology"])),
            ("steps", f"{data['steps']}; a rank looks up {data['lookups']:,.0f} keys in each, rows as {data['wire']}"),
            (
                "plan",
                f"{copies['replicated']:,} rows on every rank, {copies['node']:,} on every node, distinct keys of a "
                f"{data['dedup']}",
            ),
            ("memory of a rank", f"{size_text(memory['plan'])}; row-wise takes {size_text(memory['row_wise'])}"),
            (
                "expected",
                f"{off['between']:+.2%} between nodes, {off['within']:+.2%} within, {off['seconds']:+.2%} of the time",
            ),
        ],
    )
    show_compared(data["compare"])
