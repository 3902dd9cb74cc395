"""`Schema`: which columns of a log are labels, dense values and features, and how text becomes a key.

A schema is written by a user as TOML (or JSON) for `hotrow prepare --schema FILE`; the one of a prepared data
set stands beside it as `schema.json`. The same model serves both: `prepared()` gives the second from the
first, with columns named after the features that use them.

A log has one label, `label = "click"`; several, `labels = ["click", {name = "minutes", kind = "number"}]`; or none, for
retrieval and next items, which must be said: `labels = []`. A label is from 0 to 1 unless its kind says otherwise.

Keys need no vocabulary. An integer is its own key. Text that is an int64 in its usual decimal form ("42",
"-7", not "042") is that integer, so CSV and Parquet of the same log agree; any other text is its BLAKE2b hash
of 8 bytes (`hash_text`), so some two of n texts share a key with a chance of about n²/2^65: one in a million
at 6 million texts. A missing key, or an empty text, is `MISSING`; a missing list is an empty bag.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hotrow.errors import SettingsError, nearest
from hotrow.settings import Settings, parse
from hotrow.table import Feature

MISSING = -1
"""The key of a sample that has none."""


def hash_text(text: str) -> int:
    """The int64 key of a text that is not a decimal integer: BLAKE2b of its UTF-8, 8 bytes, little-endian."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def key_of_text(text: str) -> int:
    """The int64 key of any text: its value where it is an int64 in usual decimal form, else its hash."""
    if not text:
        return MISSING
    if text.removeprefix("-").isdecimal() and len(text) <= 20:
        value = int(text)
        if str(value) == text and -(1 << 63) <= value < 1 << 63:
            return value
    return hash_text(text)


Holds = Literal["integers", "text", "any"]
"""What the keys of a log's column are: integers, texts that spell none, or both."""


class Column(Settings):
    """A feature and the column of the log it is read from."""

    name: str = Field(min_length=1)
    column: str = Field("", description="the column of the log; the feature's name if not given")
    kind: Literal["key", "keys"] = Field("key", description="one key a sample, or a list of keys")
    table: str = Field("", description="the table it looks up; its own name if not given")
    pooling: Literal["sum", "mean", "sequence"] = "sum"
    weights: str | None = Field(None, description='a column with a weight for each key of a "keys" feature')
    max_length: int | None = Field(None, gt=0, description="only the last so many keys are kept")
    separator: str = Field(" ", min_length=1, description="stands between the keys of a list written as text")
    holds: Holds | None = Field(None, description="what its keys are; found by prepare if not given")

    @model_validator(mode="before")
    @classmethod
    def _named_after_itself(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        name = data.get("name", "")
        return {**data, "column": data.get("column") or name, "table": data.get("table") or name}

    @model_validator(mode="after")
    def _lists_only(self) -> Column:
        if self.kind == "key":
            for setting in ("weights", "max_length"):
                if getattr(self, setting) is not None:
                    raise ValueError(f'{setting} needs kind = "keys", but feature {self.name} has one key a sample')
        return self


class Repeats(Settings):
    """Columns that change together within a session: a data set keeps each distinct combination of them once.

    `columns` are names of features and dense columns. `slides` are those of them that are lists which move along a
    longer one, as a history of clicks does: the longer one is kept once, each distinct sample is a window into it.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_-]+$", description="names the file and the index column")
    columns: tuple[str, ...] = Field(min_length=1)
    slides: tuple[str, ...] = ()


class Label(Settings):
    """A column with something to learn to say of a sample."""

    name: str = Field(min_length=1)
    kind: Literal["binary", "number"] = Field("binary", description="binary: from 0 to 1; number: any finite number")

    @model_validator(mode="before")
    @classmethod
    def _by_its_name(cls, data: object) -> object:
        return {"name": data} if isinstance(data, str) else data


class Schema(Settings):
    """What the columns of a log mean."""

    label: str | None = Field(None, min_length=1, description="the column with the target, from 0 to 1")
    labels: tuple[Label, ...] | None = Field(None, description="several of them, or [] for a log without any")
    dense: tuple[str, ...] = Field((), description="columns of numbers")
    features: tuple[Column, ...] = Field((), description="columns of keys")
    session: str | None = Field(None, description="samples with the same value stand together")
    time: str | None = Field(None, description="integers that grow with time, or timestamps")
    user: str | None = Field(None, description="groups samples for per-user metrics and splits by user")
    weight: str | None = Field(None, description="the weight of a sample in the loss")
    groups: tuple[Repeats, ...] | None = Field(None, description="what repeats together; found by prepare if not given")

    @model_validator(mode="before")
    @classmethod
    def _one_way_to_say_one_label(cls, data: object) -> object:
        """`labels = ["click"]` is `label = "click"`."""
        labels = data.get("labels") if isinstance(data, dict) and data.get("label") is None else None
        if not isinstance(data, dict) or not isinstance(labels, list | tuple) or len(labels) != 1:
            return data
        try:
            only = Label.model_validate(labels[0])
        except ValidationError:
            return data
        return {**data, "label": only.name, "labels": None} if only.kind == "binary" else data

    @model_validator(mode="after")
    def _possible(self) -> Schema:
        if (self.label is None) == (self.labels is None):
            raise PydanticCustomError(
                "sentence",
                'name the label, label = "click"; or several, labels = ["click", "buy"]; or say that there is none, '
                "labels = [].",
            )
        parts = ("label", self.label_names), ("feature", [f.name for f in self.features]), ("dense column", self.dense)
        for what, names in parts:
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f'the {what} "{twice[0]}" stands twice; each needs its own name')
        if not self.features and not self.dense:
            raise ValueError("there is neither a feature nor a dense column to learn from")
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        if self.groups and self.session is None:
            raise ValueError("groups repeat within a session, but there is no session column")
        lists = {f.name for f in self.features if f.kind == "keys"}
        known, grouped, named = {f.name for f in self.features} | set(self.dense), set[str](), set[str]()
        for group in self.groups or ():
            if group.name in named:
                raise ValueError(f'two groups are called "{group.name}"; each needs its own name')
            named.add(group.name)
            for name in group.columns:
                if name not in known:
                    raise ValueError(
                        f'group {group.name} names "{name}", no feature or dense column.{nearest(name, known)}'
                    )
                if name in grouped:
                    raise ValueError(f'"{name}" stands in two groups, or twice in one; it can repeat in one only')
                grouped.add(name)
            for name in group.slides:
                if name not in group.columns or name not in lists:
                    raise ValueError(f'group {group.name} lets "{name}" slide, which is no list feature of the group')

    @staticmethod
    def read(path: Path | str) -> Schema:
        """The schema in a TOML or JSON file."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except OSError as error:
            raise SettingsError(f"The schema {path} cannot be read: {error.strerror or error}.") from None
        except (ValueError, RecursionError) as error:
            form = "TOML" if path.suffix == ".toml" else "JSON"
            raise SettingsError(f"The schema {path} is not valid {form}: {error}.") from None
        return parse(Schema, data, str(path))

    def to_json(self) -> str:
        """As `schema.json` holds it."""
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"

    @property
    def label_columns(self) -> tuple[Label, ...]:
        """The labels, however many."""
        if self.labels is not None:
            return self.labels
        return (Label(name=self.label),) if self.label is not None else ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The columns of the labels, in the order of a batch."""
        return tuple(label.name for label in self.label_columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of the log that is used, each once."""
        named = [*self.label_names, *self.dense]
        for feature in self.features:
            named += [feature.column, *([feature.weights] if feature.weights else [])]
        named += [c for c in (self.session, self.time, self.user, self.weight) if c is not None]
        return tuple(dict.fromkeys(named))

    def of_any_keys(self) -> Schema:
        """The same without a word on what the keys are."""
        features = tuple(feature.model_copy(update={"holds": None}) for feature in self.features)
        return self.model_copy(update={"features": features})

    def feature_settings(self) -> list[Feature]:
        """The features as an `Embeddings` module takes them."""
        return [Feature(name=f.name, table=f.table, pooling=f.pooling) for f in self.features]

    def prepared(self) -> Schema:
        """The schema of the data set made from a log with this schema.

        A feature's column is named after the feature, its weights `NAME_weights`. Session, time and user are
        stored once where a one-key feature already holds the same column.
        """
        stored = {f.column: f.name for f in self.features if f.kind == "key"}
        features = [
            f.model_copy(update={"column": f.name, "weights": f.weights and f"{f.name}_weights"}) for f in self.features
        ]
        renamed = {
            role: stored.get(column, column) if (column := getattr(self, role)) is not None else None
            for role in ("session", "time", "user")
        }
        schema = self.model_copy(update={"features": tuple(features), **renamed})
        _refuse_clashes(self, schema)
        return schema


def _refuse_clashes(log: Schema, prepared: Schema) -> None:
    """Two different things must not end up in one column of the data set."""
    holds: dict[str, tuple[str, str]] = {}
    named = [(c, "number", c) for c in (*log.label_names, *log.dense)]
    if log.weight is not None:
        named.append((log.weight, "number", log.weight))
    for raw, feature in zip(log.features, prepared.features, strict=True):
        named.append((feature.column, raw.kind, raw.column))
        if feature.weights and raw.weights:
            named.append((feature.weights, "weights", raw.weights))
    for role in ("session", "time", "user"):
        if (column := getattr(log, role)) is not None:
            named.append((getattr(prepared, role), "key", column))
    for name, kind, source in named:
        if holds.setdefault(name, (kind, source)) != (kind, source):
            raise SettingsError(
                f'The data set would have two different columns "{name}", from "{holds[name][1]}" '
                f'({holds[name][0]}) and "{source}" ({kind}). Give the feature another name and keep its '
                f"column with column = ...."
            )
