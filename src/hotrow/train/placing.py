"""Where the rows of a run live: its tiers and first plan, from the run file and the ranks there are.

| `cluster.rows` | | default |
| --- | --- | --- |
| host | this process's memory | of one process |
| served | shards, maybe with a cache in front | where shards are given |
| sharded, replicated | a part of them, or all, on every rank | sharded: of several ranks |

A plan that names tiers of several ranks (`hotrow plan --topology`) takes their place. Under `Sync` and `Exact` the
ranks' pushes of a step are one update; under `Hybrid` each is applied when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from hotrow.capabilities import held_by_devices, kept_in_words
from hotrow.plan import Plan
from hotrow.policy import Bounded, Hybrid
from hotrow.run import Run
from hotrow.table import Table
from hotrow.tiers import HostTier
from hotrow.tiers.cached import Cache, CachedTier
from hotrow.tiers.exact_cache import ExactCachedTier
from hotrow.tiers.hops import WireFormat
from hotrow.tiers.ranks import tiers_on_devices
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Tier
from hotrow.train.ranks import Ranks

_NAMES = {"host": "host", "served": "served", "sharded": "world", "replicated": "replicated"}
_SHARD_S = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Placing:
    """The tiers that are there from the start (others come with the plan), and the plan."""

    tiers: dict[str, Tier] | None
    plan: Plan | None


def place(run: Run, tables: Sequence[Table], ranks: Ranks, say: Say) -> Placing:
    """Where `run` has the rows of `tables`. That it can have them there is known: `compatibility.problems`."""
    cluster, several = run.cluster, ranks.world.size > 1
    if several and run.plan is not None:
        return Placing(None, _plan_of_ranks(run, tables, say))
    rows = cluster.rows or ("served" if cluster.shards else "sharded" if several else "host")
    if rows == "served":
        return _served(run, tables, ranks, say)
    if cluster.cache is not None:
        cached = CachedTier(HostTier(tables, run.train.seed), _cache_of(run, cluster.cache, 1), seed=run.train.seed)
        return Placing({"cached": cached}, Plan.all_on("cached", tables))
    return Placing(None, _travelling_as(cluster.wire, Plan.all_on(_NAMES[rows], tables)))


def _served(run: Run, tables: Sequence[Table], ranks: Ranks, say: Say) -> Placing:
    cluster = run.cluster
    at_once = isinstance(run.policy, Hybrid) and run.policy.staleness > 0
    served = ServedTier(
        cluster.shards,
        tables,
        seed=run.train.seed,
        world=ranks.world,
        combine=not at_once,
        group=ranks.decide(uuid4().hex),
        wire=cluster.wire or "float32",
        key=cluster.key,
        timeout=cluster.timeout or _SHARD_S,
        on_wait=lambda address, seconds: say(f"Waiting for the shard at {address}, {seconds:.0f} s so far."),
    )
    if cluster.cache is None:
        return Placing({"served": served}, Plan.all_on("served", tables))
    cache = _cache_of(run, cluster.cache, ranks.world.size)
    exact = cache.bound == 0 and served.combines
    cached = (ExactCachedTier if exact else CachedTier)(served, cache, seed=run.train.seed, world=ranks.world)
    return Placing({"cached": cached}, Plan.all_on("cached", tables))


def _cache_of(run: Run, cache: Cache, workers: int) -> Cache:
    """The cache's settings; how stale it may be is the policy's to say.

    Rows of several ranks are fresh but under `Bounded`: the clock is 0. One rank's cache is exact with any.
    """
    if isinstance(run.policy, Bounded):
        return cache.model_copy(update={"clock": run.policy.clock, "ahead": run.policy.ahead})
    return cache.model_copy(update={"clock": 0}) if workers > 1 else cache


def _plan_of_ranks(run: Run, tables: Sequence[Table], say: Say) -> Plan:
    assert run.plan is not None and run.plan.path is not None
    plan = Plan.load(run.plan.path)
    plan.check(list(tables))
    plan, kept = held_by_devices(plan, tables, tiers_on_devices(plan, run.plan.device_rows))
    if kept:
        say(kept_in_words(kept))
    return _travelling_as(run.cluster.wire, plan)


def _travelling_as(wire: WireFormat | None, plan: Plan) -> Plan:
    """The plan, with rows on the way as the run says where it does."""
    return plan if wire is None else Plan(plan.shares, plan.row_bytes, {**plan.facts, "wire": wire})
