"""The last tasks: what repeats is found, parts are written, and the data set is put together.

A part is sorted by (begin of session, place of its first sample in the log, time, place in the log), an order without
ties, so its bytes do not depend on who writes it, with how many threads. The share of the profile is counted as the
samples pass by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.convert import BadRows
from hotrow.data.dataset import write_manifest
from hotrow.data.dedup import session_begins
from hotrow.data.parts import ROW_GROUP, Part, PartWriter
from hotrow.data.prepare.begins import LOOK_SAMPLES, Ahead, begins_of
from hotrow.data.prepare.duck import Share, room
from hotrow.data.prepare.order import Order
from hotrow.data.prepare.plan import Work
from hotrow.data.prepare.spool import Report, slices_of, spooled
from hotrow.data.schema import Repeats, Schema
from hotrow.data.split import SPLITS

_PASS = 4 << 20


def look(work: Work) -> dict[str, Any]:
    """Which columns repeat together, seen in whole sessions from all over the log."""
    from hotrow.profile.groups import find_groups

    schema, ahead = work.plan.samples, begins_of(work)
    tables = list[pa.Table]()
    for part, stretches in groupby(ahead.looks, lambda stretch: stretch.part):
        order = Order(work, part)
        for stretch in stretches:
            rows = np.flatnonzero((order.begins >= stretch.first) & (order.begins <= stretch.last))
            tables.append(order.gather(rows[: LOOK_SAMPLES // len(ahead.looks)]))
    groups = find_groups(pa.concat_tables(tables), schema) if tables else ()
    return {"groups": [group.model_dump() for group in groups]}


def _prepared(work: Work) -> Schema:
    """The schema of the data set, with its groups."""
    schema = work.plan.samples
    if schema.groups is not None:
        return schema
    found = work.result("look") or {"groups": []}
    return schema.model_copy(update={"groups": tuple(Repeats.model_validate(group) for group in found["groups"])})


def cluster(work: Work, number: int, share: Share, report: Report) -> dict[str, Any]:
    """Writes a part, and its share of the profile."""
    plan, ahead = work.plan, begins_of(work)
    part, schema = ahead.parts[number], _prepared(work)
    stem, most = f"{part.split}-{part.number:05d}", plan.row_group or ROW_GROUP
    writer = PartWriter(work.data, stem, schema, row_group=ahead.row_group, most=most)
    late = 0
    try:
        if plan.clustered or plan.by_time:
            order = Order(work, number)
            late = order.settle_late() if plan.clustered else 0
            read = order.samples(max(_PASS, room(share) // 20))
        else:
            read = _in_order(work, part)
        tables = _written(read, writer, report)
        if part.split == "train" and (plan.clustered or schema.session is None):
            _count(work, number, schema, _whole_sessions(tables, schema, max(1 << 10, ahead.row_group // 4)))
        else:
            deque(tables, maxlen=0)
        made = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return {"part": None if made is None else made.model_dump(), "late": late}


def _in_order(work: Work, part: Ahead) -> Iterator[pa.Table]:
    """The samples of a split in the order of the log."""
    plan, division = work.plan, begins_of(work).division
    for number in part.slices:
        with pq.ParquetFile(spooled(work, number)) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, use_threads=False)
                wanted = division.of(table, plan.samples) == SPLITS.index(part.split)
                yield table if wanted.all() else table.filter(pa.array(wanted))


def _written(tables: Iterator[pa.Table], writer: PartWriter, report: Report) -> Iterator[pa.Table]:
    for table in tables:
        writer.write(table)
        report(len(table), len(table))
        yield table


def _count(work: Work, number: int, schema: Schema, tables: Iterator[pa.Table]) -> None:
    from hotrow.profile.profile import Profile

    limit = work.plan.keys_a_part
    Profile.merged(Profile.of(table, schema, limit=limit) for table in tables).save(
        work.folder("profiles") / f"{number:06d}"
    )


def _whole_sessions(tables: Iterator[pa.Table], schema: Schema, rows: int) -> Iterator[pa.Table]:
    """The same samples in tables of `rows` at most, or of one session, which is cut after four times as many.

    Where they end depends on the samples alone, not on the sizes they come in, and so does what is counted of them.
    """
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) > 4 * rows:
            whole = pa.concat_tables(waiting)
            while len(whole) > 4 * rows:
                cut = _end(whole, schema, rows)
                yield whole.slice(0, cut)
                whole = whole.slice(cut)
            waiting = [whole]
    rest = pa.concat_tables(waiting) if waiting else pa.table({})
    while len(rest):
        cut = _end(rest, schema, rows)
        yield rest.slice(0, cut)
        rest = rest.slice(cut)


def _end(samples: pa.Table, schema: Schema, rows: int) -> int:
    """How many of these samples, which are all that are left or more than four times `rows`, come next."""
    if schema.session is None or len(samples) <= rows:
        return min(len(samples), rows)
    seen = samples.column(schema.session).slice(0, 4 * rows + 1).to_numpy()
    begins = np.flatnonzero(session_begins(seen))[1:]
    within = int(np.searchsorted(begins, rows, side="right"))
    if within:
        return int(begins[within - 1])
    return int(begins[0]) if len(begins) else min(len(samples), 4 * rows)


def finish(work: Work) -> dict[str, Any]:
    """Schema, profile and, last, the manifest: with it the data set is whole."""
    plan, ahead = work.plan, begins_of(work)
    splits: dict[str, list[Part]] = {name: [] for name in SPLITS}
    results = work.results("cluster", len(ahead.parts))
    for part, result in zip(ahead.parts, results, strict=True):
        if result["part"] is not None:
            splits[part.split].append(Part.model_validate(result["part"]))
    found = [plan.aside] + [result["found"] for result in work.results("convert", len(slices_of(work)))]
    facts = {**plan.source.facts, "split": ahead.split, **BadRows.of(plan.bad, found).facts()}
    if splits["validation"]:
        facts["validation"] = ahead.validation
    else:
        del splits["validation"]
    if plan.clustered:
        facts["sessions"] = ahead.sessions
        late = sum(result["late"] for result in results)
        if late:
            facts["late"] = {"samples": late, "were": "set aside" if plan.late == "skip" else "sorted by time"}
    elif plan.samples.session is not None:
        facts["clustered"] = False
    _merge_profiles(work, splits["train"])
    write_manifest(work.data, _with_kinds(_prepared(work), work), splits, facts, plan.digest)
    return {}


def _with_kinds(schema: Schema, work: Work) -> Schema:
    """The schema, which says of each feature what its keys are. Those of events are hashed before they come here."""
    if work.plan.by_time:
        return schema
    seen: dict[str, set[str]] = {}
    for result in work.results("convert", len(slices_of(work))):
        for name, kinds in result["seen"].items():
            seen.setdefault(name, set()).update(kinds)
    features = []
    for feature in schema.features:
        kinds = seen.get(feature.name, set())
        holds = "any" if len(kinds) > 1 else next(iter(kinds), None)
        features.append(feature.model_copy(update={"holds": feature.holds or holds}))
    return schema.model_copy(update={"features": tuple(features)})


def _merge_profiles(work: Work, parts: list[Part]) -> None:
    from hotrow.profile.counts import KeyCounts
    from hotrow.profile.profile import PROFILE, Profile, fingerprint

    folders = sorted(work.folder("profiles").iterdir())
    if not folders:
        return
    first = Profile.load(folders[0])
    keys = {name: KeyCounts.merged([counts], work.plan.keys) for name, counts in first.keys.items()}
    shares = (Profile.load(folder) for folder in folders[1:])
    whole = Profile.merged([Profile(first.repetition, keys, first.table_of), *shares])
    for name, counts in whole.keys.items():
        if counts.exact:  # then they are the same whatever memory there was, but for the room they were given
            whole.keys[name] = KeyCounts.merged([counts])
    whole.save(work.data / PROFILE, fingerprint(parts))
