"""`synth`: a session log whose truth is known, so that the best reachable AUC can be printed.

Users, items, interests and contexts have planted factors and effects. A sample's logit is

    bias + user + item + Σ context + Σ slow + dense·w + item factor · (user factor + Σ interests + history)

with means over the lists, and its label a coin with that chance. Nothing ranks samples better than the true
logit does, but for luck: its AUC on the test part (`best_auc`) and its log loss go to the log's facts. Keys
follow Zipf's law and are spread over all of int64.

Sessions begin every few seconds, last minutes and overlap; the log is in order of time, as a real one is. In
a session, slow features of the user and the snapshot of the history change with chance `change` a sample; a
history holds the last items that the user saw before its snapshot, so it slides. `PRESETS` has settings for logs
that repeat as published ones do.

Every number is a hash of seed, session and sample, so a log is the same however it is chunked. About 0.4
million samples a second on one core, 0.05 with the long lists of the preset `recd`; memory grows with users, items,
open sessions and test samples only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from hotrow.data.folder import NewFolder
from hotrow.data.mix import Randoms
from hotrow.data.parts import PartsWriter
from hotrow.data.schema import Column, Schema
from hotrow.data.sessions import Sessions, Visits
from hotrow.data.sources.tabular import LOG
from hotrow.errors import SettingsError, nearest
from hotrow.files import write_text
from hotrow.objectives import binary_metrics
from hotrow.settings import Settings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SynthSettings(Settings):
    """The size of a log, how it repeats, and how strong its signals are."""

    samples: int = Field(400_000, gt=0)
    users: int = Field(1_000, gt=0)
    items: int = Field(1_000, gt=0)
    seed: int = Field(0, ge=0)
    user_zipf: float = Field(1.05, ge=0, description="exponent of Zipf's law for users; 0 is uniform")
    item_zipf: float = Field(1.05, ge=0, description="exponent of Zipf's law for items and contexts")
    samples_per_session: float = Field(16.5, ge=1, description="mean; 16.5 is what RecD reports")
    pause: float = Field(30.0, gt=0, description="mean seconds between two samples of a session; they begin every 2.5")
    whole: bool = Field(False, description="the log ends when its last session does, not in the midst of many")
    history_length: int = Field(20, gt=0)
    history_change: float | None = Field(
        None, ge=0, le=1, description="chance of a newer snapshot of the history, a sample; `change` if not given"
    )
    past: int = Field(0, ge=0, description="items each user has seen before the log begins, `history_length` at most")
    contexts: int = Field(4, ge=0, description="one-key features that are drawn anew for each sample")
    slow: int = Field(3, ge=0, description="one-key features of the user that seldom change in a session")
    interests: int = Field(1, ge=0, description="list features of the user that seldom change in a session")
    interest_length: int = Field(5, ge=2, description="most keys of an interest; there are at least 2")
    clocks: int | None = Field(
        None, gt=0, description="in how many sets slow features and interests change together; each alone if not given"
    )
    vocabulary: int = Field(50, gt=0, description="distinct keys of each context, slow and interest feature")
    dense: int = Field(4, ge=0)
    factors: int = Field(2, gt=0, description="dimension of the planted factors")
    strength: float = Field(1.0, ge=0, description="scales all that tells labels apart; 0 makes them coins")
    change: float = Field(0.1, ge=0, le=1, description="chance of a change within a session, a sample")
    test: float = Field(0.1, gt=0, lt=1, description="share of the log, its end, that best_auc is for")

    def log_schema(self) -> Schema:
        """What the columns of the log mean."""
        return Schema(
            label="label",
            dense=tuple(f"dense_{i}" for i in range(self.dense)),
            features=(
                Column(name="user"),
                Column(name="item"),
                Column(
                    name="history",
                    kind="keys",
                    table="item",
                    pooling="sequence",
                    max_length=self.history_length,
                ),
                *(Column(name=f"interests_{i}", kind="keys", pooling="mean") for i in range(self.interests)),
                *(Column(name=f"slow_{i}") for i in range(self.slow)),
                *(Column(name=f"context_{i}") for i in range(self.contexts)),
            ),
            session="session",
            time="time",
            user="user",
        )


PRESETS: dict[str, dict[str, Any]] = {
    "recd": {
        "users": 40_000,
        "items": 20_000,
        "user_zipf": 0.5,
        "samples_per_session": 16.5,
        "pause": 1500.0,
        "whole": True,
        "history_length": 100,
        "history_change": 0.155,
        "past": 100,
        "interests": 4,
        "interest_length": 18,
        "slow": 5,
        "clocks": 2,
        "change": 0.05,
        "vocabulary": 1_000,
        "contexts": 2,
        "dense": 2,
    },
}
"""Settings by name. `recd` repeats as the logs RecD reports on: 16.5 samples a session, of which 1.15 meet in 4096
neighbours of the log; 80% of all values exact repeats of the sample before, 89% counting histories that slid."""


def preset_settings(name: str) -> dict[str, Any]:
    """The settings of a preset; nothing for no name."""
    if name and name not in PRESETS:
        raise SettingsError(f'There is no preset "{name}".{nearest(name, PRESETS)}')
    return dict(PRESETS[name]) if name else {}


def write_log(
    settings: SynthSettings,
    out: Path | str,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes the log to folder `out`, ready for `prepare`; gives its facts. `progress` gets rows and total."""
    first_test = settings.samples - max(1, round(settings.samples * settings.test))
    logits: list[Floats] = []
    labels: list[NDArray[np.float32]] = []
    test_from, done = 0, 0
    writer: PartsWriter | None = None
    with NewFolder(out, LOG, overwrite) as folder:
        try:
            for rows, logit in generate(settings):
                if writer is None:
                    writer = PartsWriter(folder.work, "log", rows.schema, 1 << 16, 1 << 20)
                writer.write(rows)
                skip = max(0, first_test - done)
                if skip < len(rows):
                    if not logits:
                        test_from = rows.column("time")[skip].as_py()
                    logits.append(logit[skip:])
                    labels.append(rows.column("label").to_numpy()[skip:])
                done += len(rows)
                if progress is not None:
                    progress(done, settings.samples)
            assert writer is not None  # there is at least one sample
            writer.finish()
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        facts = _facts(settings, np.concatenate(logits), np.concatenate(labels), test_from)
        write_text(folder.work / "schema.json", settings.log_schema().to_json())
        known = {"split": f"time:{test_from}", "facts": facts}
        write_text(folder.work / LOG, json.dumps(known, indent=2) + "\n")
    return facts


def generate(settings: SynthSettings) -> Iterator[tuple[pa.RecordBatch, Floats]]:
    """The log in order of time, some rows at a time, with the true logit of each."""
    world = _World(settings)
    left = settings.samples
    for visits in Sessions(settings, world.random):
        visits = visits.first(left)
        yield world.rows(visits)
        left -= len(visits)
        if not left:
            return


class _World:
    """The planted factors and effects, and what they make of a visit."""

    def __init__(self, settings: SynthSettings) -> None:
        self.settings = settings
        self.random = random = Randoms(settings.seed)
        s, d = settings, settings.factors
        self._users = random.normals("user factors", s.users, d) / d**0.5
        items = random.normals("item factors", s.items, d) / d**0.5
        self._items = np.vstack([items, np.zeros((1, d))])  # the last stands for "no item"
        self._user_effects = random.normals("user effects", s.users, 1)[:, 0]
        self._item_effects = random.normals("item effects", s.items, 1)[:, 0]
        self._weights = random.normals("dense weights", s.dense, 1)[:, 0] if s.dense else np.zeros(0)
        self._effects = {
            name: random.normals(name, s.vocabulary, 1)[:, 0]
            for name in (*self._names("slow", s.slow), *self._names("context", s.contexts))
        }
        interests = self._names("interests", s.interests)
        self._interests = {name: random.normals(name, s.vocabulary, d) / d**0.5 for name in interests}
        self._keys = {
            table: random.keys(table, count)
            for table, count in (
                ("user", s.users),
                ("item", s.items),
                *((name, s.vocabulary) for name in (*self._effects, *self._interests)),
            )
        }

    @staticmethod
    def _names(kind: str, count: int) -> list[str]:
        return [f"{kind}_{i}" for i in range(count)]

    def rows(self, v: Visits) -> tuple[pa.RecordBatch, Floats]:
        """The log's columns for these visits, and their true logits."""
        s, random = self.settings, self.random
        item = self._items[v.item]
        logit = _BIAS + s.strength * (
            _EFFECT * (self._user_effects[v.user] + self._item_effects[v.item])
            + _AFFINITY * (self._users[v.user] * item).sum(axis=1)
        )
        columns: dict[str, pa.Array] = {
            "session": pa.array(random.key_of("session", v.session)),
            "time": pa.array(v.time),
            "user": pa.array(self._keys["user"][v.user]),
            "item": pa.array(self._keys["item"][v.item]),
        }
        history, taste = self._history(v)
        columns["history"] = history
        logit += s.strength * _AFFINITY * (taste * item).sum(axis=1)
        for name, factors in self._interests.items():
            lists, taste = self._interest(name, factors, v)
            columns[name] = lists
            logit += s.strength * _AFFINITY * (taste * item).sum(axis=1)
        for name, effects in self._effects.items():
            if name.startswith("slow"):
                drawn = random.uniform(name, v.user, *v.state(int(name.removeprefix("slow_"))))
                ordinals = (drawn * s.vocabulary).astype(np.int64)
            else:
                ordinals = random.zipf(s.vocabulary, s.item_zipf, random.uniform(name, v.session, v.step))
            columns[name] = pa.array(self._keys[name][ordinals])
            logit += s.strength * _EFFECT * effects[ordinals]
        for i, weight in enumerate(self._weights):
            values = (random.uniform(f"dense_{i}", v.session, v.step) * 2 - 1).astype(np.float32)
            columns[f"dense_{i}"] = pa.array(values)
            logit += s.strength * _EFFECT * weight * values
        clicked = random.uniform("label", v.session, v.step) < 1 / (1 + np.exp(-logit))
        columns["label"] = pa.array(clicked.astype(np.float32))
        return pa.record_batch(columns), logit

    def _history(self, v: Visits) -> tuple[pa.Array, Floats]:
        """The history as keys, and the mean factor of its items."""
        there = v.history < self.settings.items
        lengths = there.sum(axis=1)
        keys = self._keys["item"][v.history[there]]
        total = np.zeros((len(v), self.settings.factors))
        for column in v.history.T:
            total += self._items[column]
        return _lists(keys, lengths), total / np.maximum(lengths, 1)[:, None]

    def _interest(self, name: str, factors: Floats, v: Visits) -> tuple[pa.Array, Floats]:
        """The interests as keys, and their mean factor; at least 2 of them."""
        s, random = self.settings, self.random
        state = v.state(s.slow + int(name.removeprefix("interests_")))
        most = s.interest_length
        lengths = 2 + (random.uniform(name + " length", v.user, *state) * (most - 1)).astype(np.int64)
        drawn = np.empty((len(v), most), dtype=np.int64)
        total = np.zeros((len(v), s.factors))
        for i in range(most):
            drawn[:, i] = random.uniform(f"{name} {i}", v.user, *state) * s.vocabulary
            total += np.where((i < lengths)[:, None], factors[drawn[:, i]], 0.0)
        keys = self._keys[name][drawn[np.arange(most) < lengths[:, None]]]
        return _lists(keys, lengths), total / lengths[:, None]


_BIAS, _EFFECT, _AFFINITY = -1.2, 0.25, 1.5


def _lists(values: Ints, lengths: Ints) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _facts(settings: SynthSettings, logits: Floats, labels: NDArray[np.float32], test_from: int) -> dict[str, Any]:
    return {
        "made_by": "hotrow synth",
        "settings": settings.model_dump(),
        "test_from": test_from,
        "best_auc": auc(logits, labels),
        "best_log_loss": binary_metrics.log_loss(logits, (labels > 0).astype(np.float64), np.ones(len(labels))),
        "test_rate": float(labels.mean()),
    }


def auc(scores: Floats, labels: NDArray[np.float32]) -> float | None:
    """The chance that a positive sample scores above a negative one, ties half; None without both."""
    found = binary_metrics.auc(scores, (labels > 0).astype(np.float64), np.ones(len(labels)))
    return None if math.isnan(found) else found
