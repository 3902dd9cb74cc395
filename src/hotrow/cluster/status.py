"""`status`: what runs of a cluster, where, and how far it is: from the run folder, and from shards that run.

Steps and rates come from the metrics that the first trainer writes, processes from `state.json`; a shard that runs is
asked for its rows at its metrics port. Processes of this machine are looked for; those of a Ray cluster are believed to
be what the state says as long as its file is touched, which whoever supervises them does every few seconds.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotrow.errors import CheckpointError
from hotrow.train.checkpoint import Checkpoints
from hotrow.train.logs import RunFolder

_ASK_S = 1.0
_SILENT_S = 60.0
"""Seconds after which a state that nobody touched was left behind."""


def status(path: Path) -> dict[str, Any]:
    """Of the run in a run folder."""
    folder = RunFolder(path)
    file = folder.path / "cluster" / "state.json"
    try:
        said = _cluster(json.loads(file.read_text()), file)
    except FileNotFoundError:
        raise CheckpointError(f"{path} was not started by hotrow up: there is no {file}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} was altered: it cannot be read.") from None
    latest = Checkpoints(folder.checkpoints).latest()
    return {
        "run": str(folder.path),
        **said,
        "training": _training(folder),
        "checkpoint": None if latest is None else str(latest),
    }


def _cluster(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """The processes of a state, as they are now."""
    if state.get("host", socket.gethostname()) == socket.gethostname():
        supervised = _alive(state["pid"])
    else:
        supervised = time.time() - file.stat().st_mtime < _SILENT_S
    return {
        "phase": state["phase"] if supervised or state["phase"] == "ended" else "abandoned",
        "supervisor": {"pid": state["pid"], "alive": supervised},
        "shards": [{**shard, **_process(shard, supervised), **_rows(shard, supervised)} for shard in state["shards"]],
        "trainers": [{**trainer, **_process(trainer, supervised)} for trainer in state["trainers"]],
        "deaths": state["deaths"],
    }


def _training(folder: RunFolder) -> dict[str, Any]:
    """The last line of training metrics, and of each phase the share of a step."""
    found: dict[str, Any] = {}
    for line in folder.lines():
        if line["kind"] == "train":
            found |= {name: line[name] for name in ("step", "loss", "samples", "samples_per_second")}
        elif line["kind"] == "machine":
            steps = max(line["steps"], 1)
            phases = {name.removeprefix("seconds_"): s for name, s in line.items() if name.startswith("seconds_")}
            found["milliseconds"] = {name: 1000 * seconds / steps for name, seconds in phases.items()}
        elif line["kind"] == "staleness":
            found["staleness"] = {name: line[name] for name in ("rows_mean", "rows_most", "batches_most")}
    return found


def _process(said: dict[str, Any], supervised: bool) -> dict[str, Any]:
    alive = _runs(said, supervised)
    return {"alive": alive, "seconds": time.time() - said["since"] if alive else None}


def _runs(said: dict[str, Any], supervised: bool) -> bool:
    return supervised and said["alive"] if "host" in said else _alive(said["pid"])


def _alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and is not yet buried does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


def _rows(shard: dict[str, Any], supervised: bool) -> dict[str, Any]:
    """Rows and bytes that a running shard holds."""
    if not _runs(shard, supervised):
        return {"rows": None, "bytes": None}
    host = urlsplit(shard["address"]).hostname
    try:
        with urllib.request.urlopen(f"http://{host}:{shard['metrics']}/metrics", timeout=_ASK_S) as answer:
            text = answer.read().decode()
    except OSError:
        return {"rows": None, "bytes": None}
    held = {"rows": 0, "bytes": 0}
    for line in text.split("\n"):  # a table's name may hold what Python takes for the end of a line too
        for name in held:
            if line.startswith(f"hotrow_shard_{name}{{"):
                held[name] += round(float(line.rpartition(" ")[2]))
    return dict(held)
