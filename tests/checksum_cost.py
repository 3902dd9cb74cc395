"""What checksums cost: CPU time with and without them, by turns. `python tests/checksum_cost.py`, a quarter of an hour.

read    a made session log, prepared, read by `Reader`; without: Arrow opens the files, and nobody compares anything
push    8,192 of 300,000 rows at a time to a shard with a folder, row-wise Adagrad, client and shard together
store   the update of those rows alone, without the way to the shard
        without: the same native core, but rows get no mark that their sum is void (`Part::make_stale`)

A side is a process and counts its best turn of ten. Where a table lies in memory moves that by a tenth, so it is the
median of 15 pairs of processes. On two cores (AMD EPYC) that others used too: read +2.7% (+1.0% in a quieter hour);
push +0.8% at dim 16, -1.1% at dim 64; store 0.0% and +3.8%. The middle half of the pairs was within 5 points of each,
but for push at dim 16, 17, and store at dim 64, 8.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq

from hotrow import Table
from hotrow.data import DataSet, Reader, prepare
from hotrow.data.rowgroups import RowGroup
from hotrow.data.synth import SynthSettings, write_log
from hotrow.service.holding import Holding
from hotrow.service.shard import Shard
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.tiers import Gradients, Part
from hotrow.tiers.served import ServedTier

ROOT = Path(__file__).parents[1]
PAIRS, TURNS = 15, 10
SAMPLES, ROWS, BATCH, BATCHES = 1_500_000, 300_000, 8192, 40
MARK = "if (notes_ != nullptr) sum(slot) = kStale;"

Turn = Callable[[], None]


@contextlib.contextmanager
def reading(work: Path, dim: int, checked: bool) -> Iterator[Turn]:
    dataset = DataSet.open(work / "data")

    @contextlib.contextmanager
    def opened(self: RowGroup, file: Any, footers: Any) -> Iterator[pq.ParquetFile]:
        path = self.folder / file.file
        with pq.ParquetFile(path, metadata=footers.get(path)) as found:
            footers[path] = found.metadata
            yield found

    def turn() -> None:
        for _ in Reader(dataset, "train", 2048, threads=0):
            pass

    with contextlib.nullcontext() if checked else mock.patch.object(RowGroup, "_opened", opened):
        yield turn


def table(dim: int) -> Table:
    return Table(name="t", dim=dim, optimizer=RowWiseAdagrad(lr=0.05))


def drawn() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [np.unique(random.integers(0, ROWS, BATCH)) for _ in range(BATCHES)]


@contextlib.contextmanager
def pushing(work: Path, dim: int, checked: bool) -> Iterator[Turn]:
    batches, flat = drawn(), np.full(BATCH * dim, 0.01, np.float32)
    with (
        Shard("tcp://127.0.0.1:*", folder=work) as shard,
        contextlib.closing(ServedTier([shard.address], [table(dim)])) as tier,
    ):
        for first in range(0, ROWS, BATCH):
            tier.fetch([Part("t", 0, np.arange(first, min(first + BATCH, ROWS)), None, 0)], flat.copy(), 0)

        def turn() -> None:
            for keys in batches:
                tier.update([Part("t", 0, keys, None, 0)], Gradients(flat=flat[: len(keys) * dim]), 1)

        yield turn


@contextlib.contextmanager
def updating(work: Path, dim: int, checked: bool) -> Iterator[Turn]:
    batches, grads, pushes = drawn(), np.full((BATCH, dim), 0.01, np.float32), iter(range(1, 1 << 60))
    with contextlib.closing(Holding(work)) as holding:
        holding.open([table(dim).model_dump(mode="json")], seed=1, shard=0, shards=1)
        (store,) = holding.stores
        for first in range(0, ROWS, BATCH):
            store.fetch(np.arange(first, min(first + BATCH, ROWS)), 1)

        def turn() -> None:
            for keys in batches:
                ticket = holding.applied.begin(b"c" * 16, next(pushes))
                assert ticket is not None
                store.update(keys, grads[: len(keys)], lr=0.01, push=ticket.push)
                ticket.done()

        yield turn


SIDES = {"read": reading, "push": pushing, "store": updating}


def side(what: str, work: str, dim: str, checked: str) -> None:
    """Takes a turn for each line that comes, and says its CPU time."""
    with SIDES[what](Path(work), int(dim), checked == "with") as turn:
        turn()
        for _ in sys.stdin:
            began = time.process_time()
            turn()
            print(time.process_time() - began, flush=True)


def unmarked(work: Path) -> Path:
    """The native core, built without marks."""
    shutil.copytree(ROOT / "native", work / "native")
    shutil.copy(ROOT / "CMakeLists.txt", work)
    part = work / "native" / "part.hpp"
    assert part.read_text().count(MARK) == 1
    part.write_text(part.read_text().replace(MARK, "(void)slot;"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (
        ["cmake", "-S", str(work), "-B", str(work / "build"), "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"],
        ["ninja", "-C", str(work / "build")],
    ):
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return next((work / "build").glob("_native*.so"))


def ratio(what: str, dim: int, work: Path, native: Path) -> float:
    """The best turn with checksums by the best one without, of one pair of processes."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for checked in ("with", "without"):
            folder = work
            if what != "read":
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if what != "read" and checked == "without":
                paths = f"{ROOT / 'tests' / 'sanitized'}:{ROOT / 'src'}"
                environment |= {"HOTROW_NATIVE": str(native), "PYTHONPATH": paths}
            command = [sys.executable, __file__, what, str(folder), str(dim), checked]
            process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
            sides[checked] = stack.enter_context(process)
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(TURNS):
            for checked, process in sides.items():
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                best[checked] = min(best[checked], float(process.stdout.readline()))
        for process in sides.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    return best["with"] / best["without"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_log(SynthSettings(samples=SAMPLES), work / "log")
        prepare(work / "log", work / "data")
        native = unmarked(work)
        for what, dim in (("read", 0), ("push", 16), ("push", 64), ("store", 16), ("store", 64)):
            found = sorted(ratio(what, dim, work, native) for _ in range(PAIRS))
            of = f"{what}, dim {dim}" if dim else what
            middle = f"the middle half {found[PAIRS // 4] - 1:+.1%} to {found[-1 - PAIRS // 4] - 1:+.1%}"
            print(f"{of}: {median(found) - 1:+.1%}, {middle}", flush=True)


if __name__ == "__main__":
    side(*sys.argv[1:]) if len(sys.argv) > 1 else main()
