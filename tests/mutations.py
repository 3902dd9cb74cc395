"""Damage to folders by seeds, and what readers make of it: the same values, or an error with a sentence.

A mutation flips, overwrites, cuts, removes, repeats or swaps bytes, deletes, swaps or copies files, or does the like to
fields of JSON. Readers run in another process, many mutations each: one that crashes it, or takes longer than
`PATIENCE` seconds, is noted, and a new process goes on with the next.

To see what becomes of seed 7: `python tests/mutations.py /tmp/work '[["plan", 7, 8]]'`. Targets stand in
`mutation_targets`.
"""

from __future__ import annotations

import json
import random
import resource
import select
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

PATIENCE, _START = 60, 600
_MEMORY = 4 << 30
"""What a reader may take beyond what the first, undamaged folder took."""

GOOD = ("same", "refused")
HUGE = (10**400, -(1 << 63), (1 << 63) - 1, 1 << 64, -1, 0, 1.5, 1e308)
ODD = (None, True, "", "x", "../..", "\x00", [], {}, [[]], {"": None})


class Target(NamedTuple):
    """What is damaged: `make` writes the folder, `read` gives a digest of all that its reader makes of it."""

    make: Callable[[Path], None]
    read: Callable[[Path], str]
    checked: bool = True
    """Whether other values are a fault; what earlier versions wrote has no checksums."""


class Job(NamedTuple):
    """Mutations of a target, by seeds from `first` up to `last`."""

    target: str
    first: int
    last: int
    module: str = "mutation_targets"


class Outcome(NamedTuple):
    """What became of a mutation: "same" and "refused" are good; "other", "trace", "crash" and "hang" are not."""

    target: str
    seed: int
    outcome: str
    what: str


def mutate(folder: Path, seed: int) -> str:
    """Damages one thing in the folder; what was done, in words."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = draw.choice(files)
    how = draw.choice(_JSON if file.suffix == ".json" and draw.random() < 0.6 else _BYTES + _FILES)
    return f"{how.__name__.strip('_')} {how(draw, file, files)}"


def _flip(draw: random.Random, file: Path, files: list[Path]) -> str:
    data = bytearray(file.read_bytes())
    if not data:
        return f"nothing of {file.name}"
    at = draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return f"a bit of byte {at} of {file.name}"


def _overwrite(draw: random.Random, file: Path, files: list[Path]) -> str:
    data = bytearray(file.read_bytes())
    at, count = draw.randrange(len(data) + 1), draw.choice((1, 2, 4, 8, 64))
    data[at : at + count] = draw.choice((draw.randbytes(count), bytes(count), b"\xff" * count))
    file.write_bytes(data)
    return f"{count} bytes from {at} of {file.name}"


def _cut(draw: random.Random, file: Path, files: list[Path]) -> str:
    data = file.read_bytes()
    at = draw.choice((0, len(data) - 1, draw.randrange(len(data) + 1)))
    file.write_bytes(data[: max(at, 0)])
    return f"{file.name} at {at}"


def _remove(draw: random.Random, file: Path, files: list[Path]) -> str:
    data, (a, b) = file.read_bytes(), _range(draw, file)
    file.write_bytes(data[:a] + data[b:])
    return f"bytes {a} to {b} of {file.name}"


def _repeat(draw: random.Random, file: Path, files: list[Path]) -> str:
    data, (a, b) = file.read_bytes(), _range(draw, file)
    file.write_bytes(data[:b] + data[a:])
    return f"bytes {a} to {b} of {file.name}"


def _swap_bytes(draw: random.Random, file: Path, files: list[Path]) -> str:
    data = bytearray(file.read_bytes())
    count = draw.choice((1, 4, 8, 64))
    if len(data) < 2 * count:
        return f"nothing of {file.name}"
    a = draw.randrange(len(data) - 2 * count + 1)
    b = draw.randrange(a + count, len(data) - count + 1)
    data[a : a + count], data[b : b + count] = data[b : b + count], data[a : a + count]
    file.write_bytes(data)
    return f"{count} bytes at {a} and {b} of {file.name}"


def _delete_file(draw: random.Random, file: Path, files: list[Path]) -> str:
    file.unlink()
    return file.name


def _swap_files(draw: random.Random, file: Path, files: list[Path]) -> str:
    other = draw.choice(files)
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return f"{file.name} and {other.name}"


def _copy_over(draw: random.Random, file: Path, files: list[Path]) -> str:
    other = draw.choice(files)
    file.write_bytes(other.read_bytes())
    return f"{other.name} onto {file.name}"


def _range(draw: random.Random, file: Path) -> tuple[int, int]:
    size = file.stat().st_size
    a = draw.randrange(size + 1)
    return a, min(size, a + draw.choice((1, 2, 8, 100, 1000)))


def _fields(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list below, with each of its names or numbers."""
    below = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in below:
        yield data, name
        yield from _fields(value)


def _change_field(draw: random.Random, file: Path, files: list[Path]) -> str:
    def change(at: Any, name: Any, fields: list[tuple[Any, Any]]) -> None:
        at[name] = draw.choice((*HUGE, *ODD))

    return _in_json(draw, file, change)


def _nudge_field(draw: random.Random, file: Path, files: list[Path]) -> str:
    def change(at: Any, name: Any, fields: list[tuple[Any, Any]]) -> None:
        value = at[name]
        at[name] = value + 1 if isinstance(value, int | float) else f"{value}x" if isinstance(value, str) else None

    return _in_json(draw, file, change)


def _delete_field(draw: random.Random, file: Path, files: list[Path]) -> str:
    def change(at: Any, name: Any, fields: list[tuple[Any, Any]]) -> None:
        del at[name]

    return _in_json(draw, file, change)


def _swap_fields(draw: random.Random, file: Path, files: list[Path]) -> str:
    def change(at: Any, name: Any, fields: list[tuple[Any, Any]]) -> None:
        other, there = draw.choice(fields)
        mine, theirs = json.dumps(at[name]), json.dumps(other[there])
        at[name], other[there] = json.loads(theirs), json.loads(mine)

    return _in_json(draw, file, change)


def _duplicate_field(draw: random.Random, file: Path, files: list[Path]) -> str:
    def change(at: Any, name: Any, fields: list[tuple[Any, Any]]) -> None:
        copy = json.loads(json.dumps(at[name]))
        if isinstance(at, list):
            at.insert(name, copy)
        else:
            at[f"{name}_2"] = copy

    return _in_json(draw, file, change)


def _in_json(draw: random.Random, file: Path, change: Callable[[Any, Any, list[tuple[Any, Any]]], None]) -> str:
    data = json.loads(file.read_text())
    fields = list(_fields(data))
    if not fields:
        return f"nothing of {file.name}"
    at, name = draw.choice(fields)
    change(at, name, fields)
    sys.set_int_max_str_digits(0)
    file.write_text(json.dumps(data))
    return f'"{name}" of {file.name}'


_BYTES = (_flip, _flip, _overwrite, _cut, _remove, _repeat, _swap_bytes)
_FILES = (_delete_file, _swap_files, _copy_over)
_JSON = (_change_field, _nudge_field, _delete_field, _swap_fields, _duplicate_field)


def run(work: Path, jobs: list[Job], patience: float = PATIENCE) -> list[Outcome]:
    """What becomes of the mutations of some jobs."""
    found: list[Outcome] = []
    left = [job for job in jobs if job.first < job.last]
    while left:
        for outcome in _one_process(work, left, patience):
            found.append(outcome)
            left[0] = left[0]._replace(first=outcome.seed + 1)
            if left[0].first == left[0].last:
                left = left[1:]
    return found


def _one_process(work: Path, jobs: list[Job], patience: float) -> Iterator[Outcome]:
    """Outcomes of these jobs, up to a mutation at which the process died or stood still."""
    command = [sys.executable, __file__, str(work), json.dumps(jobs)]
    at: dict[str, Any] | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while line := _line(process.stdout, _START if at is None else patience):
            said = json.loads(line)
            if "outcome" in said and at is not None:
                yield Outcome(at["target"], at["seed"], said["outcome"], f"{at['what']}: {said['said']}")
                at = None
            else:
                at = said
        process.kill()
    if at is not None:
        yield Outcome(at["target"], at["seed"], "hang" if line is None else "crash", at["what"])
    elif process.returncode:
        raise RuntimeError(f"A reader of one of {jobs} fails where nothing is damaged.")


def _line(stream: IO[bytes], patience: float) -> bytes | None:
    """The next line; b"" at the end, None if nothing comes."""
    return stream.readline() if select.select([stream], [], [], patience)[0] else None


def _serve(work: Path, jobs: list[Job]) -> None:
    import hotrow  # noqa: F401  (takes seconds, which are not the reader's)

    for job in jobs:
        target, whole = import_module(job.module).TARGETS[job.target], work / job.target
        if not whole.is_dir():
            target.make(whole)
        expected = target.read(whole)
        _limit_memory()
        for seed in range(job.first, job.last):
            damaged = work / f"{job.target}-damaged"
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(whole, damaged)
            _say(target=job.target, seed=seed, what=mutate(damaged, seed))
            outcome, said = _read(target, damaged, expected)
            _say(outcome=outcome, said=said)


def _read(target: Target, damaged: Path, expected: str) -> tuple[str, str]:
    from hotrow.errors import HotrowError

    try:
        found = target.read(damaged)
    except HotrowError as error:
        return "refused", str(error)
    except BaseException:
        return "trace", traceback.format_exc(limit=-4)
    return ("same" if found == expected or not target.checked else "other"), ""


def _limit_memory() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, resource.RLIM_INFINITY))


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), [Job(*job) for job in json.loads(sys.argv[2])])
