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

from hotrow.errors import SettingsError
from hotrow.plan import Plan
from hotrow.policy import Bounded, Hybrid, Sync
from hotrow.run import Run
from hotrow.table import Table
from hotrow.tiers import HostTier
from hotrow.tiers.cached import Cache, CachedTier
from hotrow.tiers.exact_cache import ExactCachedTier
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Tier
from hotrow.train.ranks import Ranks

_NAMES = {"host": "host", "served": "served", "sharded": "world", "replicated": "replicated"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Placing:
    """The tiers that are there from the start (others come with the plan), and the plan."""

    tiers: dict[str, Tier] | None
    plan: Plan | None


def place(run: Run, tables: Sequence[Table], ranks: Ranks, say: Say) -> Placing:
    """Where `run` has the rows of `tables`."""
    cluster, several = run.cluster, ranks.world.size > 1
    rows = cluster.rows or ("served" if cluster.shards else "sharded" if several else "host")
    if several and rows == "host":
        raise SettingsError(
            f'cluster.rows is "host", but there are {ranks.world.size} ranks, each of which would train rows of its '
            f'own. Set it to "sharded", or to "served" with shards.'
        )
    if several and run.plan is not None:
        return Placing(None, _plan_of_ranks(run, tables))
    if rows == "served":
        if not cluster.shards:
            raise SettingsError(
                'cluster.rows is "served", but there are no shards. Give their addresses, as shards = '
                '["tcp://127.0.0.1:7700"], or let `hotrow up RUN.toml --shards 2` start them.'
            )
        return _served(run, tables, ranks, say)
    if cluster.cache is not None:
        if several:
            raise SettingsError(
                "cluster.cache needs shards behind it when there are several ranks; give cluster.shards."
            )
        cache = _cache_of(run, cluster.cache, several)
        cached = CachedTier(HostTier(tables, run.train.seed), cache, seed=run.train.seed)
        return Placing({"cached": cached}, Plan.all_on("cached", tables))
    return Placing(None, Plan.all_on(_NAMES[rows], tables))


def _served(run: Run, tables: Sequence[Table], ranks: Ranks, say: Say) -> Placing:
    cluster = run.cluster
    if run.plan is not None:
        raise SettingsError(
            "plan: rows on shards and on a device at the same time is not possible yet; take one of plan and "
            "cluster.shards out of the run file."
        )
    at_once = isinstance(run.policy, Hybrid) and run.policy.staleness > 0
    served = ServedTier(
        cluster.shards,
        tables,
        seed=run.train.seed,
        world=ranks.world,
        combine=not at_once,
        group=ranks.decide(uuid4().hex),
        wire=cluster.wire,
        key=cluster.key,
        timeout=cluster.timeout,
        on_wait=lambda address, seconds: say(f"Waiting for the shard at {address}, {seconds:.0f} s so far."),
    )
    if cluster.cache is None:
        return Placing({"served": served}, Plan.all_on("served", tables))
    cache = _cache_of(run, cluster.cache, ranks.world.size > 1)
    exact = cache.clock == 0 and served.combines
    cached = (ExactCachedTier if exact else CachedTier)(served, cache, seed=run.train.seed, world=ranks.world)
    return Placing({"cached": cached}, Plan.all_on("cached", tables))


def _cache_of(run: Run, cache: Cache, several: bool) -> Cache:
    """The cache's settings; how stale it may be is the policy's to say.

    Under `Sync` rows are fresh: with several ranks the clock is 0, and one rank's cache is exact with any.
    """
    if isinstance(run.policy, Bounded):
        return cache.model_copy(update={"clock": run.policy.clock, "ahead": run.policy.ahead})
    return cache.model_copy(update={"clock": 0}) if several and isinstance(run.policy, Sync) else cache


def _plan_of_ranks(run: Run, tables: Sequence[Table]) -> Plan:
    assert run.plan is not None
    if run.plan.path is None:
        raise SettingsError(
            "plan.memory plans for the device of one process. For several ranks make a plan for their topology, "
            "hotrow plan DATA --topology FILE --out FILE.plan, and set plan.path."
        )
    plan = Plan.load(run.plan.path)
    plan.check(list(tables))
    return plan
