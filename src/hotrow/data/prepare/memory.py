"""How much of the machine there is, and how much of it is asked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hotrow.errors import SettingsError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory_limit(asked: int | str | None) -> int:
    """In bytes: a number, a text such as "2GiB" or "500MB", or half of what the machine has."""
    if asked is None:
        return machine_memory() // 2
    if isinstance(asked, int):
        return asked
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", asked.lower())
    if found is None or found[2] not in _UNITS:
        raise SettingsError(f'memory: "{asked}" is not a size. Write it as 2GiB, 500MB or a number of bytes.')
    return int(float(found[1]) * _UNITS[found[2]])


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """What this machine, or the container it is, may use."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(_CGROUP.read_text()))
    except (OSError, ValueError):
        return whole
