"""`Ready`: a batch whose rows are here, to be trained on or scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded
from hotrow.objectives.inputs import Inputs


@dataclass(frozen=True)
class Ready:
    """A batch and its lookup, whose rows are here, to be embedded once; `inputs` on the host.

    `samples` is how many the step has over all ranks, where it is known.
    """

    batch: Batch
    lookup: Any
    inputs: Inputs
    embeddings: Any = None
    samples: int | None = None

    def rows(self) -> Embedded:
        """What a model sees, under autograd."""
        found: Embedded = self.embeddings.embed(self.lookup)
        return found
