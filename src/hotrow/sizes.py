"""Sizes of memory as people write them: `512MiB`, `1.5 GB`, `4096`."""

from __future__ import annotations

import re

from hotrow.errors import SettingsError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{form}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for form, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_size(text: str, what: str = "a size") -> int:
    """The bytes that `text` says; KiB, MiB, GiB and TiB count by 1024, kB, MB, GB and TB by 1000."""
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise SettingsError(f'"{text}" is not {what}. Write a number and a unit, as in 512MiB, 1.5GB or 4096.')
    return int(float(found[1].replace("_", "")) * _UNITS[found[2].lower()])


def size_text(count: float) -> str:
    """Bytes as people read them, by 1024 as memory is counted."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
