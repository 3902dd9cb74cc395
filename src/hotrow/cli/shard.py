"""`hotrow shard`: serves the rows of one part of the key space."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from hotrow.cli import AsJson, app
from hotrow.errors import SettingsError


@app.command()
def shard(
    bind: Annotated[
        str, typer.Option("--bind", help="Where to listen; with port * a free one is taken.")
    ] = "tcp://127.0.0.1:7700",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Keep rows in files here, so that they outlive the process.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The shards' key file; needed beyond this machine (hotrow keys).")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Serve /metrics and /health at PORT or HOST:PORT; 0 takes a free one."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Requests answered at the same time.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Serve rows to trainers until SIGTERM or Ctrl-C; what was received is answered first.

    Tables are opened by the first trainer that connects. Beyond this machine a shard needs a key.

    \b
    Example:
      hotrow shard --bind tcp://127.0.0.1:7700 --metrics 9100
      hotrow keys keys && hotrow shard --bind tcp://10.0.0.5:7700 --key keys/shard.key --folder /dev/shm/rows
    """
    from hotrow.service.curve import KeyFile
    from hotrow.service.metrics import Metrics
    from hotrow.service.shard import Shard

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    shard = Shard(bind, key=None if key is None else KeyFile.load(key, "shard"), folder=folder, threads=threads)
    with shard:
        server = None if metrics is None else Metrics(shard, *_host_and_port(metrics))
        said = {"address": shard.address, "metrics": None if server is None else server.port}
        if as_json:
            print(json.dumps(said), flush=True)
        else:
            print(f"Serving at {shard.address}", file=sys.stderr)
        while not ended.wait(1.0):
            if not shard.serving:
                raise SettingsError(f"The shard at {shard.address} failed; the reason stands above.")
        if server is not None:
            server.close()


def _host_and_port(text: str) -> tuple[int, str]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f'--metrics "{text}": give a port, as 9100, or an address with one, as 10.0.0.5:9100.')
    return int(port), host or "127.0.0.1"
