"""`hotrow topology`: measures the links between ranks, or says what memory one machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, _give, app, refuse_unread
from hotrow.errors import RankError, SettingsError

if TYPE_CHECKING:
    from hotrow.world import World


@app.command()
def topology(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="CLUSTER.toml", help="Write it as a cluster file.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="gloo or nccl; nccl where every rank has a device of its own.")
    ] = "",
    megabytes: Annotated[
        float, typer.Option("--megabytes", min=0.01, help="What each rank sends each other one of its node or place.")
    ] = 4.0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure bandwidth and latency between nodes, over rails and within a node, by exchanges as training makes them.

    Started by torchrun on all nodes it measures the links of all ranks. A process alone says what memory there is, and
    leaves the links for you to write.

    \b
    Example:
      torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:29500 --no-python hotrow topology --out cluster.toml
      hotrow topology
    """
    from hotrow.plan.measure import measure
    from hotrow.world import World

    world = World.here()
    if out is None:
        refuse_unread(context, "no file is written; name it with --out.", "overwrite")
    if world.size == 1:
        refuse_unread(context, "one process measures no links; start it with torchrun.", "backend", "megabytes")
    if world.size > 1:
        _join(world, backend)
    try:
        found = measure(world, large=round(megabytes * (1 << 20)))
    finally:
        _leave(world.size)
    if world.rank != 0:
        return
    if out is not None:
        found.save(out, overwrite)
    shown = {**found.model_dump(), "size": found.size, **({} if out is None else {"file": str(out)})}
    _give(shown, as_json, _show)


def _join(world: World, backend: str) -> None:
    import torch
    import torch.distributed as dist

    chosen = backend or ("nccl" if torch.cuda.device_count() > world.node_rank else "gloo")
    if chosen not in ("gloo", "nccl"):
        raise SettingsError(f'There is no backend "{chosen}" to measure with; give gloo or nccl.')
    if chosen == "nccl":
        torch.cuda.set_device(world.node_rank)
    try:
        dist.init_process_group(chosen)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Rank {world.rank} of {world.size} could not join the others: {error}. Start them all with torchrun."
        ) from error


def _leave(size: int) -> None:
    import torch.distributed as dist

    if size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs
    from hotrow.plan.topology import LINKS, rate_text, time_text
    from hotrow.sizes import size_text

    rows = [
        ("nodes", f"{data['nodes']} of {data['ranks']} ranks"),
        ("memory of a rank", size_text(data["memory"])),
    ]
    for name, who in LINKS.items():
        link = data[name]
        if link is not None:
            told = f"{rate_text(link['bandwidth'])}, {time_text(link['latency'])} an exchange"
            rows.append((who, told + (f", headers {link['overhead']:.1%}" if link["overhead"] else "")))
    if all(data[name] is None for name in LINKS):
        rows += [("cores", str(os.cpu_count())), ("links", "one process has none; start it with torchrun to measure")]
    if "file" in data:
        rows.append(("written", data["file"]))
    _pairs("Topology", rows)
