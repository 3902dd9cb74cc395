"""`HotCold`: batches that are wholly hot or wholly cold, as FAE has them (Adnan et al., 2021).

A sample is hot if every key it looks up, in every feature and every list, has its row on the device by the plan. One
pass over the data set marks the hot ones, a bit a sample. Hot batches run with the hot rows on the device, cold ones
with every row on the host; at a switch all hot rows move, with optimizer state and clock, in one copy. An epoch still
trains on every sample once, in random order within its kind: the price is that each row group is decoded twice.

The scheduler alternates: a share `rate` of an epoch's cold batches, then the same share of its hot ones. Few long turns
cost few copies, but training on one kind for long forgets the other; so the loss on validation is looked at, before
a switch and at most a hundred times an epoch. The rate is halved when the loss rises, doubled when it has fallen four
times in a row; it starts at 0.4% and stays between 0.2% and 1%, so an epoch has at least 200 switches, each a copy of
all hot rows. docs/hot-rows.md says what longer turns cost.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from hotrow._native import KeyMap
from hotrow.data.batch import Batch
from hotrow.data.dataset import DataSet
from hotrow.data.marks import Bools, Marks
from hotrow.data.reader import Reader
from hotrow.data.rowgroups import Footers, RowGroup
from hotrow.data.samples import Window, needed
from hotrow.data.steps import Step, apply
from hotrow.plan import Plan
from hotrow.run import PlanSection
from hotrow.train.best import loss_metric, watched
from hotrow.train.evaluate import Ranker, evaluate
from hotrow.train.feed import Line
from hotrow.train.planned import Planned, inside, interval, is_within, percent

START, LEAST, MOST = 0.004, 0.002, 0.01
"""The share of an epoch's batches of a kind that one turn takes: at first, and its bounds."""
FALLS = 4
"""Losses in a row below the one before after which turns become longer."""
LOOKS = 100
"""How often the loss on validation is looked at in an epoch, at most."""

Kind = Literal["cold", "hot"]


@dataclass
class Schedule:
    """Whose turn it is: `batches` an epoch has of each kind, `done` of this epoch, `left` of this turn.

    `unseen` were trained on since the loss on validation was looked at.
    """

    batches: dict[Kind, int]
    kind: Kind = "cold"
    epoch: int = 0
    done: dict[Kind, int] = field(default_factory=lambda: {"cold": 0, "hot": 0})
    left: int = 0
    rate: float = START
    loss: float | None = None
    falls: int = 0
    unseen: int = 0

    def step(self) -> None:
        """A batch of the present kind was trained on."""
        self.done[self.kind] += 1
        self.left -= 1
        self.unseen += 1

    @property
    def due(self) -> bool:
        """Whether the loss on validation is to be looked at before this switch."""
        return self.unseen * LOOKS >= sum(self.batches.values())

    def next_kind(self) -> Kind:
        """Whose turn is next: the other kind's while it has batches; an epoch begins with cold ones."""
        if self.done == self.batches or not any(self.done.values()):
            return "cold" if self.batches["cold"] else "hot"
        other: Kind = "hot" if self.kind == "cold" else "cold"
        return other if self.done[other] < self.batches[other] else self.kind

    def turn(self) -> None:
        """Begins the next turn, in the next epoch where this one is over."""
        kind = self.next_kind()
        if self.done == self.batches:
            self.epoch, self.done = self.epoch + 1, {"cold": 0, "hot": 0}
        self.kind = kind
        wanted = max(1, round(self.rate * self.batches[kind]))
        self.left = min(wanted, self.batches[kind] - self.done[kind])

    def judge(self, loss: float) -> None:
        """Takes the loss on validation before a switch into account."""
        self.unseen = 0
        if self.loss is not None and loss > self.loss:
            self.rate, self.falls = max(LEAST, self.rate / 2), 0
        elif self.loss is not None and loss < self.loss:
            self.falls += 1
            if self.falls == FALLS:
                self.rate, self.falls = min(MOST, self.rate * 2), 0
        self.loss = loss


class HotCold(Planned):
    """Alternates between hot and cold batches; the plan never changes."""

    def __init__(self, ranker: Ranker, settings: PlanSection) -> None:
        super().__init__(ranker, settings)
        self._sources: dict[Kind, Iterator[Batch]] = {}

    def start(self) -> list[str]:
        said = super().start()
        self.schedule.turn()
        self._place_rows()
        whole = self.hot.samples + self.cold.samples
        return [*said, f"{self.hot.samples:,} of {whole:,} samples look up hot rows only."]

    def restore(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        super().restore(step, state, arrays)
        self.schedule = Schedule(**state["schedule"])
        self._place_rows()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "schedule": asdict(self.schedule)}

    @property
    def batches(self) -> int:
        return sum(self.schedule.batches.values())

    def close(self) -> None:
        super().close()
        self._sources = {}

    def update(self, batch: Batch) -> None:
        super().update(batch)
        self.schedule.step()

    def between_steps(self) -> list[Line]:
        super().between_steps()
        if self.schedule.left:
            return []
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        before, epoch = self.schedule.kind, self.schedule.epoch
        lines: list[Line] = []
        if self.schedule.next_kind() != before and self.schedule.due:
            split = watched(self.run, self.ranker.data)
            loss = evaluate(self.ranker, split, samples=self.settings.judge)[loss_metric(self.ranker.objective)]
            self.schedule.judge(loss)
            lines = [("switch", {"loss": loss, "rate": self.schedule.rate, "to": self.schedule.next_kind()})]
        self.schedule.turn()
        if self.schedule.epoch != epoch:
            self._sources = {}
        if self.schedule.kind != before:
            self._place_rows()
        return lines

    def verdict(self) -> dict[str, Any]:
        """The share of samples that are hot, which the plan predicted too, and of the accesses that are theirs."""
        found = super().verdict()
        hot = self.hot.samples / max(self.hot.samples + self.cold.samples, 1)
        predicted = self.plan.facts.get("samples")
        within = None if predicted is None else is_within(hot, predicted)
        said = f"{percent(hot)} of the samples look up hot rows only, with {percent(found['measured'])} of the accesses"
        if predicted is not None:
            said += f"; the plan said {interval(predicted)} of the samples: {inside(bool(within))}"
        else:
            said += "; the plan says nothing of it."
        return {**found, "measured": hot, "predicted": predicted, "within": within, "said": said}

    def _put_in_force(self, plan: Plan) -> None:
        super()._put_in_force(plan)
        data = self.run.data
        self.hot = hot_samples(
            self.ranker.data,
            data.train,
            plan,
            {f.name: f.table for f in self.ranker.embeddings.features.values()},
            steps=data.steps,
            threads=self.run.train.threads,
        )
        self.cold = self.hot.others()
        self.schedule = Schedule({"cold": len(self._reader("cold")), "hot": len(self._reader("hot"))})

    def _place_rows(self) -> None:
        """Rows to where batches of the present kind have them."""
        self.accesses.settle()
        hot = self.schedule.kind == "hot"
        self.ranker.embeddings.replan(self.plan if hot else Plan.all_on("host", self.tables))

    def _reader(self, kind: Kind) -> Reader:
        """The samples of a kind, in batches of nearly one size: a step on the few that are left over is all noise."""
        marks, size = self.hot if kind == "hot" else self.cold, self.run.data.batch_size
        even = -(-marks.samples // max(1, -(-marks.samples // size)))
        data = self.run.data
        return self.ranker.reader(data.train, shuffle=data.shuffle, only=marks, batch_size=max(1, even))

    def _order(self) -> Iterator[Batch]:
        """The rest of the present turn."""
        kind = self.schedule.kind
        if kind not in self._sources:
            reader = self._reader(kind)
            reader.seek(self.schedule.epoch, self.schedule.done[kind])
            self._sources[kind] = iter(reader)
        return itertools.islice(self._sources[kind], self.schedule.left)


def hot_samples(
    dataset: DataSet,
    split: str,
    plan: Plan,
    table_of: Mapping[str, str],
    *,
    steps: tuple[Step, ...] = (),
    threads: int | None = None,
) -> Marks:
    """The samples whose every key has its row on the device; what repeats in the data set is looked at once."""
    held = plan.keys_on("device")
    maps = {table: KeyMap(held.get(table, np.empty(0, np.int64))) for table in plan.shares}
    schema = dataset.schema
    without = set(schema.columns) - needed(schema, sessions=False)
    footers: Footers = {}

    def marked(group: RowGroup) -> Bools:
        with dataset.reading():
            read = group.read(schema, footers, without)
        window = apply(steps, Window.of([read], schema))
        return _hot(window, {feature: maps[table] for feature, table in table_of.items()})

    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="hotrow-marks") as pool:
        return Marks(pool.map(marked, dataset.row_groups(split)))


def _hot(window: Window, maps: Mapping[str, KeyMap]) -> Bools:
    """Which samples of a window look up rows of `maps` only."""
    hot = np.ones(window.size, np.bool_)
    for feature in window.schema.features:
        column = window.columns[feature.column]
        rows: Bools = maps[feature.name].find(np.ascontiguousarray(column.values)) >= 0
        if column.begins is not None and column.lengths is not None:
            cold = np.concatenate([[0], np.cumsum(~rows)])
            rows = cold[column.begins + column.lengths] == cold[column.begins]
        inverse = window.inverses.get(window.places[feature.column])
        hot &= rows if inverse is None else rows[inverse]
    return hot
