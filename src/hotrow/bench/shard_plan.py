"""What `hotrow bench shard` says without running a cluster: how long planning takes, and a cluster that is not here.

`plan_large` plans 1,000 tables of 10^6 rows from histograms of their counts, as a profile gives them.
`simulate_large` draws steps of 16 nodes with 8 ranks each and counts what row-wise, its deduplicated forms and the plan
exchange.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from hotrow.plan.cost import HOT, TableUse
from hotrow.plan.plan import row_bytes
from hotrow.plan.replay import replay_zipf
from hotrow.plan.shard import TIERS, shard
from hotrow.plan.topology import Link, Topology
from hotrow.plan.traffic import Wire
from hotrow.plan.uses import Use
from hotrow.plan.zipf import Zipf
from hotrow.profile.counts import Histogram
from hotrow.table import Table

NVLINK_100G = Topology(
    nodes=16,
    ranks=8,
    memory=80 << 30,
    between=Link(bandwidth=100e9 / 8, latency=20e-6),
    within=Link(bandwidth=450e9, latency=10e-6),
)
"""16 hosts of 8 devices: NVLink of 450 GB/s a direction within, one card of 100 Gbit/s a host between."""
SAMPLES = 100_000_000


def histograms(tables: int = 1000, rows: int = 1_000_000) -> list[tuple[Table, Histogram]]:
    """Counts of tables used by Zipf laws from 0.9 to 1.2, three lookups a sample, dims from 16 to 128."""
    out = []
    for at in range(tables):
        table = Table(name=f"table{at}", dim=16 << at % 4)
        out.append((table, Zipf(0.9 + 0.3 * (at % 31) / 30, rows).histogram(3 * SAMPLES)))
    return out


def plan_large(
    tables: int = 1000, rows: int = 1_000_000, topology: Topology = NVLINK_100G, wire: Wire = "float32"
) -> dict[str, Any]:
    """Seconds from histograms to a choice, and the most memory the process has had by then."""
    import numpy as np

    made = histograms(tables, rows)
    begin = time.perf_counter()
    used = [
        TableUse(
            table,
            row_bytes(table),
            classes.counts,
            classes.keys,
            Use.of_counts(classes.counts, SAMPLES, 1024, topology),
            hot=np.arange(min(HOT, int(classes.keys.sum()))),
        )
        for table, classes in made
    ]
    chosen = shard(used, topology, wire=wire)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tables": tables,
        "rows": sum(t.rows for t in used),
        "classes": sum(len(t.keys) for t in used),
        "seconds": seconds,
        "peak_bytes": peak if sys.platform == "darwin" else 1024 * peak,
        "dedup": chosen.dedup,
        "copied": {tier: sum(chosen.rows(tier).values()) for tier in TIERS[:2]},
        "step_seconds": chosen.seconds,
    }


def simulate_large(quick: bool = False, wire: Wire = "float32") -> dict[str, Any]:
    """The table of plans for 16 nodes x 8 ranks: a sequence model's keys, Zipf 1.05 over 10^7 rows of dim 64."""
    lookups = 4096 if quick else 32768
    return replay_zipf(NVLINK_100G, 1.05, 10_000_000, lookups, tables=1 if quick else 4, steps=1, wire=wire)
