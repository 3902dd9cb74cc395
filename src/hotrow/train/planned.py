"""`Planned`: hot rows on the device, each batch split over both tiers: the same answer as without a plan.

The plan is a saved one, or made for a budget when the run starts, from the profile of its data set (the whole is
counted, so what it predicts is certain). With `replan_every` a new one is made from what was trained on, with the same
budget; rows move between two steps with state and clock, so no update is lost. Making it costs a pass over the counts
and a copy of all hot rows, in which training stands still; the metrics say how long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.capabilities import held_by_devices, kept_in_words
from hotrow.data.batch import Batch
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.plan.budget import count_keys, plan_data_set, said_of
from hotrow.plan.hot import hot_rows
from hotrow.profile import fingerprint
from hotrow.profile.counts import KeyCounts
from hotrow.run import PlanSection
from hotrow.sizes import size_text
from hotrow.tiers.device import DeviceTier
from hotrow.train.accesses import Accesses, Seen
from hotrow.train.evaluate import Ranker
from hotrow.train.feed import Feed, Line
from hotrow.train.logs import RunFolder

_ROUNDING = 1e-9
_NO_KEYS = np.empty(0, np.int64)
_COUNTED = {False: " from the data set's profile", True: " from a count of the log, whose keys data.steps change"}


class Planned(Feed):
    """A feed with a plan."""

    def __init__(self, ranker: Ranker, settings: PlanSection) -> None:
        super().__init__(ranker)
        self.settings = settings
        self.tables = list(ranker.embeddings.tables.values())
        self.device_bytes = 0  # the most there were
        self._closing = contextlib.ExitStack()
        self._began = 0  # the step after which the plan in force began
        self._before = Seen()  # what had been accessed then,
        self._logged = Seen()  # and at the last line of metrics
        self._whole: Seen | None = None  # what was accessed in whole epochs under the plan in force

    def start(self) -> list[str]:
        plan = self._first_plan()
        self._put_in_force(plan)
        facts, said = plan.facts, [kept_in_words(plan.facts["kept"])] if plan.facts.get("kept") else []
        if "share" not in facts:
            return said
        share = percent(facts["share"]["value"])
        counted = "" if self.settings.path is not None else _COUNTED[bool(facts["steps"])]
        hot = f"Hot rows: {facts['rows']:,} in {size_text(facts['bytes'])}, {share} of all accesses as planned"
        planned = f"{hot}{counted}."
        return [planned, *said]

    def write(self, folder: RunFolder) -> None:
        """Keeps the plan that the run has made for itself."""
        if self.settings.path is None:
            self.plan.save(folder.plan, overwrite=True)

    def restore(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        super().restore(step, state, arrays)
        hot = {t.name: arrays[f"feed/plan/{i}"].numpy() for i, t in enumerate(self.tables)}
        self._put_in_force(Plan(_shares(hot), dict(state["row_bytes"]), dict(state["facts"])))
        self._began = state["began"]
        self._before, self._logged = Seen(*state["before"]), Seen(*state["logged"])
        self._whole = None if state["whole"] is None else Seen(*state["whole"])
        self.accesses.hits, self.accesses.total = state["accesses"]
        self.device_bytes = max(self.device_bytes, state["device_bytes"])
        if self.accesses.counts is not None:
            for i, table in enumerate(self.tables):
                kept = {name: arrays[f"feed/live/{i}/{name}"].numpy() for name in _COUNTS}
                self.accesses.counts[table.name] = KeyCounts.of_arrays(kept)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "row_bytes": self.plan.row_bytes,
            "facts": self.plan.facts,
            "began": self._began,
            "before": self._before,
            "logged": self._logged,
            "whole": self._whole,
            "accesses": self.accesses.settle(),
            "device_bytes": self.device_bytes,
        }

    def arrays(self) -> dict[str, Tensor]:
        self.accesses.settle()
        hot = self.plan.keys_on("device")
        # Copies, for the keys of a plan that was loaded are the file's own and must not be written to.
        found = {f"feed/plan/{i}": torch.tensor(hot.get(t.name, _NO_KEYS)) for i, t in enumerate(self.tables)}
        for i, table in enumerate(self.tables):
            if self.accesses.counts is not None:
                kept = self.accesses.counts[table.name].arrays()
                found |= {f"feed/live/{i}/{name}": torch.from_numpy(kept[name]) for name in _COUNTS}
        return found

    def close(self) -> None:
        super().close()
        self._closing.close()

    def hold(self, batch: Batch, samples: int) -> None:
        super().hold(batch, samples)
        self.accesses.see(batch)

    def update(self, batch: Batch) -> None:
        super().update(batch)
        self.accesses.see(batch)

    def between_steps(self) -> list[Line]:
        every = self.settings.replan_every
        ended = self.step % self.steps_an_epoch == 0
        if ended and self._began % self.steps_an_epoch == 0:
            self._whole = self.accesses.settle().since(self._before)
        due = ended if every == "epoch" else every is not None and self.step % every == 0
        return [self._replan()] if due else []

    def metrics(self) -> dict[str, float]:
        seen = self.accesses.settle()
        share, self._logged = seen.since(self._logged).value, seen
        return {"hit_share": share, "device_bytes": self.tier.bytes}

    def verdict(self) -> dict[str, Any]:
        """What the device held and what the plan said of it; `within` is None where it spoke of something else."""
        found = {"measured": self.accesses.settle().value, "device_bytes": self.device_bytes, **self._judged()}
        share, within = found["predicted"], found["within"]
        if self.plan.facts.get("counted") == "live":
            said = f"; the last plan, of step {self._began:,}, held {percent(share['value'])} of those before it."
        elif share is None:
            said = "; the plan says nothing of it."
        elif within is None:
            said = f"; the plan says {interval(share)} of a whole epoch; this run trained less, or on other keys."
        else:
            said = f"; the plan said {interval(share)}: {inside(within)}"
        held = f"The device held the rows of {percent(found['measured'])} of the accesses"
        return {**found, "said": f"{held}, in {size_text(self.device_bytes)}{said}"}

    def _judged(self) -> dict[str, Any]:
        """What the plan in force predicted, and whether whole epochs under it bore that out."""
        predicted = self.plan.facts.get("share")
        within = None
        same = self.plan.facts.get("counted") != "live" and not any(step.random for step in self.run.data.steps)
        if predicted is not None and same and self._whole is not None:
            within = is_within(self._whole.value, predicted)
        return {"predicted": predicted, "within": within}

    @property
    def tier(self) -> DeviceTier:
        found = self.ranker.embeddings.router.tiers["device"]
        assert isinstance(found, DeviceTier)
        return found

    def _put_in_force(self, plan: Plan) -> None:
        """The first plan of this process, before any row is there."""
        embeddings = self.ranker.embeddings
        embeddings.replan(plan)
        self.plan = plan
        self._took()
        self.accesses = Accesses(self.tier, {f.name: f.table for f in embeddings.features.values()})
        self._closing.callback(self.accesses.close)
        if self.settings.replan_every is not None:
            self.accesses.count(self.tables, self._memory())

    def _took(self) -> None:
        """Notes what the device's rows take."""
        self.device_bytes = max(self.device_bytes, self.tier.bytes)

    def _first_plan(self) -> Plan:
        if self.settings.path is not None:
            return self._saved_plan(self.settings.path)
        data, memory = self.run.data, self.settings.bytes
        assert memory is not None
        counted = count_keys(self.ranker.data, split=data.train, steps=data.steps)
        try:
            hot_cold = self.settings.mode == "hot_cold"
            plan, _ = plan_data_set(
                self.ranker.data, self.tables, memory, counted, split=data.train, judge_samples=hot_cold
            )
        except SettingsError as error:
            raise SettingsError(f"plan.memory: {error}") from None
        return plan

    def _saved_plan(self, path: Path) -> Plan:
        """The plan in a file; refuses one that this run can make no use of."""
        plan, data = Plan.load(path), self.run.data
        again = f"Plan again: hotrow plan {data.path} --run RUN.toml --memory SIZE --out {path} --overwrite"
        made_for = plan.facts.get("fingerprint")
        if made_for is not None and made_for != fingerprint(self.ranker.data.parts(data.train)):
            raise SettingsError(
                f"plan.path: {path} was made from another data set, {plan.facts.get('data')}, than the split "
                f'"{data.train}" of {data.path}. {again}'
            )
        if plan.facts.get("steps", said_of(data.steps)) != said_of(data.steps):
            raise SettingsError(
                f"plan.path: {path} names keys as other data.steps leave them than this run has, so it would find "
                f"few of them. {again}"
            )
        try:
            plan.check(self.tables)
        except SettingsError as error:
            raise SettingsError(f"plan.path: {path}: {error}") from None
        for table, (*named, rest) in plan.shares.items():
            if rest.tier != "host" or any(share.tier != "device" for share in named):
                tiers = ", ".join(share.tier for share in (*named, rest))
                raise SettingsError(
                    f"plan.path: {path} puts table {table} on {tiers}; a run puts rows that are named on the device "
                    f"and all others on the host. {again}"
                )
        if not any(map(len, plan.keys_on("device").values())):
            raise SettingsError(f"plan.path: {path} puts no row on the device, so nothing is gained. {again}")
        able, kept = held_by_devices(plan, self.tables, ["device"])
        if kept and not able.keys_on("device"):
            raise SettingsError(f"plan.path: {path}: {kept_in_words(kept)} So nothing is gained: take [plan] away.")
        facts = {**plan.facts, "kept": {**plan.facts.get("kept", {}), **kept}}
        return Plan(able.shares, able.row_bytes, facts)

    def _replan(self) -> Line:
        """Makes a plan of what was trained on and moves rows to where it has them."""
        began = time.monotonic()
        before, seen = self._judged(), self.accesses.settle()
        assert self.accesses.counts is not None
        hot = hot_rows(self.tables, self.accesses.counts, self._memory())
        facts = {
            "counted": "live",
            "memory": hot.memory,
            "bytes": hot.bytes,
            "rows": sum(t.rows for t in hot.tables.values()),
            "share": hot.share._asdict(),
        }
        self.plan = Plan(hot.plan.shares, hot.plan.row_bytes, facts)
        with self.paused():
            self.ranker.embeddings.replan(self.plan)
        self.accesses.forget()
        self._took()
        values = {
            "rows": facts["rows"],
            "device_bytes": self.tier.bytes,
            "share": hot.share.value,
            "hit_share_before": seen.since(self._before).value,
            "within_before": before["within"],
            "stopped_training_for": time.monotonic() - began,
        }
        self._began, self._before, self._whole = self.step, seen, None
        return "plan", values

    def _memory(self) -> int:
        """The budget that every plan of the run keeps."""
        return int(self.settings.bytes or self.plan.facts["memory"])


_COUNTS = ("keys", "counts", "about", "registers")


def _shares(hot: Mapping[str, Any]) -> dict[str, tuple[Share, ...]]:
    return {
        name: (Share("device", keys), Share("host")) if len(keys) else (Share("host"),) for name, keys in hot.items()
    }


def is_within(value: float, interval: Mapping[str, float]) -> bool:
    return bool(interval["low"] - _ROUNDING <= value <= interval["high"] + _ROUNDING)


def inside(within: bool) -> str:
    return "within its interval." if within else "outside its interval."


def interval(share: Mapping[str, float]) -> str:
    value = percent(share["value"])
    if share["low"] == share["high"]:
        return value
    return f"{value} ({percent(share['low'])} to {percent(share['high'])})"


def percent(share: float) -> str:
    return f"{share:.2%}"
