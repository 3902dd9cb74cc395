"""`hotrow advise`: which techniques pay for a data set, by how much, and a run file that uses them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, _give, _percent, app, refuse_unread
from hotrow.errors import SettingsError
from hotrow.files import replacing


@app.command()
def advise(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(help="The data set.")],
    topology: Annotated[
        Path | None, typer.Option("--topology", metavar="CLUSTER.toml", help="The ranks and links there are.")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="What hot rows may take on a GPU.")
    ] = "512MiB",
    out: Annotated[Path | None, typer.Option("--out", metavar="RUN.toml", help="Write the run file here.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say in plain words which techniques pay for a data set here, how much they save, and write a run file.

    Nothing is trained: it is read off the profile beside the data set. What it says of values, rows and bytes is
    counted; what that does to the time of a step, hotrow report shows.

    \b
    Example:
      hotrow advise data/clicks --out run.toml
      hotrow train run.toml
      hotrow advise data/clicks --topology cluster.toml
    """
    import torch

    from hotrow.advise import advise as ask
    from hotrow.advise import relative
    from hotrow.data import DataSet
    from hotrow.plan.topology import load_topology
    from hotrow.sizes import parse_size

    if out is None:
        refuse_unread(context, "no file is written; name it with --out.", "overwrite")
    if out is not None and out.exists() and not overwrite:
        raise SettingsError(f"{out} is already there. Name another file, or replace it with --overwrite.")
    dataset = DataSet.open(data)
    percent = None

    def progress(done: int) -> None:
        nonlocal percent
        percent = percent or _percent("Reading, percent")
        percent(done, done, dataset.samples("train"))

    advice = ask(
        dataset,
        memory=parse_size(memory, "a memory budget"),
        accelerator=torch.cuda.is_available(),
        topology=None if topology is None else load_topology(topology),
        progress=progress,
    )
    text = advice.run_file(str(data) if out is None else relative(data, out))
    if out is not None:
        with replacing(out, "The run file", SettingsError) as beside:
            beside.write_text(text, "utf-8")
    said = {**advice.as_data(), "run_file": text, "written": None if out is None else str(out)}
    _give(said, as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _console

    say = _console().print
    say(f"{data['data']}: {data['samples']:,} samples to train on.", highlight=False, soft_wrap=True)
    for pays, head in ((True, "These pay here:"), (False, "These do not pay here:")):
        found = [t for t in data["techniques"] if t["pays"] is pays]
        if found:
            say(f"\n{head}", style="bold")
        for t in found:
            say(f"- {t['name']} ({t['source']}): {t['said']}", highlight=False, markup=False, soft_wrap=True)
    if data["written"]:
        say(f"\nWritten. Go on with: hotrow train {data['written']}", highlight=False, soft_wrap=True)
    else:
        settings = "\n".join(line for line in data["run_file"].splitlines() if not line.startswith("#"))
        say(
            f"\nA run file (write it with --out run.toml):\n\n{settings}", highlight=False, markup=False, soft_wrap=True
        )
