"""`open_pipeline`: batches on their way through tables, as fresh as a policy says."""

from __future__ import annotations

from collections.abc import Iterable

from hotrow.data.batch import Batch
from hotrow.embeddings import Embeddings
from hotrow.policy import Bounded, Exact, Hybrid, Policy, Sync
from hotrow.train.exact import ExactPipeline
from hotrow.train.hybrid import HybridPipeline
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Extras, Pipeline, no_extras
from hotrow.train.ranks import Ranks

_SYNC = Sync()


def open_pipeline(
    batches: Iterable[Batch],
    embeddings: Embeddings,
    policy: Policy = _SYNC,
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
