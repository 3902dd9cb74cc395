"""The form of a benchmark's result, for people and scripts alike.

    {"name": "store", "machine": {...}, "versions": {...}, "workload": {...},
     "results": [{"id": "store.vs_torch", "value": 7.1, "unit": "x", "must": 6.0, "aim": 10.0, "met": true,
                  "ours": {...}, "baseline": {...}, "note": ""}],
     "missing": [{"id": "store.vs_fbgemm_cpu", "reason": "fbgemm_gpu is not installed"}]}

A ratio is taken of medians over rounds in which the two sides take turns, so that a machine that slows down slows
both. A figure that could not be taken is in "missing" with the reason; none is filled in from elsewhere.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import hotrow

Report = dict[str, Any]

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """Within it every figure is said as soon as it is taken: some benchmarks run for many minutes."""
    before = _listener.set(say)
    try:
        yield
    finally:
        _listener.reset(before)


def figure(value: float, unit: str) -> str:
    """A value as people read it; a share and an AUC matter to the fourth place."""
    return f"{value:.{2 if value >= 1 else 4}f} {unit}".strip()


def new_report(name: str, workload: Mapping[str, Any], packages: Sequence[str] = ()) -> Report:
    """An empty report that says what was run, with what and where."""
    return {
        "name": name,
        "machine": machine(),
        "versions": {p: _version(p) for p in ("hotrow", "torch", "numpy", *packages)},
        "workload": dict(workload),
        "results": [],
        "missing": [],
    }


def add(
    report: Report,
    id: str,
    value: float,
    unit: str,
    *,
    must: float | None = None,
    aim: float | None = None,
    better: Literal["higher", "lower"] = "higher",
    ours: Mapping[str, Any] | None = None,
    baseline: Mapping[str, Any] | None = None,
    note: str = "",
) -> None:
    """Adds one figure. `must` is what it has to reach, `aim` what we want; None: it is only reported."""
    if say := _listener.get():
        say(f"{id}: {figure(value, unit)}")
    met = None if must is None else (value >= must if better == "higher" else value <= must)
    report["results"].append(
        {
            "id": id,
            "value": round(value, 4),
            "unit": unit,
            "must": must,
            "aim": aim,
            "met": met,
            "ours": dict(ours or {}),
            "baseline": dict(baseline or {}),
            "note": note,
        }
    )


def missing(report: Report, id: str, reason: str) -> None:
    """Names a figure that could not be taken here, and why."""
    report["missing"].append({"id": id, "reason": reason})


def reading(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread of some timings, in milliseconds."""
    ms = sorted(s * 1e3 for s in seconds)
    return {
        "median_ms": round(statistics.median(ms), 4),
        "p10_ms": round(ms[len(ms) // 10], 4),
        "p90_ms": round(ms[len(ms) * 9 // 10], 4),
        "count": len(ms),
    }


def take_turns(sides: Mapping[str, Callable[[int], None]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call of each side: in every round each side makes `calls` calls, with 0, 1, ... given to it.

    A peer's OpenMP threads may spin after their last work and take the next side's cores: with FBGEMM that was seen
    to last up to 0.2 s. So a turn begins with a pause, and with two calls that do not count, which wake the side's
    own threads.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            time.sleep(0.4)
            call(0)
            call(1 % calls)
            for i in range(calls):
                start = time.perf_counter()
                call(i)
                seconds[name].append(time.perf_counter() - start)
    return seconds


def machine() -> dict[str, Any]:
    """What this machine is, as far as it says."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = [line.split(":", 1)[1].strip() for line in cpu.read_text().splitlines() if "model name" in line]
        found["cpu"] = names[0] if names else "unknown"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return found


def _version(package: str) -> str:
    if package == "hotrow":
        return hotrow.__version__  # also where it runs from its source
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
