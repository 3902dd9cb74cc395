"""Policies: how fresh the rows are that a batch sees. A policy is a setting of the run, never another model.

A policy gives the pipeline one number, `staleness`: how many batches may be fetched while updates of earlier
ones are still to come. Everything else about the way of a batch is the same under every policy.
"""

from typing import Literal

from pydantic import Field

from hotrow.settings import Settings


class Sync(Settings):
    """Exact: a batch is fetched when the update of the one before it is done.

    Reading and grouping still run ahead, since neither looks at a row.
    """

    name: Literal["sync"] = "sync"
    ahead: int = Field(4, ge=1, description="batches that are read and grouped ahead of the model")

    @property
    def staleness(self) -> int:
        """Batches that may be fetched before the updates of those in front of them are made."""
        return 0


Policy = Sync  # a discriminated union on `name` as soon as there is a second one
