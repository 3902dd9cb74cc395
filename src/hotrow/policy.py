"""Policies: how fresh the rows are that a batch sees. A policy is a setting of the run, never another model.

| policy | a batch sees | what waits for what |
| --- | --- | --- |
| `Sync` | every update before it | fetch waits for the update before it, the model for both |
| `Exact` | the same bits as under `Sync` | rows are fetched ahead; those that a batch in flight updates, again |
| `Hybrid` | all but the last k updates, at least | the model waits for nothing while less than k are in flight |
| `Bounded` | its worker's updates, and others' within a bound (HET) | what the cache lacks is brought ahead |

`train/pipeline.py`, `train/exact.py` and `train/hybrid.py` are how batches travel under each of them.
"""

from typing import Annotated, Literal

from pydantic import Field

from hotrow.settings import Settings


class Sync(Settings):
    """Exact: a batch is fetched when the update of the one before it is done.

    Reading and grouping still run ahead, since neither looks at a row.
    """

    name: Literal["sync"] = "sync"
    ahead: int = Field(4, ge=1, description="batches that are read and grouped ahead of the model")


class Exact(Settings):
    """Exact and pipelined: rows are fetched ahead, but for those that a batch in between will change, which come then.

    Tables with admission or eviction, whose rows come and go with the order of fetches, are fetched when their turn is.
    """

    name: Literal["exact"] = "exact"
    ahead: int = Field(2, ge=1, le=32, description="batches that are fetched ahead of the model")


class Hybrid(Settings):
    """Asynchronous rows under a synchronous dense part, as in Persia (Lian et al., 2022).

    When a batch is fetched all updates but the last `staleness` of them are applied, of every worker. 0 is `Sync`.
    The bound grows over the first steps: Adagrad's first updates of a row are of full size whatever its gradient, and
    several of them in one direction throw it far off (`hotrow bench hybrid`: most of what staleness costs).
    """

    name: Literal["hybrid"] = "hybrid"
    staleness: int = Field(4, ge=0, le=120, description="updates that a fetched row may miss, in batches")
    ahead: int = Field(4, ge=1, description="batches that are read and grouped ahead of those that are fetched")
    ramp: int = Field(256, ge=0, description="steps in which the bound grows to `staleness`, from the run's first on")
    worst: bool = Field(
        False,
        description="apply every update as late as allowed, to see what staleness costs at most; with one trainer it "
        "repeats exactly",
    )


class Bounded(Settings):
    """Rows out of a cache, as stale as a bound on their clocks allows (HET, Miao et al., 2022). `tiers/cached.py`.

    Rows of tiers without a cache are as under `Sync`.
    """

    name: Literal["bounded"] = "bounded"
    clock: Annotated[int, Field(ge=0, lt=2**31)] | Literal["unbounded"] = Field(
        100, description="updates by which a copy may differ from its row; 0: fresh at every read"
    )
    ahead: int = Field(2, ge=0, le=64, description="batches whose rows are brought into the cache ahead of the model")


Policy = Annotated[Sync | Exact | Hybrid | Bounded, Field(discriminator="name")]
