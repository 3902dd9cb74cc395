"""Plans a data set within a memory budget: counts its keys, chooses hot rows, and predicts what they will hold.

Counts come from the profile beside the data set. With a `share` they come from a sample of it instead, as FAE does,
and so they do where a run changes keys on their way (`steps`): a profile knows the keys as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.data.dataset import DataSet
from hotrow.data.steps import Step
from hotrow.plan.hot import Curve, HotRows, hot_rows
from hotrow.plan.plan import Plan
from hotrow.plan.predict import Prediction, predict
from hotrow.profile import Profile, fingerprint
from hotrow.profile.counts import KeyCounts
from hotrow.profile.sample import LEVEL, Sample, draw
from hotrow.profile.threshold import ThresholdCost, known_costs, threshold_costs
from hotrow.table import Table

JUDGED = 200_000
"""Samples that are read to see how many touch hot rows only, where counts come from a profile."""
_POINTS = 400


@dataclass(frozen=True)
class Counted:
    """Counts of a split, the sample that is read to judge by, and whether the counts are the sample's own.

    Keys are as `steps` leave them.
    """

    counts: dict[str, KeyCounts]
    sample: Sample
    sampled: bool
    steps: tuple[Step, ...] = ()


def count_keys(
    dataset: DataSet,
    *,
    split: str = "train",
    profile: Path | None = None,
    share: float | None = None,
    steps: Sequence[Step] = (),
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Counted:
    """The counts of a split: of `profile`, of the one beside the data set, or of a `share` of it read now."""
    if share is None and not steps:
        if profile is not None:
            known = Profile.load(profile, fingerprint(dataset.parts(split)))
        else:
            known, _ = Profile.of_data_set(dataset, split, progress)
        counts = {table: known.table(table) for table in known.tables}
        judged = min(1.0, JUDGED / max(dataset.samples(split), 1))
        return Counted(counts, draw(dataset, split, judged, seed=seed), sampled=False)
    sample = draw(dataset, split, 1.0 if share is None else share, steps=steps, seed=seed)
    return Counted(sample.counts(), sample, sample.fraction < 1, tuple(steps))


def plan_data_set(
    dataset: DataSet,
    tables: Sequence[Table],
    memory: int,
    counted: Counted,
    *,
    split: str = "train",
    thresholds: Sequence[int] = (),
    judge_samples: bool = True,
    level: float = LEVEL,
) -> tuple[Plan, dict[str, Any]]:
    """A plan for `tables` within `memory` bytes, and what is known of it as plain data.

    `judge_samples` reads some of the log to tell how many samples have hot rows only, which the plan does not need.
    """
    hot = hot_rows(tables, counted.counts, memory)
    sample, counts = counted.sample, counted.counts
    prediction = predict(hot, sample, counts, sampled=counted.sampled, judge_samples=judge_samples, level=level)
    widths = {name: table.row_bytes for name, table in hot.tables.items()}
    costs: Mapping[str, list[ThresholdCost]] = {}
    if thresholds and counted.sampled:
        costs = threshold_costs(counted.sample, counted.counts, thresholds, widths, level=level)
    elif thresholds:
        costs = {name: known_costs(counted.counts[name], thresholds, widths[name]) for name in widths}
    known = {
        "data": str(dataset.path),
        "split": split,
        "fingerprint": fingerprint(dataset.parts(split)),
        "steps": said_of(counted.steps),
        "counted": "sample" if counted.sampled else "all",
        "fraction": counted.sample.fraction if counted.sampled else 1.0,
        **_told(hot, prediction),
    }
    plan = Plan(hot.plan.shares, hot.plan.row_bytes, known)
    return plan, {
        **known,
        "curve": _drawn(hot.curve),
        "thresholds": {n: [_cost(c) for c in of] for n, of in costs.items()},
    }


def said_of(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Preprocessing as the facts of a plan have it."""
    return [step.model_dump(mode="json") for step in steps]


def _told(hot: HotRows, prediction: Prediction) -> dict[str, Any]:
    return {
        "memory": hot.memory,
        "bytes": hot.bytes,
        "rows": sum(t.rows for t in hot.tables.values()),
        "kept": hot.kept,
        "share": prediction.accesses._asdict(),
        **({} if prediction.samples is None else {"samples": prediction.samples._asdict()}),
        "tables": {
            name: {
                "rows": t.rows,
                "keys": t.known,
                "row_bytes": t.row_bytes,
                "bytes": t.bytes,
                "share": prediction.tables[name]._asdict(),
                "threshold": None if name in hot.kept else t.cut.threshold + (t.cut.extra == 0),
            }
            for name, t in hot.tables.items()
        },
    }


def _cost(cost: ThresholdCost) -> dict[str, Any]:
    return {
        "threshold": cost.threshold,
        "rows": cost.rows._asdict(),
        "bytes": cost.bytes._asdict(),
        "share": cost.share._asdict(),
    }


def _drawn(curve: Curve) -> dict[str, list[float]]:
    """As many points of the curve as an eye can tell apart, evenly over the logarithm of memory."""
    at = np.unique(np.searchsorted(curve.bytes, np.geomspace(curve.bytes[0], curve.bytes[-1], _POINTS)))
    at = np.minimum(at, len(curve.bytes) - 1)
    return {"bytes": curve.bytes[at].tolist(), "share": curve.share[at].tolist()}
