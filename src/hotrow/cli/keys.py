"""`hotrow keys`: the keys by which shards and trainers on different machines know each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hotrow.cli import AsJson, _give, app


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the two key files are put.")],
    as_json: AsJson = False,
) -> None:
    """Make keys for shards and trainers: traffic between them is encrypted, and nobody else is let in.

    Copy shard.key to the hosts of shards and trainer.key to those of trainers. Both are secret.

    \b
    Example:
      hotrow keys keys
      hotrow shard --bind tcp://10.0.0.5:7700 --key keys/shard.key
    """
    from hotrow.service.curve import make_keys

    shard, trainer = make_keys(folder)
    _give({"shard": str(shard), "trainer": str(trainer)}, as_json, _show)


def _show(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _pairs

    _pairs("Keys", [("for shards", data["shard"]), ("for trainers", data["trainer"])])
