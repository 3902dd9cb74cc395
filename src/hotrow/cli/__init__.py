"""The command `hotrow`. Results go to standard output, progress and errors to standard error.

A `HotrowError` is one sentence and exit code 1; a wrong call is 2, as shells expect; a run stopped by a
signal is 128 and the signal's number. An error that no user can cause keeps its stack trace. Nothing heavy is
imported before a command needs it, so `hotrow --help` is quick.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow import __version__
from hotrow.errors import HotrowError, SettingsError

app = typer.Typer(
    name="hotrow",
    help="Train recommendation models whose embedding tables outgrow the machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; can be given several times."),
]
TrustModel = Annotated[
    bool, typer.Option("--trust-model", help="Import the model class that the run names, which is not Hotrow's.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is already there.")]


def main() -> None:
    """The entry point."""
    try:
        app(prog_name="hotrow")
    except HotrowError as error:
        print(f"hotrow: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hotrow {__version__}")
        raise typer.Exit


@app.callback()
def _hotrow(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def synth(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where the log is put.")],
    samples: Annotated[int, typer.Option("--samples", min=1, help="How many samples to make.")] = 400_000,
    preset: Annotated[
        str, typer.Option("--preset", help="Settings to begin with: recd repeats as much as the logs RecD reports on.")
    ] = "",
    settings: Settings = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a session log whose truth is known, so that the best AUC a model can reach is known too.

    What can be set is in SynthSettings of hotrow.data.synth: users, items, seed, strength, ...

    \b
    Example:
      hotrow synth logs/small --samples 100000 --set users=2000 --set seed=7
      hotrow synth logs/recd --preset recd
      hotrow prepare logs/small data/small
    """
    from hotrow.cli import show
    from hotrow.data.synth import SynthSettings, preset_settings, write_log
    from hotrow.settings import parse
    from hotrow.toml import override_setting

    wanted: dict[str, Any] = {**preset_settings(preset), "samples": samples}
    for setting in settings or []:
        override_setting(wanted, setting)
    if wanted["samples"] != samples:
        refuse_unread(context, "--set samples says another number.", "samples")
    percent = _percent("Making, percent")
    facts = write_log(
        parse(SynthSettings, wanted),
        folder,
        overwrite=overwrite,
        progress=lambda done, total: percent(done, done, total),
    )
    _give({"path": str(folder), **facts}, as_json, show.made)


@app.command()
def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    follow: Annotated[
        str | None,
        typer.Option("--follow", metavar="LOG", help="Train on what arrives in a folder, or kafka://HOST:PORT/TOPIC."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a model as a run file says, or go on with a run that was stopped.

    Relative paths in the run file are taken from the folder it stands in.

    \b
    Example:
      hotrow train run.toml --set train.epochs=2 --set tables.item.dim=32
      hotrow train run.toml --resume
      hotrow train run.toml --resume --follow incoming
    """
    from hotrow.cli import show
    from hotrow.run import load_run
    from hotrow.train.compatibility import following
    from hotrow.train.progress import watching
    from hotrow.train.trainer import train as train_run

    if resume and overwrite:
        raise SettingsError("--resume goes on with a run and --overwrite removes it; give one of them.")
    settings = list(settings or [])
    again = going_on("train", run_file, settings) + (f" --follow {shlex.quote(follow)}" if follow is not None else "")
    if follow is not None:
        log = follow if "://" in follow else str(Path(follow).resolve())
        settings.append(f"data.follow.path={json.dumps(log)}")
    run = load_run(run_file, settings)
    if follow is not None:
        run, unread = following(run)
        if unread:
            print(f"hotrow: a followed log is read once, as it arrives, without {', '.join(unread)}.", file=sys.stderr)
    result = train_run(run, resume=resume, overwrite=overwrite, progress=watching())
    stopped_by_signal = result.stopped.startswith("SIG")
    _give(show.result_as_data(result), as_json, show.trained)
    if stopped_by_signal:
        print(
            f"hotrow: stopped by {result.stopped} after step {result.steps:,}; the checkpoint is "
            f"{result.checkpoint}. Go on with: {again}",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.Signals[result.stopped])


def going_on(command: str, run_file: Path, settings: list[str]) -> str:
    """The command that goes on with a run that was started with these settings."""
    given = "".join(f" --set {shlex.quote(setting)}" for setting in settings)
    return f"hotrow {command} {shlex.quote(str(run_file))}{given} --resume"


@app.command()
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(help="A run folder (its newest checkpoint, or its best if it stops early) or a checkpoint."),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="Another data set than the one the run was trained on.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="The split to score; the run's test split if not given.")
    ] = None,
    slices: Annotated[
        list[str] | None,
        typer.Option("--slice", metavar="COLUMN", help="Metrics for each value of a column too; may stand twice."),
    ] = None,
    trust_model: TrustModel = False,
    as_json: AsJson = False,
) -> None:
    """Score a split of a data set with a trained model.

    \b
    Example:
      hotrow evaluate runs/demo --split test
    """
    from hotrow.cli import show
    from hotrow.train.evaluate import evaluate_path
    from hotrow.train.progress import watching

    checkpoint, name, metrics = evaluate_path(
        path, split, data, watching(), slices=slices or (), trust_model=trust_model
    )
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    _give({"checkpoint": str(checkpoint), "split": name, "metrics": finite}, as_json, show.evaluated)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A data set, a run folder or a checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Show what is in a data set, a run folder or a checkpoint.

    \b
    Example:
      hotrow inspect runs/demo
    """
    from hotrow.cli import show
    from hotrow.inspect import inspect as look

    _give(look(path), as_json, show.inspected)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--folder", help="Where to put log, data set and run.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Make a session log, prepare it, train on it, and compare with the best AUC reachable.

    What an earlier demo left in the folder is replaced.

    \b
    Example:
      hotrow demo --folder /tmp/demo
    """
    from hotrow.cli import show
    from hotrow.demo import demo as run_demo
    from hotrow.train.progress import watching

    _give(run_demo(folder, progress=watching()), as_json, show.demonstrated)


def refuse_unread(context: typer.Context, why: str, *names: str) -> None:
    """Refuses options that were given where nobody would read them; `names` are those of the parameters."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise SettingsError(f"{option.opts[0]}: {why} Leave it out.")


def _percent(what: str) -> Callable[[int, int, int], None]:
    """Shows rows done, bytes done and bytes in all as progress in percent."""
    from hotrow.train.progress import watching

    progress, rows_before = watching(), 0
    progress.start(100, 0, what)

    def show(rows: int, done: int, total: int) -> None:
        nonlocal rows_before
        progress.step(100 * done // max(total, 1), rows - rows_before, None)
        rows_before = rows
        if done >= total:
            progress.stop()

    return show


def _give(data: dict[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(data, indent=1, default=str, allow_nan=False))
    else:
        show(data)


_COMMANDS = (
    "advise",
    "bench",
    "doctor",
    "flatten",
    "graph",
    "keys",
    "plan",
    "predict",
    "prepare",
    "profile",
    "replay",
    "report",
    "shard",
    "simulate",
    "topology",
    "up",
)
for _command in _COMMANDS:
    import_module(f"hotrow.cli.{_command}")  # each adds its command
