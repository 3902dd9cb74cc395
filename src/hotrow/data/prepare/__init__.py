"""`prepare`: a raw log becomes a data set, checked, hashed, split, clustered by session, what repeats kept once.

    unpack     packed text files, so that all cores can convert what one unpacks
    convert    slices of the log to samples, each on its own
    begins     when each session begins, so in which part of the data set it stands
    route      samples to their part                             event logs: to the bucket of their user,
    look       which columns repeat together in sessions         where `histories` are made, and on to their part
    cluster    a part, in order of sessions and time, and its share of the profile
    finish     manifest and profile; then the folder is renamed into its place

Each stage is tasks that can run anywhere and be killed anywhere (`plan`): the same command goes on where it was cut
off, and ends with the same bytes, whatever cores, engine and (but for summaries of more keys than fit) memory it had; a
command whose data set is there already gives it. A log without sessions keeps its order:
nothing is routed. The work folder, beside the output, takes about twice the log as LZ4 packs it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from hotrow import __version__
from hotrow.data.convert import BadPolicy, BadRows
from hotrow.data.dataset import MANIFEST, DataSet
from hotrow.data.folder import cannot_write, refuse_in_use
from hotrow.data.prepare.engine import LEAST, Inline, Limits, Processes, TaskLost
from hotrow.data.prepare.memory import cores, memory_limit
from hotrow.data.prepare.plan import Input, LatePolicy, Plan, Work
from hotrow.data.prepare.stages import run_stages
from hotrow.data.schema import Schema
from hotrow.data.sources import Format, SourceSettings, find_source
from hotrow.data.split import Nothing, parse_split
from hotrow.errors import DataError, HotrowError, SettingsError, nearest
from hotrow.train.progress import Progress

__all__ = ["TaskLost", "prepare"]

EngineName = Literal["local", "ray"]
_VALIDATION = 0.1
_COUNTER = 43
"""Bytes that the count of a key takes at most."""


def prepare(
    source: Path | str,
    out: Path | str,
    *,
    schema: Schema | Path | str | None = None,
    format: Format = "auto",
    split: str | None = None,
    validation: float | None = None,
    bad: BadPolicy = "refuse",
    late: LatePolicy = "sort",
    cluster: bool = True,
    dedup: bool = True,
    threshold: float = 4.0,
    history: int = 20,
    row_group: int | None = None,
    part: int | None = None,
    memory: int | str | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DataSet:
    """Reads the log `source` and writes the data set `out`; `hotrow.data.split` lists the splits.

    `validation` is the share of what is not test to stop early and tune by: 0.1 if not given, or 0, which makes no
    such split, where the split is none.

    `cluster=False` keeps the order of the log, `dedup=False` writes every value of every sample. `row_group` and
    `part` are samples at most; by default they follow from the size of a sample. `memory` is for the command and all
    its workers, as bytes or as "2GiB", half the machine's if not given.
    """
    progress, out = progress or Progress(), Path(out).absolute()
    _refuse_unknown(format=(format, Format), bad=(bad, BadPolicy), late=(late, LatePolicy), engine=(engine, EngineName))
    limits = Limits(memory=memory_limit(memory), workers=workers or cores())
    if limits.memory < LEAST:
        raise SettingsError(f"memory: prepare needs at least {LEAST >> 20} MiB, given {limits.memory >> 20} MiB.")
    if isinstance(schema, Path | str):
        schema = Schema.read(schema)
    log = find_source(source, format, schema, threshold=threshold, history=history)
    plan = _plan(log, split, validation, bad, late, cluster, dedup, limits)
    plan = plan.model_copy(update={"row_group": row_group, "part": part})
    work = Work.beside(out)
    _placed(work, plan, out, overwrite)  # before anything is written
    with work.locked() as lock:
        with _nothing_left_behind(work, out):
            if not _placed(work, plan, out, overwrite):  # others may have come first
                if said := work.begin(plan):
                    progress.say(said)
                run_stages(work, _engine(engine, limits, lock), progress)
                work.place(out)
        work.remove()
    return DataSet.open(out)


def _placed(work: Work, plan: Plan, out: Path, overwrite: bool) -> bool:
    """Whether this command made what is there, and was killed when all was done; refuses an `out` in other use."""
    if work.placed(plan, out / MANIFEST) or (not overwrite and _is_made_by(plan, out)):
        return True
    refuse_in_use(out, MANIFEST, overwrite)
    return False


def _is_made_by(plan: Plan, out: Path) -> bool:
    try:
        return (out / MANIFEST).is_file() and DataSet.open(out).manifest.prepared == plan.digest
    except DataError:
        return False


@contextmanager
def _nothing_left_behind(work: Work, out: Path) -> Iterator[None]:
    """Deletes the work where the log or the disk is at fault: what is mended then is another log, or needs the room."""
    try:
        yield
    except TaskLost:
        raise
    except HotrowError:
        work.remove()
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        work.remove()
        raise cannot_write(out, error) from error


def _refuse_unknown(**given: tuple[str, object]) -> None:
    for name, (value, known) in given.items():
        if value not in get_args(known):
            raise SettingsError(f'There is no {name} "{value}".{nearest(value, get_args(known))}')


def _plan(
    log: SourceSettings,
    split: str | None,
    validation: float | None,
    bad: BadPolicy,
    late: LatePolicy,
    cluster: bool,
    dedup: bool,
    limits: Limits,
) -> Plan:
    aside = BadRows(bad)
    first = log.source()
    usable = first.usable(aside)
    if usable:
        log = log.model_copy(update={"files": tuple(str(file) for file in usable)})
    division = parse_split(split or log.split or first.split.text)
    samples = first.schema.prepared()
    division.check(samples)
    if validation is None:
        validation = 0.0 if isinstance(division, Nothing) else _VALIDATION
    if not 0 <= validation < 1:
        raise SettingsError(f"validation: it is a share of what is not test, from 0 to below 1, not {validation}.")
    if late != "sort" and (samples.session is None or samples.time is None or not cluster):
        raise SettingsError(f"late = {late} needs a session and a time in the schema, and samples that are clustered.")
    if samples.session is None or not cluster or not dedup:
        samples = samples.model_copy(update={"groups": ()})
    room, features = limits.memory // 10 // _COUNTER, max(1, len(samples.features))
    return Plan(
        made_by=f"hotrow {__version__}, duckdb {version('duckdb')}, pyarrow {version('pyarrow')}",
        source=log,
        inputs=tuple(_input(Path(file)) for file in log.files),
        aside=aside.found(),
        samples=samples,
        split=division.text,
        validation=validation,
        bad=bad,
        late=late,
        cluster=cluster,
        keys=_rounded(room // features),
        keys_a_part=_rounded(room // features // limits.workers),
    )


def _input(file: Path) -> Input:
    stat = file.stat()
    return Input(file=str(file), bytes=stat.st_size, modified=stat.st_mtime_ns)


def _rounded(limit: int) -> int:
    """Down to a power of two, so that a little more or less memory makes no other plan; from 4096 to 8 million."""
    return min(1 << 23, max(1 << 12, 1 << (max(1, limit).bit_length() - 1)))


def _engine(name: EngineName, limits: Limits, lock: int) -> Inline:
    if name == "ray":
        from hotrow.data.prepare.on_ray import OnRay

        return OnRay(limits)
    return Processes(limits, lock)
