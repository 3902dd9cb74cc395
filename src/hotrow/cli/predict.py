"""`hotrow predict`: scores of a data set or a log, as Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, Overwrite, TrustModel, _give, app, refuse_unread


@app.command()
def predict(
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(help="A run folder (its newest checkpoint, or its best if it stops early) or a checkpoint."),
    ],
    data: Annotated[Path, typer.Argument(help="A data set, or a log: a file or a folder of Parquet, CSV or TSV.")],
    out: Annotated[Path, typer.Option("--out", help="The Parquet file to write.")] = Path("scores.parquet"),
    split: Annotated[
        str | None, typer.Option("--split", help="The split of a data set; the run's test split if not given.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="TOML or JSON that says what the columns of a log are.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="criteo, avazu, events, table, or auto to find out.")] = "auto",
    bad: Annotated[
        str, typer.Option("--bad", help="What becomes of rows that cannot be used: refuse, skip or missing.")
    ] = "refuse",
    trust_model: TrustModel = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Score a data set or a log with a trained model, into a Parquet file: a row for each sample, in order.

    A log may lack what is not known yet: label, weight, user, session, time.

    \b
    Example:
      hotrow predict runs/demo/run runs/demo/data --out scores.parquet
      hotrow predict runs/dlrm today.tsv --format criteo
    """
    from typing import get_args

    from hotrow.data.convert import BadPolicy
    from hotrow.data.dataset import MANIFEST
    from hotrow.data.sources import Format
    from hotrow.errors import SettingsError, nearest
    from hotrow.predictor import Predictor
    from hotrow.scores import write_scores
    from hotrow.train.progress import watching

    for name, value, known in (("format", form, get_args(Format)), ("bad", bad, get_args(BadPolicy))):
        if value not in known:
            raise SettingsError(f'There is no {name} "{value}".{nearest(value, known)}')
    if (data / MANIFEST).is_file():
        refuse_unread(context, "it is for a log, and this is a data set.", "schema", "form", "bad")
    else:
        refuse_unread(context, "it is for a data set, and a log has none.", "split")
    with Predictor(run, trust_model=trust_model) as predictor:
        found = write_scores(
            predictor,
            data,
            out,
            split=split,
            schema=schema,
            form=form,  # type: ignore[arg-type]  # checked above
            bad=bad,  # type: ignore[arg-type]
            overwrite=overwrite,
            progress=watching(),
        )
    _give(found, as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs

    rows = [(name, str(data[name])) for name in ("checkpoint", "data", "split") if name in data]
    rows.append(("samples", f"{data['samples']:,}"))
    rows += [(name.replace("_", " "), f"{mean:.4f}") for name, mean in data.items() if name.startswith("mean_")]
    if data.get("set_aside"):
        rows.append(("set aside", f"{data['set_aside']:,} rows"))
    _pairs("Scores", [*rows, ("scores", data["out"])])
