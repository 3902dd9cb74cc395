"""A log that grows while it is trained on: what arrives, in order, each sample once.

    [data.follow]
    path = "incoming"               a folder of Parquet or text files, each put there whole
    path = "kafka://host:9092/clicks"    or a topic of JSON objects (pip install confluent-kafka)

`read` gives what has arrived and ends when nothing is left; whoever trains says what was trained on (`trained`), and
`state`, kept in every checkpoint, is where that is. So a run that is killed goes on with the sample after the last one
that its checkpoint knows of: nothing is lost, and nothing counts twice.

Samples are checked and turned into keys as `prepare` does, by the same code. They keep the order in which they arrive,
but that those of a session stand together within a batch, so that what they share is kept once. A log of bare events
cannot be followed, for their histories are made of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from hotrow.data.convert import BadPolicy
from hotrow.data.schema import Schema
from hotrow.data.sources import Format
from hotrow.errors import SettingsError
from hotrow.settings import Settings

KAFKA = "kafka://"


class Follow(Settings):
    """Trains on what arrives instead of the data set's split, which gives the schema and what is evaluated on.

    The run ends by a signal, after `train.steps`, or when nothing has come for `idle` seconds.
    """

    path: str = Field(min_length=1, description='a folder that files are put into, or "kafka://HOST:PORT/TOPIC"')
    format: Format = Field(
        "auto", description="criteo, avazu, events or table; found out by its first line if not given"
    )
    columns: Path | None = Field(
        None, description="a schema that says what the log's columns mean; the log's own, or the data set's"
    )
    bad: BadPolicy = Field("refuse", description="what becomes of what cannot be used: refuse, skip or missing")
    look_every: float = Field(1.0, gt=0, description="seconds between two looks for something new")
    idle: float | None = Field(None, ge=0, description="seconds without anything new after which the run ends")
    checkpoint_every: float = Field(30.0, ge=0, description="seconds after which what was learned since is written")
    evaluate_every: int | None = Field(
        None, ge=1, description="samples: each is scored before it is trained on, and so many have metrics together"
    )

    @property
    def topic(self) -> tuple[str, str] | None:
        """The servers and the name of a Kafka topic; None for a folder."""
        if not self.path.startswith(KAFKA):
            return None
        servers, _, name = self.path.removeprefix(KAFKA).partition("/")
        if not servers or not name:
            raise SettingsError(f'data.follow.path: a topic is written "kafka://HOST:PORT/TOPIC", not "{self.path}".')
        return servers, name

    def under(self, here: Path) -> Follow:
        """The same with relative paths taken from `here`."""
        path = self.path if self.path.startswith(KAFKA) else str((here / self.path).resolve())
        columns = None if self.columns is None else (here / self.columns).resolve()
        return self.model_copy(update={"path": path, "columns": columns})


class Arrived(NamedTuple):
    """Flat samples for one batch, and up to where in the log they go, as the log that gave them knows it."""

    samples: pa.Table
    upto: Any


class GrowingLog:
    """What has arrived and was not trained on yet. A kind of log says how it is read and what its place is."""

    def __init__(self, schema: Schema, batch_size: int) -> None:
        self.schema, self.batch_size = schema, batch_size
        self.notes: list[str] = []
        """Sentences for whoever watches, since they were last taken."""

    def arrived(self) -> bool:
        """Whether there is something to read."""
        raise NotImplementedError

    def read(self) -> Iterator[Arrived]:
        """Batches from the place up to which was trained, until nothing is left for now."""
        raise NotImplementedError

    def trained(self, arrived: Arrived) -> list[dict[str, Any]]:
        """Moves the place behind what was trained on, batch by batch in their order; lines of metrics about it."""
        raise NotImplementedError

    def rest(self) -> list[dict[str, Any]]:
        """Lines about what was read to its end and had no sample left; its place is behind that then."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The place, as JSON has it."""
        raise NotImplementedError

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a place that `state` gave; from the beginning if it is empty."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the log."""


def clustered(samples: pa.Table, schema: Schema) -> pa.Table:
    """The samples with those of a session together, where what they share is kept once."""
    if not schema.groups or schema.session is None:
        return samples
    return samples.take(pa.array(np.argsort(samples.column(schema.session).to_numpy(), kind="stable")))


def check_same(log: Schema, schema: Schema, where: str) -> None:
    """Refuses a log whose samples are not those of the data set."""
    made, wanted = (s.of_any_keys().model_copy(update={"groups": None}) for s in (log.prepared(), schema))
    if made == wanted:
        return
    for name in type(schema).model_fields:
        ours, theirs = getattr(wanted, name), getattr(made, name)
        if ours == theirs:
            continue
        if name == "features":
            known, given = {f.name: f for f in ours}, {f.name: f for f in theirs}
            odd = sorted(n for n in known.keys() | given.keys() if known.get(n) != given.get(n))
            said = f"the features differ ({', '.join(odd) or 'their order'})"
        else:
            said = f"{name} is {theirs!r} there and {ours!r} here"
        raise SettingsError(f"{where} is another log than the data set was prepared from: {said}.")
