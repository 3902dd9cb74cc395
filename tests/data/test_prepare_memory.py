"""The memory limit holds for the command and all its workers, for logs that are larger than it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data import Column, DataSet, Schema

LIMIT = 384 << 20
LENGTH = 512
SCHEMA = Schema(label="y", features=(Column(name="k"), Column(name="h", kind="keys")), session="s", time="t")


def write_log(folder, size):
    """A log that takes `size` bytes in memory, and hardly any on disk; 16 samples a session, 64 sessions at a time."""
    each, rows, written = LENGTH * 8 + 32, 2048, 0
    folder.mkdir()
    (folder / "schema.json").write_text(SCHEMA.to_json())
    writer = None
    for first in range(0, size // each, rows):
        row = np.arange(first, first + rows)
        session = row % 64 + row // 1024 * 64
        offsets = pa.array(np.arange(0, rows * LENGTH + 1, LENGTH, dtype=np.int32))
        history = pa.ListArray.from_arrays(offsets, pa.array(np.repeat(session, LENGTH)))
        columns = {"y": (row % 2).astype(np.float32), "s": session, "t": row, "k": row % 977, "h": history}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(
            folder / "log.parquet", table.schema, compression="lz4", use_dictionary=False
        )
        writer.write_table(table)
        written += rows
    writer.close()
    return written


def resident(pid):
    """What a process and all below it hold; 0 for those that are gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, children))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what a process holds")
@pytest.mark.parametrize(
    "times",
    [
        1.2,
        pytest.param(10, marks=pytest.mark.slow),
    ],
)
def test_the_limit_holds_for_a_log_larger_than_it(tmp_path, times):
    rows = write_log(tmp_path / "log", int(times * LIMIT))
    command = [
        sys.executable,
        "-c",
        "from hotrow.cli import main; main()",
        "prepare",
        tmp_path / "log",
        tmp_path / "out",
    ]
    seen = []
    with subprocess.Popen([*command, "--memory", str(LIMIT), "--json"], stdout=subprocess.DEVNULL) as process:
        while process.returncode is None:
            seen.append(resident(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
    assert process.returncode == 0 and len(seen) > 10
    assert max(seen) <= LIMIT
    dataset = DataSet.open(tmp_path / "out")
    assert sum(map(dataset.samples, dataset.splits)) == rows
