"""Preprocessing: what is done to the values of columns on their way from the data set to the batch.

    [[data.steps]]                          [[data.steps]]
    name = "hash"                           name = "bucketise"
    columns = ["item", "history"]           column = "price"
    buckets = 1_000_000                     boundaries = [1, 10, 100]

Steps run in the reader, one after the other, on the arrays that hold each distinct value once: a value that a hundred
samples share, or a key that lies in twenty windows of a history, is worked on once. So a step is a function of single
values (or, `truncate`, of the length of a list), and gives what it would give on samples spelled out.

`columns` are names of features (hash, truncate, function) or dense columns (clip, log, normalise, bucketise, function).
`neighbours` (in a file of its own) is the exception: it draws at random for each sample.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hotrow.data.mix import mix64
from hotrow.data.neighbours import Neighbours
from hotrow.data.samples import Values, Window
from hotrow.data.schema import MISSING, Column, Schema
from hotrow.errors import SettingsError, nearest
from hotrow.settings import Settings


class _Step(Settings):
    """Changes the values of some columns; the base changes the values one by one."""

    random: ClassVar[bool] = False
    """Whether it gives something else in every epoch."""

    name: str
    columns: tuple[str, ...] = Field(min_length=1)

    def after(self, schema: Schema) -> Schema:
        """The schema of batches that went through this step; raises `SettingsError` where it cannot."""
        _known(self.name, self.columns, schema.dense, "dense column")
        return schema

    def apply(self, window: Window) -> Window:
        """The window with this step done."""
        features = {f.name: f.column for f in window.schema.features}
        changed = {features.get(name, name): self._column(window, features.get(name, name)) for name in self.columns}
        return replace(window, columns={**window.columns, **changed})

    def _column(self, window: Window, name: str) -> Values:
        return replace(window.columns[name], values=self._values(window.columns[name].values))

    def _values(self, values: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError


class Hash(_Step):
    """Keys hashed into `buckets`, keys 0 to buckets - 1; a missing key stays missing. Another salt, another hash."""

    name: Literal["hash"] = "hash"
    buckets: int = Field(ge=1)
    salt: int = Field(0, ge=0)

    def after(self, schema: Schema) -> Schema:
        _known(self.name, self.columns, (f.name for f in schema.features), "feature")
        return schema

    def _values(self, values: NDArray[Any]) -> NDArray[Any]:
        salt = mix64(np.array([self.salt], dtype=np.uint64))
        hashed = (mix64(values.view(np.uint64) ^ salt) % np.uint64(self.buckets)).view(np.int64)
        hashed[values == MISSING] = MISSING
        return hashed


class Truncate(_Step):
    """Only the last `length` keys of each list."""

    name: Literal["truncate"] = "truncate"
    length: int = Field(ge=0)

    def after(self, schema: Schema) -> Schema:
        _known(self.name, self.columns, (f.name for f in schema.features if f.kind == "keys"), "feature of lists")
        return schema

    def _column(self, window: Window, name: str) -> Values:
        column = window.columns[name]
        assert column.begins is not None and column.lengths is not None
        lengths = np.minimum(column.lengths, self.length)
        return replace(column, begins=column.begins + (column.lengths - lengths), lengths=lengths)


class Clip(_Step):
    """Values below `low` become `low`, values above `high` become `high`."""

    name: Literal["clip"] = "clip"
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _possible(self) -> Clip:
        if self.low is None and self.high is None:
            raise ValueError("clip needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low}) lies above high ({self.high})")
        return self

    def _values(self, values: NDArray[Any]) -> NDArray[Any]:
        low, high = (None if x is None else np.float32(x) for x in (self.low, self.high))
        clipped: NDArray[Any] = np.clip(values, low, high)
        return clipped


class Log(_Step):
    """log(1 + x), and for values below zero -log(1 - x)."""

    name: Literal["log"] = "log"

    def _values(self, values: NDArray[Any]) -> NDArray[Any]:
        logs: NDArray[Any] = np.copysign(np.log1p(np.abs(values)), values)
        return logs


class Normalise(_Step):
    """(x - mean) / std."""

    name: Literal["normalise"] = "normalise"
    mean: float
    std: float = Field(gt=0)

    def _values(self, values: NDArray[Any]) -> NDArray[Any]:
        return (values - np.float32(self.mean)) / np.float32(self.std)


class Function(_Step):
    """A function of the user's own: from an array of values, keys (int64) or dense (float32), to as many of them.

    It is called with the distinct values, of some thousands of samples at a time and from several threads, so what it
    gives for a value must depend on that value alone.
    """

    name: Literal["function"] = "function"
    function: str = Field(pattern=r"^[\w.]+:\w+$", description='as in "package.module:name"')

    def after(self, schema: Schema) -> Schema:
        _known(self.name, self.columns, (*(f.name for f in schema.features), *schema.dense), "feature or dense column")
        self._found()
        return schema

    def _values(self, values: NDArray[Any]) -> NDArray[Any]:
        made = np.asarray(self._found()(values))
        if made.shape != values.shape or (
            made.dtype != values.dtype and not np.can_cast(made.dtype, values.dtype, "same_kind")
        ):
            raise SettingsError(
                f"The step {self.function} gave {made.dtype} {list(made.shape)} for {values.dtype} "
                f"{list(values.shape)}; it must give one value of that kind for each."
            )
        return np.ascontiguousarray(made, dtype=values.dtype)

    def _found(self) -> Any:
        module, _, name = self.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"The step {self.function} cannot be found: {error}.") from None
        if not callable(found):
            raise SettingsError(f"The step {self.function} is not a function.")
        return found


class Bucketise(Settings):
    """A dense column as a feature with one key: how many `boundaries` lie at or below its value."""

    random: ClassVar[bool] = False

    name: Literal["bucketise"] = "bucketise"
    column: str = Field(min_length=1)
    boundaries: tuple[float, ...] = Field(min_length=1)
    feature: str = Field("", description="the new feature's name; COLUMN_bucket if not given")
    table: str = Field("", description="the table it looks up; its own name if not given")
    keep: bool = Field(False, description="whether the dense column stays one besides")

    @model_validator(mode="after")
    def _increasing(self) -> Bucketise:
        if any(not a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)) or not all(
            map(math.isfinite, self.boundaries)
        ):
            raise ValueError("boundaries must be numbers that increase")
        return self

    @property
    def _feature(self) -> str:
        return self.feature or f"{self.column}_bucket"

    def after(self, schema: Schema) -> Schema:
        """The schema with the new feature, in the group of the column it was made from."""
        _known(self.name, (self.column,), schema.dense, "dense column")
        if self._feature in {*(f.name for f in schema.features), *schema.columns}:
            raise SettingsError(
                f'bucketise: there is already a column "{self._feature}"; name another with feature = ....'
            )
        groups = schema.groups
        if groups is not None:
            groups = tuple(
                g.model_copy(update={"columns": self._members(g.columns)}) if self.column in g.columns else g
                for g in groups
            )
        made = Column(name=self._feature, table=self.table)
        dense = schema.dense if self.keep else tuple(name for name in schema.dense if name != self.column)
        return schema.model_copy(update={"features": (*schema.features, made), "dense": dense, "groups": groups})

    def _members(self, columns: Sequence[str]) -> tuple[str, ...]:
        return (*(name for name in columns if self.keep or name != self.column), self._feature)

    def apply(self, window: Window) -> Window:
        """The window with the new feature."""
        values = window.columns[self.column].values
        keys = np.searchsorted(np.array(self.boundaries, dtype=np.float32), values, side="right").astype(np.int64)
        return replace(
            window,
            schema=self.after(window.schema),
            columns={**window.columns, self._feature: Values(keys)},
            places={**window.places, self._feature: window.places[self.column]},
        )


Step = Annotated[
    Hash | Truncate | Clip | Log | Normalise | Function | Bucketise | Neighbours,
    Field(discriminator="name"),
]


def schema_after(steps: Iterable[Step], schema: Schema) -> Schema:
    """The schema of batches that went through `steps`; raises `SettingsError` for a step that cannot be done."""
    for step in steps:
        schema = step.after(schema)
    return schema


def apply(steps: Iterable[Step], window: Window) -> Window:
    """The window with all steps done."""
    for step in steps:
        window = step.apply(window)
    return window


def _known(step: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = tuple(known)
    for name in names:
        if name not in known:
            raise SettingsError(f'{step}: the data set has no {what} "{name}".{nearest(name, known)}')
