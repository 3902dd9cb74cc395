"""What `hotrow profile` says of a data set, as plain data: the same for the table, the picture and `--json`.

Where the data set keeps nothing once, the groups are those that `find_groups` would make, so that one sees what
preparing the log with sessions would bring. Samples that were not clustered are counted as they stand: what is called a
session is then a run of neighbours of one.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

from hotrow.data.dataset import DataSet
from hotrow.data.reader import Reader
from hotrow.data.schema import Schema
from hotrow.profile.factor import Factors, expected, met, reached, stored
from hotrow.profile.groups import find_groups
from hotrow.profile.profile import Profile
from hotrow.profile.repetition import Repetition
from hotrow.profile.skew import top_share, zipf_exponent

BATCHES = 20
"""Batches that are read to see what they reach."""


def summarise(
    dataset: DataSet, profile: Profile, split: str = "train", batch_size: int = 4096, batches: int = BATCHES
) -> dict[str, Any]:
    """Repetition, skew and the factor of deduplication, expected and reached; `batches` may be 0."""
    found, kept_once = profile.repetition, bool(dataset.schema.groups)
    schema = dataset.schema if kept_once else _with_groups(found, dataset.schema, batch_size)
    factors_by_kind: dict[str, Factors | None] = {
        "expected": expected(found, schema, batch_size),
        "in_files": stored(dataset, found, split) if kept_once else None,
        "in_batches": _read(dataset, split, batch_size, batches) if kept_once and batches else None,
    }
    group_of = {name: group for group in schema.groups or () for name in group.columns}
    return {
        "path": str(dataset.path),
        "split": split,
        "bytes": sum(part.bytes for part in dataset.parts(split)),
        "samples": found.samples,
        "sessions": found.sessions if schema.session is not None else None,
        "clustered": dataset.facts.get("clustered", True),
        "samples_per_session": found.samples_per_session,
        "session_lengths": {str(length): count for length, count in found.session_lengths.items()},
        "batch_size": batch_size,
        "met_in_batch": met(found, batch_size),
        "met_in_batch_unclustered": met(found, batch_size, clustered=False),
        "exact_repeats": found.exact_share,
        "repeats_with_slides": found.slid_share,
        "kept_once": kept_once,
        "factor": {kind: factors and factors.total for kind, factors in factors_by_kind.items()},
        "groups": [
            {
                "name": group.name,
                "columns": list(group.columns),
                "slides": list(group.slides),
                **{kind: factors and factors.groups.get(group.name) for kind, factors in factors_by_kind.items()},
            }
            for group in schema.groups or ()
        ],
        "features": [
            {
                "name": f.name,
                "table": f.table,
                "kind": f.kind,
                "group": group_of[f.name].name if f.name in group_of else None,
                "slides": f.name in group_of and f.name in group_of[f.name].slides,
                **_column(found, f.name),
                **_skew(profile, f.name),
                **{kind: factors and factors.features.get(f.name) for kind, factors in factors_by_kind.items()},
            }
            for f in schema.features
        ],
        "dense": [
            {"name": name, "group": group_of[name].name if name in group_of else None, **_column(found, name)}
            for name in schema.dense
        ],
    }


def _with_groups(found: Repetition, schema: Schema, batch_size: int) -> Schema:
    return schema.model_copy(update={"groups": find_groups(found, schema, batch_size=batch_size)})


def _read(dataset: DataSet, split: str, batch_size: int, batches: int) -> Factors:
    whole = dataset.samples(split) >= batch_size
    with closing(iter(Reader(dataset, split, batch_size, drop_last=whole))) as reader:  # type: ignore[type-var]
        return reached(itertools.islice(reader, batches), dataset.schema)


def _column(found: Repetition, name: str) -> dict[str, float]:
    return {
        "length": found.length(name),
        "bytes": found.columns[name].bytes,
        "unchanged": found.unchanged(name),
        "unchanged_or_slid": found.unchanged_or_slid(name),
    }


def _skew(profile: Profile, feature: str) -> dict[str, Any]:
    counts = profile.keys[feature]
    return {
        "distinct": counts.distinct,
        "counts_exact": counts.exact,
        "top_1_percent": top_share(counts),
        "zipf": zipf_exponent(counts),
    }
