"""JSON files that carry a checksum of what they say, and one way to read them.

A sealed object has a last field, `checksum`: the SHA-256 of the object without it, written as compact JSON in the order
of the file. So a change of any value, name or order is noticed, and a change of white space is not. It guards against
damage and against edits by hand, not against somebody who computes the checksum anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from hotrow.errors import DataError, HotrowError

SEAL = "checksum"


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data as JSON gives it back, with its checksum."""
    as_read: dict[str, Any] = json.loads(json.dumps(data, allow_nan=False))
    return {**as_read, SEAL: _checksum(as_read)}


def to_text(data: Mapping[str, Any], indent: int | None = 1) -> str:
    """A sealed object as a file holds it."""
    return json.dumps(sealed(data), indent=indent) + "\n"


def unsealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data without its checksum; `ValueError` if it has none or another."""
    rest = {name: value for name, value in data.items() if name != SEAL}
    if data.get(SEAL) != _checksum(rest):
        raise ValueError(f'its "{SEAL}" is not that of what it says')
    return rest


def read_object(path: Path, what: str, error: type[HotrowError] = DataError) -> dict[str, Any]:
    """The JSON object in a file; an `error` that begins with `what` the file is if it holds none."""
    try:
        data = json.loads(path.read_bytes().decode())
    except OSError as cause:
        raise error(f"{what} {path} cannot be read: {cause.strerror or cause}.") from None
    except (ValueError, RecursionError) as cause:
        raise error(f"{what} {path} cannot be read: {cause}.") from None
    if not isinstance(data, dict):
        raise error(f"{what} {path} cannot be read: it holds no JSON object.")
    return data


def _checksum(data: Mapping[str, Any]) -> str:
    return sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()
