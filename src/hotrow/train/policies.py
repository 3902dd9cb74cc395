"""`open_pipeline`: batches on their way through tables, as fresh as a policy says.

    with open_pipeline(reader, embeddings, Exact()) as pipeline:
        for ready in pipeline:
            loss = step(ready)

Reading, grouping and, where the policy allows it, fetching run ahead of the loop; updates may trail behind it. While
the pipeline is open `embeddings.step()` hands it the update of the batch that was given last.
"""

from __future__ import annotations

from collections.abc import Iterable

from hotrow.data.batch import Batch
from hotrow.embeddings import Embeddings
from hotrow.objectives import Objective
from hotrow.policy import Bounded, Exact, Hybrid, Policy, Sync
from hotrow.train.exact import ExactPipeline
from hotrow.train.hybrid import HybridPipeline
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Extras, Pipeline, no_extras
from hotrow.train.ranks import Ranks

_SYNC = Sync()


def open_pipeline(
    batches: Iterable[Batch], embeddings: Embeddings, policy: Policy = _SYNC, *, objective: Objective | None = None
) -> Pipeline:
    """A pipeline for a loop of your own, in one process. An `objective` draws what it needs for the batches."""
    extras = no_extras
    if objective is not None:
        given, extras = objective, objective.extras
        batches = (given.prepare(batch, number) for number, batch in enumerate(batches, start=embeddings.steps))
    return pipeline_of(batches, embeddings, policy, extras=extras).take_steps()


def pipeline_of(
    batches: Iterable[Batch],
    embeddings: Embeddings,
    policy: Policy,
    *,
    ranks: Ranks | None = None,
    pin: bool = False,
    phases: Phases | None = None,
    extras: Extras = no_extras,
) -> Pipeline:
    """Reads and groups ahead, and fetches and updates as far apart as the policy allows."""
    workers = 1 if ranks is None else ranks.world.size
    if isinstance(policy, Hybrid) and policy.staleness:
        return HybridPipeline(
            batches,
            embeddings,
            staleness=policy.staleness,
            workers=workers,
            ramp=policy.ramp,
            worst=policy.worst,
            ahead=policy.ahead,
            pin=pin,
            phases=phases,
            extras=extras,
        )
    if isinstance(policy, Exact):
        exchange = ranks.gather if ranks is not None and workers > 1 else None
        return ExactPipeline(
            batches, embeddings, lead=policy.ahead, exchange=exchange, pin=pin, phases=phases, extras=extras
        )
    ahead = Sync().ahead if isinstance(policy, Bounded) else policy.ahead
    told = embeddings.looks_ahead
    return Pipeline(batches, embeddings, ahead=ahead, told=told, pin=pin, phases=phases, extras=extras)
