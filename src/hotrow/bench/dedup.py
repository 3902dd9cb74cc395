"""`hotrow bench dedup`: what keeping, reading and computing repeated values once brings, from the log to the model.

Both sides are Hotrow on one log: ours as `prepare` makes it, clustered by session and deduplicated; the baseline in the
order of the log with every value of every sample, in the same file format, codec and level. The log is `synth`'s preset
`recd`, which repeats as the logs that RecD (Zhao et al., 2023) reports on.

- storage: bytes of the Parquet files. The baseline counts with the better one of two sizes of its row groups.
- read: epochs through `Reader`, shuffled, with the same preprocessing of every column on both sides.
- train: `hotrow train` of a sequence transformer on each data set, each time in a process of its own. Both sides keep
  freed memory for the next step (`keep_memory`): else the baseline, whose tensors are larger, spends seconds of every
  step on new pages. Ours has smaller operations, so on all cores it loses more to other processes than the baseline
  does; the same on one core is reported beside it.
- batch: the largest whose step stays within a fixed memory, each size in a process of its own.
- factor_error: of what the profile expects to what an epoch's batches reach; the worst of all groups and features.

Real session logs, where `real_logs` finds some, are reported and have nothing to reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow.parquet as pq

from hotrow.bench import real_logs
from hotrow.bench.dedup_step import DIM, MODEL, PEAK_RESET, keep_memory
from hotrow.bench.rate import Measured, elsewhere, speeds
from hotrow.bench.report import Report, add, missing, new_report, reading, take_turns
from hotrow.data import DataSet, Reader, prepare
from hotrow.data.schema import Schema
from hotrow.data.steps import Clip, Hash, Log, Normalise, Step, Truncate
from hotrow.data.synth import SynthSettings, preset_settings, write_log
from hotrow.profile import Factors, Profile, expected, reached

BATCH = 4096
LARGER_ROW_GROUP = 1 << 16
BUCKETS, LAST = 1 << 20, 80
PROCESSOR = Path("/proc/stat")


class Size(NamedTuple):
    """How much is measured: samples of the logs, calls and rounds of turns; what batches must fit, how precisely.

    Of steps, how many do not count, how many do, and rounds.
    """

    samples: int
    real_samples: int
    epochs: tuple[int, int]
    steps: tuple[int, int, int]
    one_core: tuple[int, int, int] | None
    memory: int
    precision: float


FULL = Size(
    samples=200_000,
    real_samples=200_000,
    epochs=(3, 4),
    steps=(2, 8, 5),
    one_core=(1, 4, 3),
    memory=1 << 30,
    precision=0.03,
)
QUICK = Size(
    samples=24_000, real_samples=0, epochs=(1, 2), steps=(1, 2, 1), one_core=None, memory=1 << 27, precision=0.4
)


class Sides(NamedTuple):
    """One log as two data sets."""

    ours: DataSet
    plain: DataSet


def run(quick: bool = False) -> Report:
    """All figures; `quick` measures less of everything."""
    size = QUICK if quick else FULL
    settings = SynthSettings.model_validate({**preset_settings("recd"), "samples": size.samples})
    workload = {
        "log": f"synth, preset recd, {size.samples:,} samples, {settings.samples_per_session} a session",
        "batch": BATCH,
        "baseline": "the same code with clustering and deduplication off",
        "preprocessing": f"keys hashed, lists cut to {LAST}, dense values clipped, log, normalised",
        "model": f"transformer, {MODEL.layers} layers, dim {DIM}, last {MODEL.length} of a history",
    }
    report = new_report("dedup", workload, ("pyarrow", "duckdb"))
    with TemporaryDirectory(prefix="hotrow-bench-") as name:
        folder = Path(name)
        write_log(settings, folder / "log")
        sides = _prepared(folder / "log")
        _storage(report, sides, folder)
        _read(report, "dedup.read", sides, size, must=1.79, aim=3.0)
        _factor(report, "dedup", sides.ours, must=0.05, aim=0.02)
        for log in real_logs.LOGS:
            _real(report, log, folder, size)
        _batch(report, sides, size)
        _train(report, sides, size)
    return report


def _prepared(log: Path, schema: Schema | None = None) -> Sides:
    ours = prepare(log, log.with_name(f"{log.stem}-ours"), schema=schema, split="none")
    plain = log.with_name(f"{log.stem}-plain")
    return Sides(ours, prepare(log, plain, schema=schema, split="none", cluster=False, dedup=False))


def _storage(report: Report, sides: Sides, folder: Path) -> None:
    def without_dedup(cluster: bool) -> int:
        out = folder / f"larger-{cluster}"
        made = prepare(folder / "log", out, split="none", cluster=cluster, dedup=False, row_group=LARGER_ROW_GROUP)
        return made.bytes

    plain = {"bytes": sides.plain.bytes, "bytes_in_larger_row_groups": without_dedup(cluster=False)}
    least, clustered = min(plain.values()), without_dedup(cluster=True)
    add(
        report,
        "dedup.storage",
        least / sides.ours.bytes,
        "x",
        must=3.71,
        aim=5.0,
        ours={"bytes": sides.ours.bytes},
        baseline={**plain, "bytes_if_clustered_only": clustered},
        note=f"{_repeats(sides.ours)}; clustering without deduplication {least / clustered:.2f} x",
    )


def _repeats(dataset: DataSet) -> str:
    found = Profile.of_data_set(dataset)[0].repetition
    return (
        f"{found.samples_per_session:.1f} samples a session, {found.exact_share:.0%} of values exact repeats, "
        f"{found.slid_share:.0%} counting histories that slid"
    )


def preprocessing(schema: Schema) -> tuple[Step, ...]:
    """Steps for every column."""
    lists = tuple(f.name for f in schema.features if f.kind == "keys")
    keys = tuple(f.name for f in schema.features if f.kind == "key")
    steps: tuple[Step, ...] = (
        Hash(columns=keys, buckets=BUCKETS),
        Truncate(columns=lists, length=LAST),
        Hash(columns=lists, buckets=BUCKETS, salt=1),
    )
    if not schema.dense:
        return steps
    return (
        *steps,
        Clip(columns=schema.dense, low=-0.9, high=0.9),
        Log(columns=schema.dense),
        Normalise(columns=schema.dense, mean=0.1, std=0.5),
    )


def _read(
    report: Report, id: str, sides: Sides, size: Size, must: float | None = None, aim: float | None = None
) -> None:
    def epochs(dataset: DataSet) -> Callable[[int], None]:
        reader = Reader(dataset, "train", BATCH, steps=preprocessing(dataset.schema))

        def epoch(_: int) -> None:
            deque(reader, maxlen=0)

        return epoch

    seconds = take_turns({name: epochs(data) for name, data in sides._asdict().items()}, *size.epochs)
    _add_speeds(report, id, seconds, sides.ours.samples("train"), must, aim)


def _train(report: Report, sides: Sides, size: Size) -> None:
    kept = (
        "" if keep_memory() else "; freed memory goes back to the system in every step, which costs the baseline more"
    )
    for id, (warm, steps, rounds), threads, must, aim in (
        ("dedup.train", size.steps, 0, 2.49, 3.5),
        ("dedup.train_one_core", size.one_core or (0, 0, 0), 1, None, None),
    ):
        if not rounds:
            missing(report, id, "left out by --quick")
            continue
        others = OtherProcesses()
        found: dict[str, list[Measured]] = {name: [] for name in sides._fields}
        for _ in range(rounds):
            for name, data in sides._asdict().items():
                found[name].append(trained(data.path, threads, warm, steps))
        ours, plain = (speeds(found[name]) for name in sides._fields)
        ratio = ours["samples_a_second"] / plain["samples_a_second"]
        note = f"`hotrow train`, {ours['samples_a_second']:,} and {plain['samples_a_second']:,} samples a second"
        note += f"{others.share()}{kept}"
        add(report, id, ratio, "x", must=must, aim=aim, ours=ours, baseline=plain, note=note)


def trained(data: Path, threads: int, warm: int, steps: int) -> Measured:
    """One training of a side."""
    return elsewhere("hotrow.bench.dedup_train", data, BATCH, threads, warm, steps)


class OtherProcesses:
    """What others take of this machine from now on: a step of small operations on all cores waits for them often."""

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds that the cores were busy, all of them together, and those of them that were ours."""
        ours = sum(os.times()[:4])
        if not PROCESSOR.exists():
            return ours, ours
        user, nice, system, _, _, irq, soft_irq, *_ = map(int, PROCESSOR.read_text().split()[1:11])
        return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK"), ours

    def share(self) -> str:
        """In words, or nothing where it is little or not known."""
        (busy, ours), (busy_before, ours_before) = self._now(), self._began
        others = 1 - (ours - ours_before) / max(busy - busy_before, 1e-9)
        return f"; {others:.0%} of the time that cores worked was for other processes" if others > 0.05 else ""


def _add_speeds(
    report: Report,
    id: str,
    seconds: Mapping[str, Sequence[float]],
    samples: int,
    must: float | None,
    aim: float | None,
    note: str = "",
) -> None:
    """The ratio of two sides that each took `samples` in a call."""
    read = {name: reading(s) for name, s in seconds.items()}
    speed = {name: samples / r["median_ms"] * 1e3 for name, r in read.items()}
    ours, plain = ({**read[name], "samples_a_second": round(speed[name])} for name in ("ours", "plain"))
    note = f"{speed['ours']:,.0f} and {speed['plain']:,.0f} samples a second{note}"
    add(report, id, speed["ours"] / speed["plain"], "x", must=must, aim=aim, ours=ours, baseline=plain, note=note)


def _batch(report: Report, sides: Sides, size: Size) -> None:
    if not PEAK_RESET.exists():
        missing(report, "dedup.batch", "the peak of a step is taken from /proc, which this system does not have")
        return
    found = {name: largest(_peak_of(data.path), size.memory, size.precision) for name, data in sides._asdict().items()}
    (ours, of_ours), (plain, of_plain) = found.values()
    add(
        report,
        "dedup.batch",
        ours / plain,
        "x",
        must=2.0,
        aim=4.0,
        ours={"batch": ours, "peak_mib": _mib(of_ours)},
        baseline={"batch": plain, "peak_mib": _mib(of_plain)},
        note=f"the step of the same model within {size.memory >> 20} MiB beyond weights and batch",
    )


def _mib(peaks: Mapping[int, int]) -> dict[str, int]:
    return {str(n): peaks[n] >> 20 for n in sorted(peaks)}


def _peak_of(data: Path) -> Callable[[int], int]:
    def peak(batch_size: int) -> int:
        command = [sys.executable, "-m", "hotrow.bench.dedup_step", str(data), str(batch_size)]
        return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    return peak


def largest(peak: Callable[[int], int], memory: int, precision: float, first: int = 512) -> tuple[int, dict[int, int]]:
    """The largest batch whose peak is within `memory`, as precisely as told, and the peak of every size tried.

    Peaks grow almost in proportion to batches, so the next size to try is where the last one would have fitted
    exactly, a little to the side of it that is not known yet.
    """
    peaks = {first: peak(first)}
    unit = max(1, int(first * memory / peaks[first] * precision))
    fits, above, n = 0, 0, first
    while True:
        fits, above = (n, above) if peaks[n] <= memory else (fits, n)
        if above and above - fits <= unit:
            return fits, peaks
        guess = n * memory // peaks[n] + (unit // 3 if fits == n else -unit // 3)
        n = max(guess, fits + unit)
        if above and not fits < guess < above:
            n = (fits + above) // 2
        peaks[n] = peak(n)


def _factor(report: Report, prefix: str, dataset: DataSet, must: float | None = None, aim: float | None = None) -> None:
    told = expected(Profile.of_data_set(dataset)[0].repetition, dataset.schema, BATCH)
    reader = Reader(dataset, "train", BATCH, drop_last=dataset.samples("train") >= BATCH)
    found = reached(reader, dataset.schema)
    tolds, founds = _named(told), _named(found)
    errors = {name: abs(tolds[name] / factor - 1) for name, factor in founds.items()}
    worst = max(errors, key=lambda name: errors[name])
    add(
        report,
        f"{prefix}.factor_error",
        errors[worst],
        "",
        must=must,
        aim=aim,
        better="lower",
        ours={"expected": _rounded(told), "reached": _rounded(found)},
        note=f"{worst}, the worst of {len(errors)}; of all values {told.total:.3f} expected, {found.total:.3f} reached",
    )


def _named(factors: Factors) -> dict[str, float]:
    groups = {f"group {name}": factor for name, factor in factors.groups.items()}
    return {"all values": factors.total, **groups, **factors.features}


def _rounded(factors: Factors) -> dict[str, float]:
    return {"total": round(factors.total, 4)} | {name: round(f, 4) for name, f in factors.groups.items()}


def _real(report: Report, name: str, folder: Path, size: Size) -> None:
    """Storage, reading and the factor on a real log, whatever they are."""
    figures = [f"dedup.{name}.{figure}" for figure in ("storage", "read", "factor_error")]
    found = real_logs.find(name, size.real_samples) if size.real_samples else "left out by --quick"
    if isinstance(found, str):
        for id in figures:
            missing(report, id, found)
        return
    log = folder / f"{name}.parquet"
    pq.write_table(found.rows, log)
    sides = _prepared(log, found.schema)
    note = f"{len(found.rows):,} samples; {_repeats(sides.ours)}"
    sizes = ({"bytes": side.bytes} for side in sides)
    add(
        report, figures[0], sides.plain.bytes / sides.ours.bytes, "x", ours=next(sizes), baseline=next(sizes), note=note
    )
    _read(report, figures[1], sides, size)
    _factor(report, f"dedup.{name}", sides.ours)
