"""Lines of metrics about the machine: where the time of steps went, what is held in memory, what tiers did.

They are lines of their own kinds, since they differ from one run of the same settings to the next:

    machine   steps (since the last such line), seconds_wait, _fetch, _model, _update, _read, _group (`phases.py`),
              memory_bytes (of this process), gpu_bytes, table_rows, table_bytes
    tier      tier, and what `Tier.counters` says: hits, misses, bytes_in, bytes_out, links, staleness, ...

Counters of a tier are totals of this process: a resumed run begins at 0 again.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from hotrow.embeddings import Embeddings
from hotrow.train.phases import Phases


class Machine:
    """Counts steps between two lines; `lines` reads everything there is to read."""

    def __init__(self, embeddings: Embeddings, phases: Phases, device: torch.device) -> None:
        self._embeddings, self._phases, self._device = embeddings, phases, device
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """Training goes on after `step`: what happened before is not counted."""
        self._phases.take()
        self._step = step

    def lines(self, step: int) -> list[tuple[str, dict[str, Any]]]:
        """The lines due after `step`."""
        seconds = {f"seconds_{phase}": spent for phase, spent in sorted(self._phases.take().items())}
        tables = self._embeddings.stats().values()
        values: dict[str, Any] = {
            "steps": step - (self._step or 0),
            **seconds,
            "memory_bytes": memory_bytes(),
            "table_rows": sum(table["rows"] for table in tables),
            "table_bytes": sum(table["bytes"] for table in tables),
        }
        if self._device.type == "cuda":
            values["gpu_bytes"] = torch.cuda.memory_allocated(self._device)
        self._step = step
        counted = {name: tier.counters() for name, tier in self._embeddings.router.tiers.items()}
        return [("machine", values), *(("tier", {"tier": name, **said}) for name, said in counted.items() if said)]


def memory_bytes() -> int:
    """The memory of this process that is in use now; where only the most ever used is known, that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
