"""How a log is divided into train, validation and test.

| written | test is |
| --- | --- |
| `last:0.1` | the last tenth: by time where the schema has one (equal times stay together), else by order |
| `time:T` | every sample at time T or later |
| `samples:N` | what comes after the first N samples |
| `users:0.1` | all samples of a tenth of the users, by hash |
| `none` | nothing |

`last` is settled to a time or a number of samples once `prepare` has seen the whole log.

Validation is a share of what is not test, taken in the same way: what comes last before it, or other users. A run that
stops early, or is tuned, by validation is then measured on what it has not chosen by. With `none` it is made only if
asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from hotrow.data.mix import mix64
from hotrow.data.schema import Schema
from hotrow.errors import SettingsError, nearest
from hotrow.settings import Settings

SPLITS = ("train", "validation", "test")
"""In the order in which a data set has them; a sample's split is a number below 3."""


class _Split(Settings):
    name: str
    value: float | int | None = None

    @property
    def text(self) -> str:
        """As `parse_split` reads it."""
        return self.name if self.value is None else f"{self.name}:{self.value}"

    def check(self, schema: Schema) -> None:
        """Raises `SettingsError` where the schema lacks what this split needs."""


class Last(_Split):
    """The last part of the log."""

    name: Literal["last"] = "last"
    value: float = Field(gt=0, lt=1)


class FromTime(_Split):
    """Everything from a time on."""

    name: Literal["time"] = "time"
    value: int

    def check(self, schema: Schema) -> None:
        if schema.time is None:
            raise SettingsError("A split by time needs a time column: give the schema one, or split by last:0.1.")


class AfterSamples(_Split):
    """Everything after the first samples."""

    name: Literal["samples"] = "samples"
    value: int = Field(ge=0)


class Users(_Split):
    """All samples of a fraction of the users."""

    name: Literal["users"] = "users"
    value: float = Field(gt=0, lt=1)

    def check(self, schema: Schema) -> None:
        if schema.user is None:
            raise SettingsError("A split by users needs a user column: give the schema one, or split by last:0.1.")

    def chosen(self, samples: pa.RecordBatch, schema: Schema, validation: float) -> NDArray[np.int8]:
        """The split of each prepared sample, by its user."""
        drawn = (mix64(samples.column(schema.user).to_numpy().view(np.uint64)) >> np.uint64(11)) * 2.0**-53
        return np.select([drawn < self.value, drawn < self.value + self.share(validation)], [2, 1], 0).astype(np.int8)

    def share(self, validation: float) -> float:
        """The part of all users that a share of those that are not test is."""
        return (1 - self.value) * validation


class Nothing(_Split):
    """No test samples."""

    name: Literal["none"] = "none"
    value: None = None


Split = Annotated[Last | FromTime | AfterSamples | Users | Nothing, Field(discriminator="name")]
AnySplit = Last | FromTime | AfterSamples | Users | Nothing

_FORMS = ("last:0.1", "time:T", "samples:N", "users:0.1", "none")


def parse_split(text: str) -> AnySplit:
    """A split as written on the command line, such as `last:0.1`."""
    name, _, value = text.partition(":")
    names = [form.partition(":")[0] for form in _FORMS]
    if name not in names:
        raise SettingsError(f'There is no split "{text}".{nearest(name, names)} Write one of: {", ".join(_FORMS)}.')
    given: dict[str, Any] = {"name": name} | ({"value": value} if value else {})
    try:
        split: AnySplit = TypeAdapter(Split).validate_python(given)
        return split
    except ValidationError as error:
        raise SettingsError(
            f'The split "{text}" is not possible: {error.errors()[0]["msg"]}. Write one of: {", ".join(_FORMS)}.'
        ) from None
