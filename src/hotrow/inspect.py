"""What is in a folder: a data set, a checkpoint or a run, told apart by the manifest or settings found there.

Only manifests and sizes are read, so looking at a large folder costs as little as at a small one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrow.errors import DataError


def inspect(path: Path) -> dict[str, Any]:
    """What `path` holds, as plain data; `kind` is "data set", "checkpoint" or "run"."""
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"There is no folder {path}; inspect a data set, a run folder or a checkpoint.")
    if (path / "settings.toml").is_file():
        return _run(path)
    if (path / "dense.npz").is_file():
        return _checkpoint(path)
    if (path / "manifest.json").is_file():
        return _data_set(path)
    raise DataError(f"{path} is not a data set, a run folder or a checkpoint: it has no manifest or settings.")


def _data_set(path: Path) -> dict[str, Any]:
    from hotrow.data import DataSet

    data = DataSet.open(path)
    schema = data.schema
    return {
        "kind": "data set",
        "path": str(path),
        "bytes": data.bytes,
        "splits": {
            split: {"samples": data.samples(split), "files": sum(len(part.files) for part in data.parts(split))}
            for split in data.splits
        },
        "features": [{"name": f.name, "kind": f.kind, "table": f.table, "pooling": f.pooling} for f in schema.features],
        "groups": [
            {"name": g.name, "columns": list(g.columns), "slides": list(g.slides), "rows": data.rows(g.name)}
            for g in schema.groups or ()
        ],
        "dense": list(schema.dense),
        "labels": list(schema.label_names),
        "facts": dict(data.facts),
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from hotrow.train.checkpoint import Checkpoint, chain_of

    checkpoint = Checkpoint(path)
    state = checkpoint.state
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": checkpoint.step,
        "samples": state["samples"],
        "bytes": _bytes(path),
        "stands_on": [str(base) for base in chain_of(path)],
        "tables": _tables(checkpoint.rows),
        "dense": {
            name.removeprefix("model/"): list(array.shape)
            for name, array in checkpoint.arrays().items()
            if name.startswith("model/")
        },
        "metrics": state["metrics"],
    }


def _run(path: Path) -> dict[str, Any]:
    from hotrow.train.checkpoint import Checkpoints
    from hotrow.train.logs import RunFolder

    folder = RunFolder(path)
    run = folder.run()
    lines = list(folder.lines())
    evaluations = [line for line in lines if line["kind"] == "evaluate"]
    steps = [line for line in lines if line["kind"] == "train"]
    checkpoints, chosen = Checkpoints(folder.checkpoints).all(), Checkpoints(folder.checkpoints).chosen()
    return {
        "kind": "run",
        "path": str(path),
        "data": str(run.data.path),
        "model": run.model.name,
        "policy": run.policy.name,
        "last": steps[-1] if steps else None,
        "evaluations": evaluations,
        "checkpoints": [
            {
                "path": str(checkpoint),
                "step": int(checkpoint.name.removeprefix("step-")),
                "bytes": _bytes(checkpoint),
            }
            for checkpoint in checkpoints
        ],
        "checkpoint": None if chosen is None else str(chosen),
        "tables": _tables(checkpoints[-1] / "rows") if checkpoints else {},
    }


def _tables(rows: Path) -> dict[str, Any]:
    """The tables of a snapshot; `rows` and `bytes` of an incremental one are those that changed."""
    from hotrow.store.snapshot import read_manifest

    found: dict[str, Any] = {}
    for said in read_manifest(rows)["tables"]:
        table = found.setdefault(
            said["name"],
            {key: said[key] for key in ("dim", "dtype", "optimizer")} | {"rows": 0, "bytes": 0},
        )
        table["rows"] += said["rows"]["count"]
        table["bytes"] += said["rows"]["bytes"]
    return found


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
