"""`feed_of`: which feed gives a run its batches."""

from __future__ import annotations

from hotrow.train.evaluate import Ranker
from hotrow.train.feed import Feed
from hotrow.train.follow import Following
from hotrow.train.hot_cold import HotCold
from hotrow.train.planned import Planned
from hotrow.train.planned_ranks import PlannedRanks


def feed_of(ranker: Ranker) -> Feed:
    """The feed that a run's settings ask for."""
    plan = ranker.run.plan
    if ranker.run.data.follow is not None:
        return Following(ranker)
    if plan is None:
        return Feed(ranker)
    if ranker.ranks.world.size > 1:
        return PlannedRanks(ranker, plan)
    return HotCold(ranker, plan) if plan.mode == "hot_cold" else Planned(ranker, plan)
