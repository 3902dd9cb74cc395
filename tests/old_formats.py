"""What earlier versions wrote, made of what this one writes: formats change, and what they hold must still be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def data_set_of_version_2(folder: Path) -> None:
    """Without checksums of manifest, schema, footers and columns."""

    def old(data: dict[str, Any]) -> None:
        del data["schema_sha256"]
        for parts in data["splits"].values():
            for file in (file for part in parts for file in part["files"]):
                del file["checks"]

    _rewrite(folder / "manifest.json", 2, old)


def profile_of_version_1(folder: Path) -> None:
    """Without any checksum."""

    def old(data: dict[str, Any]) -> None:
        del data["changes_sha256"]
        for entry in data["keys"].values():
            del entry["sha256"]

    _rewrite(folder / "profile.json", 1, old)


def graph_of_version_1(file: Path) -> None:
    """Without any checksum."""
    with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
        schema, batches = reader.schema, [reader.get_batch(i) for i in range(reader.num_record_batches)]
    about = json.loads(schema.metadata[b"graph"])
    old = {name: about[name] for name in ("format", "between", "nodes", "edges")} | {"version": 1}
    schema = schema.with_metadata({"graph": json.dumps(old)})
    with pa.ipc.new_file(str(file), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _rewrite(file: Path, version: int, change: Any) -> None:
    data = json.loads(file.read_text())
    data["version"] = version
    del data["checksum"]
    change(data)
    file.write_text(json.dumps(data))
