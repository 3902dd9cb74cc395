"""What in a run cannot work together, known from run file and command line alone, before anything starts.

`problems` is one pure function: it reads no file and asks no device. `refuse_problems` calls it with what can be read
(the data set's schema, the facts of a saved plan) and raises all it finds as one `SettingsError`, a sentence each.
`hotrow train` asks before it makes a folder and `hotrow up` before it starts a shard. A setting of one section that
contradicts another of the same section is refused by that section's model, when the run file is read.

A setting that nobody would read is a problem too. Those whose value otherwise follows from the rest of the run have no
default (`cluster.wire`, `cluster.cache.clock`), so that it is known whether they were given. Others are refused where
they would not be read and differ from their default: a run's `settings.toml` has all defaults, and is a run file too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from hotrow.capabilities import too_wide
from hotrow.data import DataSet
from hotrow.data.schema import Schema
from hotrow.data.steps import schema_after
from hotrow.errors import DataError, SettingsError
from hotrow.models import ModelInputs, OwnModel, build
from hotrow.objectives import Objective, ObjectiveInputs, Retrieval
from hotrow.objectives.measures import check_names
from hotrow.objectives.slices import check_slices
from hotrow.plan import Plan
from hotrow.plan.topology import Topology
from hotrow.policy import Bounded, Exact, Hybrid, Sync
from hotrow.run import Data, Evaluate, PlanSection, Run, Train
from hotrow.service.curve import KeyFile
from hotrow.settings import Settings, parse
from hotrow.tiers.cached import Cache
from hotrow.train.best import loss_metric, metric_of
from hotrow.train.dense import check_optimizer


class Problem(NamedTuple):
    """A setting that cannot be, with what to do; as text one sentence for the user."""

    setting: str
    said: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.said}" if self.setting else self.said


@dataclass(frozen=True)
class _Asked:
    """A run and what starts it."""

    run: Run
    ranks: int
    nodes: int | None
    shards: int
    plan: Mapping[str, Any] | None

    @property
    def several(self) -> bool:
        return self.ranks > 1

    @property
    def served(self) -> bool:
        """Whether shards own the rows."""
        return self.shards > 0 or bool(self.run.cluster.shards)

    @property
    def alone(self) -> bool:
        """Whether one process has all rows, so that nothing travels."""
        return not self.several and not self.served

    @cached_property
    def fresh(self) -> bool:
        """Whether every read has to see every update before it."""
        policy = self.run.policy
        return isinstance(policy, (Sync, Exact)) or (isinstance(policy, Hybrid) and not policy.staleness)


def problems(
    run: Run,
    schema: Schema | None = None,
    *,
    ranks: int = 1,
    nodes: int | None = None,
    shards: int = 0,
    plan: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Why `run` cannot be trained by `ranks` trainers; none if it can.

    `shards` are those started besides it; `nodes` and the facts of a saved `plan` are compared where they are known.
    """
    asked = _Asked(run, ranks, nodes, shards, plan)
    found = [problem for look in _LOOKS for problem in look(asked)]
    return [*found, *_of_schema(run, schema)] if schema is not None else found


def refuse_problems(
    run: Run, *, ranks: int = 1, nodes: int | None = None, shards: int = 0, elsewhere: bool = False
) -> None:
    """Raises `SettingsError` with all problems; trainers that run `elsewhere` may see files that this host does not."""
    found = problems(run, ranks=ranks, nodes=nodes, shards=shards, plan=_facts(run, elsewhere))
    if not found and not elsewhere:
        if run.cluster.key is not None:
            KeyFile.load(run.cluster.key, "trainer")
        found = _of_schema(run, DataSet.open(run.data.path).schema)
    if found:
        raise SettingsError("\n".join(map(str, found)))


def _facts(run: Run, elsewhere: bool) -> Mapping[str, Any] | None:
    """What the run's saved plan says of itself."""
    if run.plan is None or run.plan.path is None:
        return None
    try:
        return Plan.load(run.plan.path).facts
    except DataError:
        if elsewhere:
            return None
        raise


def _owners(asked: _Asked) -> Iterator[Problem]:
    """Who owns the rows."""
    cluster, rows, ranks = asked.run.cluster, asked.run.cluster.rows, asked.ranks
    if asked.shards and cluster.shards:
        yield Problem(
            "cluster.shards", "it names shards that run already, and --shards would start others; give one of them."
        )
    if asked.shards and rows not in (None, "served"):
        yield Problem(
            "cluster.rows",
            f'"{rows}" leaves no rows to the shards that --shards {asked.shards} starts. Take the setting away, or '
            f"give --shards 0.",
        )
    elif asked.several and rows == "host":
        yield Problem(
            "cluster.rows",
            f'it is "host", but there are {ranks} ranks, each of which would train rows of its own. Set it to '
            f'"sharded", or to "served" with shards.',
        )
    if rows == "served" and not asked.served:
        yield Problem(
            "cluster.rows",
            'it is "served", but there are no shards. Give their addresses, as shards = '
            '["tcp://127.0.0.1:7700"], or let `hotrow up RUN.toml --shards 2` start them.',
        )
    if cluster.key is not None and not cluster.shards:
        yield Problem(
            "cluster.key",
            "it is for shards that run already, on other machines, and cluster.shards names none. Take it away; "
            "`hotrow up` makes the keys of shards that it starts.",
        )


def _planned(asked: _Asked) -> Iterator[Problem]:
    """What [plan] cannot go with, whoever trains."""
    run, plan = asked.run, asked.run.plan
    if plan is None:
        return
    if run.data.follow is not None:
        yield Problem("data.follow", "a plan is made for a data set, not for a log that grows. Take [plan] away.")
    if asked.served or run.cluster.rows == "served":
        yield Problem(
            "plan",
            "rows on shards and on a device at the same time is not possible yet; take one of plan and cluster.shards "
            "(`hotrow up`: --shards 0) out.",
        )
    elif run.cluster.rows is not None:
        yield Problem("cluster.rows", "[plan] says where rows are. Take one of the two away.")
    if run.cluster.cache is not None:
        yield Problem("cluster.cache", "rows that [plan] places are not cached. Take one of the two away.")
    if plan.mode == "split" and plan.judge != _default(PlanSection, "judge"):
        yield Problem("plan.judge", 'it is read with plan.mode = "hot_cold" only. Take it away.')
    if plan.mode == "hot_cold":
        if not (run.data.validation or run.data.test):
            yield Problem("plan.mode", "hot_cold is steered by the loss on a split; set data.validation or data.test.")
        for step in run.data.steps:
            if step.random:
                yield Problem(
                    "plan.mode",
                    f"{step.name} draws anew in every epoch, so which samples look up hot rows only cannot be known "
                    f'beforehand. Set plan.mode = "split".',
                )
    yield from _planned_for_ranks(asked, plan) if asked.several else _planned_for_one(asked, plan)


def _planned_for_one(asked: _Asked, plan: PlanSection) -> Iterator[Problem]:
    facts, path, data = asked.plan, plan.path, asked.run.data.path
    if plan.device_rows:
        yield Problem("plan.device_rows", "it is for several ranks; one process has planned rows on its device anyway.")
    if facts is not None and "topology" in facts:
        yield Problem(
            "plan.path",
            f"{path} is for ranks (hotrow plan --topology), and this is one process. Start the run's ranks, as with "
            f"torchrun; or plan for one process into another file: hotrow plan {data} --memory SIZE --out OTHER.plan",
        )
    elif facts is not None and plan.replan_every is not None and not facts.get("memory"):
        yield Problem(
            "plan.replan_every",
            f"{path} was not made for a budget, so there is none to keep. Set plan.memory instead of plan.path.",
        )


def _planned_for_ranks(asked: _Asked, plan: PlanSection) -> Iterator[Problem]:
    facts, path = asked.plan, plan.path
    if plan.memory is not None:
        yield Problem(
            "plan.memory",
            "it plans for the device of one process. For several ranks make a plan for their topology, hotrow "
            "plan DATA --topology FILE --out FILE.plan, and set plan.path.",
        )
    if plan.mode == "hot_cold":
        yield Problem("plan.mode", '"hot_cold" is for one process with a device; leave it out for several ranks.')
    if facts is None:
        return
    wire, planned = asked.run.cluster.wire, facts.get("wire")
    if wire is not None and planned is not None and wire != planned:
        yield Problem(
            "cluster.wire", f"{path} was made for {planned} on the wire. Take it away, or plan with --wire {wire}."
        )
    if plan.replan_every is not None:
        yield from _replanned(asked, facts)


def _replanned(asked: _Asked, facts: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether another plan can be made like the saved one."""
    assert asked.run.plan is not None
    path = asked.run.plan.path
    lacking = [name for name in ("topology", "memory", "dedup", "wire") if name not in facts]
    if lacking:
        yield Problem(
            "plan.replan_every",
            f"{path} does not say its {' and '.join(lacking)}, so no other can be made like it. Make it with: hotrow "
            f"plan DATA --topology CLUSTER.toml",
        )
        return
    topology = parse(Topology, facts["topology"], f"the topology of {path}")
    size, nodes = topology.nodes * topology.ranks, asked.nodes
    if size != asked.ranks or nodes not in (None, topology.nodes):
        there = f"{asked.ranks} ranks" if nodes is None else f"{nodes} of {asked.ranks // nodes}"
        yield Problem(
            "plan.replan_every",
            f"{path} was made for {topology.nodes} nodes of {topology.ranks} ranks, but there are {there}. Plan for "
            f"this topology, or leave replan_every out.",
        )


def _cached(asked: _Asked) -> Iterator[Problem]:
    """What [cluster.cache] cannot go with, and what in it nobody would read."""
    run, cache = asked.run, asked.run.cluster.cache
    if cache is None or run.plan is not None:
        return
    if asked.several and not asked.served:
        yield Problem("cluster.cache", "it needs shards behind it when there are several ranks; give cluster.shards.")
    if isinstance(run.policy, Exact):
        yield Problem(
            "policy",
            "exact reads rows again where they live, so a cache is of no use to it. Take cluster.cache away, or set "
            'policy.name = "sync".',
        )
    elif asked.several and isinstance(run.policy, Hybrid) and not asked.fresh:
        yield Problem(
            "policy",
            "hybrid bounds by policy.staleness what a row misses, and caches of several ranks do not: they write back "
            'later. Take cluster.cache away, or set policy.name = "bounded".',
        )
    if run.cluster.wire not in (None, "float32"):
        yield Problem(
            "cluster.wire", "rows of a cache travel as float32. Take one of cluster.wire and cluster.cache away."
        )
    yield from _clocks(asked, cache)
    if cache.policy != "pinned" and cache.popular != _default(Cache, "popular"):
        yield Problem("cluster.cache.popular", 'it is read with cluster.cache.policy = "pinned" only. Take it away.')
    drift = _default(Cache, "drift")
    if not asked.several or asked.fresh:
        why = "copies are always fresh under this policy" if asked.several else "one worker's copies are exact"
        for name in ("drift", "sample"):
            if getattr(cache, name) != _default(Cache, name):
                yield Problem(f"cluster.cache.{name}", f"{why}, so nobody reads it. Take it away.")
    elif isinstance(run.policy, Bounded) and run.policy.clock in (0, "unbounded") and cache.drift != drift:
        yield Problem("cluster.cache.drift", f"there is none with policy.clock = {run.policy.clock!r}. Take it away.")


def _clocks(asked: _Asked, cache: Cache) -> Iterator[Problem]:
    """How stale copies may be, and how far ahead they are brought, where the policy says it."""
    policy = asked.run.policy
    if isinstance(policy, Bounded):
        said = {"clock": policy.clock, "ahead": policy.ahead}
        why = "policy.{name} says it, and that is {value!r}"
    elif asked.several and asked.fresh:
        said = {"clock": 0, "ahead": 0}
        why = f'under policy "{policy.name}" several ranks read fresh rows, so it is {{value!r}}'
    else:
        return
    for name, value in said.items():
        if getattr(cache, name) not in (None, value):
            yield Problem(
                f"cluster.cache.{name}", f"{why.format(name=name, value=value)}. Take cluster.cache.{name} away."
            )


def _fresh(asked: _Asked) -> Iterator[Problem]:
    """What [policy] needs."""
    policy, cluster = asked.run.policy, asked.run.cluster
    if isinstance(policy, Bounded) and cluster.cache is None:
        yield Problem(
            "policy",
            "bounded is about copies of rows in a cache, and there is none. Add [cluster.cache], or set policy.name = "
            '"sync".',
        )
    if isinstance(policy, Hybrid) and not policy.staleness:
        for name in ("ramp", "worst"):
            if getattr(policy, name) != _default(Hybrid, name):
                yield Problem(f"policy.{name}", "with policy.staleness = 0 nothing is stale. Take one of the two away.")


def _travelling(asked: _Asked) -> Iterator[Problem]:
    """What says how rows travel."""
    run, cluster = asked.run, asked.run.cluster
    if asked.alone:
        for name in ("wire", "timeout"):
            if getattr(cluster, name) is not None:
                yield Problem(
                    f"cluster.{name}", "one process without shards sends nothing and waits for nobody. Take it away."
                )
    if cluster.exchange != "nccl":
        return
    if run.train.device != "cuda":
        yield Problem("cluster.exchange", '"nccl" is for ranks with a device; set train.device = "cuda".')
    if not isinstance(run.policy, Sync):
        yield Problem(
            "cluster.exchange",
            '"nccl" works with policy.name = "sync" only: another thread that fetches could wait for one that updates '
            "on another rank. Leave one of the two out.",
        )
    if asked.served or not asked.several:
        yield Problem("cluster.exchange", '"nccl" is for rows that ranks send each other, and none do. Take it away.')


def _followed(asked: _Asked) -> Iterator[Problem]:
    """What a log that grows has no use for."""
    data = asked.run.data
    if data.follow is None:
        return
    if asked.several:
        yield Problem("data.follow", "one process can follow a log, not several ranks. Take the setting away.")
    try:
        of_topic = data.follow.topic is not None
    except SettingsError as error:
        yield Problem("", str(error))
        return
    if of_topic and data.follow.format != _default(type(data.follow), "format"):
        yield Problem("data.follow.format", "messages of a topic are JSON objects. Take it away.")
    for name in unread_when_following(asked.run):
        yield Problem(name, "a log that grows is read once, in the order in which it arrives. Take the setting away.")


def unread_when_following(run: Run) -> list[str]:
    """The settings given about order and portions of a data set, which nobody reads where a log is followed."""
    data = run.data
    drawn = any(step.random for step in data.steps)
    given = {
        "train.epochs": run.train.epochs != _default(Train, "epochs"),
        "data.shuffle": data.shuffle != _default(Data, "shuffle"),
        "data.train": data.train != _default(Data, "train"),
        "data.seed": data.seed != _default(Data, "seed") and not drawn,
    }
    return [name for name, is_given in given.items() if is_given]


def following(run: Run) -> tuple[Run, list[str]]:
    """A run for a data set as one that follows a log: without the settings that are about its training split, named."""
    unread = unread_when_following(run)
    changed = {}
    for section, model in (("train", Train), ("data", Data)):
        names = [name.partition(".")[2] for name in unread if name.startswith(f"{section}.")]
        changed[section] = getattr(run, section).model_copy(update={name: _default(model, name) for name in names})
    return run.model_copy(update=changed), unread


def _evaluated(asked: _Asked) -> Iterator[Problem]:
    run = asked.run
    if run.train.evaluate_every is not None and not (run.data.validation or run.data.test):
        yield Problem("train.evaluate_every", "there is no split to evaluate on; set data.validation or data.test.")
    hot_cold = run.plan is not None and run.plan.mode == "hot_cold"
    if (
        run.train.evaluate_every is None
        and not hot_cold
        and run.data.validation not in ("", _default(Data, "validation"))
    ):
        yield Problem(
            "data.validation",
            "nothing is evaluated before the end of the run. Set train.evaluate_every, or take it away.",
        )


def _sliced(asked: _Asked) -> Iterator[Problem]:
    evaluate = asked.run.evaluate
    if evaluate.values != _default(Evaluate, "values") and not evaluate.slices:
        yield Problem("evaluate.values", "there are no slices that have values. Set evaluate.slices, or take it away.")
    for metric in evaluate.metrics:
        if metric.unknown:
            yield Problem("evaluate.metrics", metric.unknown)


def _tabled(asked: _Asked) -> Iterator[Problem]:
    tables = asked.run.tables
    for name in tables.named:
        own = tables.section(name)
        for what in own.without:
            why = f"tables share no {what} to be without" if getattr(tables, what) is None else ""
            why = f"the table has {what} of its own" if getattr(own, what) is not None else why
            if why:
                yield Problem(f"tables.{name}.without", f"{why}. Take it away.")


def _seeded(asked: _Asked) -> Iterator[Problem]:
    data = asked.run.data
    ordered = not data.shuffle and data.follow is None
    if data.seed != _default(Data, "seed") and ordered and not any(step.random for step in data.steps):
        yield Problem(
            "data.seed", "samples come in a fixed order and no step draws, so there is nothing to seed. Take it away."
        )


def _classed(asked: _Asked) -> Iterator[Problem]:
    if isinstance(asked.run.model, OwnModel) and asked.run.model.unknown:
        yield Problem("model.name", asked.run.model.unknown)


def _of_schema(run: Run, schema: Schema) -> list[Problem]:
    """Tables, features and steps that the data set does not have, and a model that cannot be built for it."""
    try:
        after = schema_after(run.data.steps, schema)
        features = run.features_of(after.feature_settings())
        objective = run.objective.build(ObjectiveInputs.of(features, after, run.train.seed))
        if run.train.early_stopping is not None:
            metric_of(run, objective)
        check_slices(run.evaluate.slices, after)
        check_names(objective, [metric.build(objective.inputs) for metric in run.evaluate.metrics])
        tables = run.tables_of(feature.table for feature in [*features, *objective.features()])
        if run.train.device == "cuda" and (wrong := too_wide(tables)):
            return [Problem("train.device", wrong)]
        dims = {table.name: table.dim for table in tables}
        inputs = ModelInputs(
            features, {f.name: dims[f.table] for f in features}, len(after.dense), objective.outputs_per_sample
        )
        model = _made(run, inputs)
        objective.check(model)
        check_optimizer(model, run.optimizer)
    except SettingsError as error:
        return [Problem("", str(error))]
    return list(_of_objective(run, objective))


def _of_objective(run: Run, objective: Objective) -> Iterator[Problem]:
    """What of the run an objective has no use for."""
    if run.plan is not None and run.plan.mode == "hot_cold":
        try:
            loss_metric(objective)
        except SettingsError as error:
            yield Problem("", str(error))
    follow = run.data.follow
    if follow is not None and follow.evaluate_every is not None and not objective.measures_training:
        yield Problem(
            "data.follow.evaluate_every",
            "this objective's metrics are of all items, which are encoded for an evaluation only. Take it away.",
        )
    if run.train.compile and isinstance(objective, Retrieval):
        yield Problem(
            "train.compile",
            "it compiles a model's forward, and this objective calls user_vectors and item_vectors. Take it away, and "
            "compile what they call in the model: torch.compile(self.tower).",
        )


def _made(run: Run, inputs: ModelInputs) -> nn.Module:
    """The model without memory for its weights, where it can be made so."""
    try:
        with torch.device("meta"):
            return build(run.model, inputs)
    except SettingsError:
        raise
    except Exception as error:
        if not isinstance(run.model, OwnModel):
            raise
        said = error
    try:  # the constructor may look at its own weights
        with torch.random.fork_rng([]):
            return build(run.model, inputs)
    except Exception:
        raise SettingsError(f"model: {run.model.name} cannot be made: {type(said).__name__}: {said}.") from said


def _accumulated(asked: _Asked) -> Iterator[Problem]:
    """What train.accumulate cannot go with."""
    run = asked.run
    if run.train.accumulate == 1:
        return
    policy = run.policy
    if isinstance(policy, (Exact, Bounded)) or (isinstance(policy, Hybrid) and policy.staleness):
        yield Problem(
            "train.accumulate",
            f'policy "{policy.name}" gives every batch an update of its own. Set policy.name = "sync", or take '
            f"train.accumulate away.",
        )
    elif run.cluster.cache is not None:
        yield Problem(
            "train.accumulate",
            "a cache gives every batch an update of its own. Take one of train.accumulate and cluster.cache away.",
        )
    if run.data.follow is not None:
        yield Problem(
            "train.accumulate", "batches of a growing log would wait for others that may never come. Take it away."
        )
    if run.plan is not None and run.plan.mode == "hot_cold":
        yield Problem(
            "train.accumulate",
            'rows move between batches of plan.mode = "hot_cold", so none can wait. Take one of the two away.',
        )


_LOOKS = (
    _owners,
    _planned,
    _cached,
    _fresh,
    _travelling,
    _followed,
    _evaluated,
    _accumulated,
    _sliced,
    _tabled,
    _seeded,
    _classed,
)


def _default(model: type[Settings], name: str) -> Any:
    return model.model_fields[name].default
