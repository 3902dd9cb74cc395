"""`hotrow up` and `hotrow status`: shards and trainers of a run, started together and looked at."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, Settings, _give, app
from hotrow.errors import SettingsError


@app.command()
def up(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    shards: Annotated[int, typer.Option("--shards", min=0, help="Shards to start; 0: trainers own the rows.")] = 1,
    trainers: Annotated[int, typer.Option("--trainers", min=1, help="Trainers to start.")] = 1,
    cluster: Annotated[str, typer.Option("--cluster", help="Where: local, plain processes of this machine.")] = "local",
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Overwrite = False,
    deaths: Annotated[int, typer.Option("--deaths", min=0, help="Processes that may die and are started again.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Start the shards and trainers of a run, wire them together, and see it to its end.

    A process that is killed is started again: a shard with the rows it had, trainers from the last checkpoint. Logs and
    rows are below the run folder, in cluster/. Ctrl-C ends the run with a checkpoint.

    \b
    Example:
      hotrow up run.toml --shards 2 --trainers 2
      hotrow status runs/run
    """
    from hotrow.cli import show
    from hotrow.cluster.local import LocalCluster
    from hotrow.run import load_run

    if cluster != "local":
        raise SettingsError(f'--cluster "{cluster}": there is "local", plain processes of this machine.')
    if resume and overwrite:
        raise SettingsError("--resume goes on with a run and --overwrite removes it; give one of them.")
    run = load_run(run_file, settings or [])
    result = LocalCluster(run, shards=shards, trainers=trainers, resume=resume, overwrite=overwrite, deaths=deaths).up()
    if "steps" in result:
        _give(result, as_json, show.trained)
    if result["stopped_by"]:
        print(
            f"hotrow: stopped by {result['stopped_by']}. Go on with: hotrow up {run_file} --shards {shards} "
            f"--trainers {trainers} --resume",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.Signals[result["stopped_by"]])


@app.command()
def status(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, or the run file.")],
    as_json: AsJson = False,
) -> None:
    """Show what runs of a cluster that `hotrow up` started: processes, steps, rates, rows, and what died.

    \b
    Example:
      hotrow status runs/run
    """
    from hotrow.cluster.status import status as look

    if path.suffix == ".toml":
        from hotrow.run import load_run

        path = load_run(path).output.folder
    _give(look(path), as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs, _table
    from hotrow.sizes import size_text
    from hotrow.train.progress import duration

    training = data["training"]
    rows = [("run", data["run"]), ("phase", data["phase"])]
    if "step" in training:
        rows += [
            ("step", f"{training['step']:,}"),
            ("loss", f"{training['loss']:.4f}"),
            ("samples a second", f"{training['samples_per_second']:,.0f}"),
        ]
    rows.append(("checkpoint", data["checkpoint"] or "none yet"))
    _pairs("", rows)
    processes = [
        (
            process["name"],
            str(process["pid"]),
            duration(process["seconds"]) if process["alive"] else "ended",
            process.get("address", ""),
            "" if process.get("rows") is None else f"{process['rows']:,}",
            "" if process.get("bytes") is None else size_text(process["bytes"]),
        )
        for process in (*data["shards"], *data["trainers"])
    ]
    _table("", ("", "process", "running", "address", "rows", "memory"), processes)
    if data["deaths"]:
        died = [
            (d["who"], d["how"], "not back" if d["back_after"] is None else f"{d['back_after']:.1f} s")
            for d in data["deaths"]
        ]
        _table("Died", ("", "how", "back after"), died)
