"""`hotrow up` and `hotrow status`: shards and trainers of a run, started together and looked at."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, Settings, _give, app, going_on
from hotrow.errors import SettingsError

if TYPE_CHECKING:
    from hotrow.cluster.local import LocalCluster
    from hotrow.run import Run


@app.command()
def up(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    shards: Annotated[int, typer.Option("--shards", min=0, help="Shards to start; 0: trainers own the rows.")] = 1,
    trainers: Annotated[int, typer.Option("--trainers", min=1, help="Trainers to start.")] = 1,
    cluster: Annotated[
        str, typer.Option("--cluster", help="Where: local, plain processes of this machine; ray; or ray://HOST:PORT.")
    ] = "local",
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Overwrite = False,
    deaths: Annotated[int, typer.Option("--deaths", min=0, help="Processes that may die and are started again.")] = 20,
    shard_memory: Annotated[
        str | None, typer.Option("--shard-memory", help="Ray: memory that a shard's host must have for it, as 64GiB.")
    ] = None,
    shard_cpus: Annotated[float | None, typer.Option("--shard-cpus", min=0, help="Ray: CPUs of a shard, 1.")] = None,
    shard_folder: Annotated[
        Path | None,
        typer.Option("--shard-folder", help="Ray: where hosts keep rows, as /dev/shm; else in the run folder."),
    ] = None,
    trainer_cpus: Annotated[
        float | None, typer.Option("--trainer-cpus", min=0, help="Ray: CPUs of a trainer, 1.")
    ] = None,
    trainer_gpus: Annotated[
        float | None, typer.Option("--trainer-gpus", min=0, help="Ray: GPUs of a trainer; 1 if train.device is cuda.")
    ] = None,
    wait: Annotated[
        float | None, typer.Option("--wait", min=0, help="Ray: seconds to wait for hosts with room, 60.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start the shards and trainers of a run, wire them together, and see it to its end.

    A process that is killed is started again: a shard with the rows it had, trainers from the last checkpoint. Logs and
    rows are below the run folder, in cluster/. Ctrl-C ends the run with a checkpoint.

    On a Ray cluster (hotrow[ray]) shards go to hosts with memory and trainers to hosts with GPUs; run folder and data
    set must be on a file system that all hosts share.

    \b
    Example:
      hotrow up run.toml --shards 2 --trainers 2
      hotrow up run.toml --shards 4 --trainers 8 --cluster ray://head:10001 --shard-memory 64GiB --trainer-gpus 1
      hotrow status runs/run
    """
    from hotrow.cli import show
    from hotrow.run import load_run

    on_ray = {
        "--shard-memory": shard_memory,
        "--shard-cpus": shard_cpus,
        "--shard-folder": shard_folder,
        "--trainer-cpus": trainer_cpus,
        "--trainer-gpus": trainer_gpus,
        "--wait": wait,
    }
    given = [name for name, value in on_ray.items() if value is not None]
    if cluster == "local" and given:
        raise SettingsError(f"{given[0]} is for --cluster ray: processes of this machine share all of it.")
    if resume and overwrite:
        raise SettingsError("--resume goes on with a run and --overwrite removes it; give one of them.")
    run = load_run(run_file, settings or [])
    how: dict[str, Any] = {
        "shards": shards,
        "trainers": trainers,
        "resume": resume,
        "overwrite": overwrite,
        "deaths": deaths,
    }
    result = _cluster(cluster, run, how, on_ray).up()
    if "steps" in result:
        _give(result, as_json, show.trained)
    if result["stopped_by"]:
        print(
            f"hotrow: stopped by {result['stopped_by']}. Go on with: {going_on('up', run_file, settings or [])} "
            f"--shards {shards} --trainers {trainers} --cluster {cluster}",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.Signals[result["stopped_by"]])


def _cluster(where: str, run: Run, how: dict[str, Any], on_ray: Mapping[str, Any]) -> LocalCluster:
    """The cluster that --cluster names."""
    from hotrow.cluster.local import LocalCluster

    if where == "local":
        return LocalCluster(run, **how)
    if where != "ray" and not where.startswith("ray://"):
        raise SettingsError(
            f'--cluster "{where}": there is "local", plain processes of this machine; "ray", the Ray cluster of this '
            f'machine or one started for the run; and "ray://HOST:PORT", a Ray cluster elsewhere.'
        )
    if where != "ray" and not re.fullmatch(r"ray://[^/:]+:\d+", where):
        raise SettingsError(f"--cluster {where}: the port is missing; Ray's clients connect to ray://HOST:10001.")
    from hotrow.cluster.ray_cluster import RayCluster
    from hotrow.cluster.ray_room import Needs
    from hotrow.sizes import parse_size

    memory, gpus, wait = on_ray["--shard-memory"], on_ray["--trainer-gpus"], on_ray["--wait"]
    cpus = {role: 1.0 if (said := on_ray[f"--{role}-cpus"]) is None else said for role in ("shard", "trainer")}
    return RayCluster(
        run,
        address=where,
        shard_needs=Needs(cpus=cpus["shard"], memory=0 if memory is None else parse_size(memory, "a shard's memory")),
        trainer_needs=Needs(cpus=cpus["trainer"], gpus=float(run.train.device == "cuda") if gpus is None else gpus),
        shard_folder=on_ray["--shard-folder"],
        wait=60.0 if wait is None else wait,
        **how,
    )


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
            f"{process['pid']} on {process['host']}" if "host" in process else str(process["pid"]),
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
