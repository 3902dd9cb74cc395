"""`hotrow bench all`: every benchmark in its quick form, one after the other, as one report.

Each runs in a process of its own: peers' threads, memory and settings of one do not reach the next, and one that
fails costs its own figures only, which are then missing with what it said.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hotrow.bench import BENCHES
from hotrow.bench.claims import CLAIMS, PEERS, command_of
from hotrow.bench.report import Report, missing, new_report

LIMIT_S = 1800.0


def run(say: Callable[[str], None]) -> Report:
    """All figures that quick runs give here; `say` is told how far it is."""
    report = new_report("all", {"quick": True}, ("triton", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu"))
    begun = time.monotonic()
    for number, name in enumerate(BENCHES, 1):
        passed = time.monotonic() - begun
        say(f"{name}: {number} of {len(BENCHES)}, {passed / 60:.1f} min so far")
        found = _one(name)
        if isinstance(found, str):
            for id in dict.fromkeys([c.id for c in CLAIMS] + [id for _, id in PEERS]):
                if command_of(id) == name:
                    missing(report, id, found)
            continue
        report["workload"][name] = found["workload"]
        report["machine"] |= found["machine"]
        report["results"] += found["results"]
        report["missing"] += found["missing"]
    taken = {result["id"] for result in report["results"]}
    report["missing"] = [gap for gap in report["missing"] if gap["id"] not in taken]
    return report


def _one(name: str) -> Report | str:
    """The report of one benchmark, or what it said when it failed."""
    with tempfile.TemporaryDirectory(prefix="hotrow-bench-") as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "hotrow", "bench", name, "--quick", "--json", str(file)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"hotrow bench {name} --quick took longer than {LIMIT_S / 60:.0f} minutes"
        if done.returncode != 0 or not file.exists():
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return f"hotrow bench {name} --quick failed and said: {last}"
        report: Report = json.loads(file.read_text("utf-8"))
        return report
