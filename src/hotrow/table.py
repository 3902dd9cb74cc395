"""`Table` and `Feature`: what rows there are and how a column of the data looks them up.

A table holds the rows of one entity. Its keys are any int64; there is no vocabulary and no size to give,
unless memory must be bounded (`eviction`) or rare keys should cost nothing (`admission`). One rule covers
every key that has no row (never seen, not admitted, evicted, out of time): it reads as the value its row
would start from, which depends on seed, table name and key alone, and its gradient is dropped.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hotrow.settings import Settings
from hotrow.store.optimizers import Optimizer, RowWiseAdagrad


class Uniform(Settings):
    """Each value uniform within plus and minus `scale`."""

    name: Literal["uniform"] = "uniform"
    scale: float = Field(0.05, gt=0)


class Normal(Settings):
    """Each value normal with standard deviation `std`."""

    name: Literal["normal"] = "normal"
    std: float = Field(0.01, gt=0)


class Fill(Settings):
    """Each value the same."""

    name: Literal["fill"] = "fill"
    value: float = 0.0


Init = Annotated[Uniform | Normal | Fill, Field(discriminator="name")]


class ByCount(Settings):
    """A key gets a row when it has been looked up in `count` batches, counted in a sketch of fixed size.

    The sketch never counts too low, so a key is never admitted late; with n keys seen and w = bytes / 8
    counters a row of the sketch, it counts too high by more than e n / w with probability at most 2%.
    """

    name: Literal["count"] = "count"
    count: int = Field(ge=2, le=255)
    bytes: int = Field(4 << 20, ge=4096, le=1 << 40, description="size of the sketch")


class ByProbability(Settings):
    """A key without a row gets one with this probability each time a batch looks it up."""

    name: Literal["probability"] = "probability"
    probability: float = Field(gt=0, lt=1)


Admission = Annotated[ByCount | ByProbability, Field(discriminator="name")]


class Eviction(Settings):
    """Bounds a table: at most `capacity` rows, and rows unused for `ttl` steps are forgotten.

    Past 4096 rows those to go are chosen from a sample of eight for each, so that evicting costs the same at any
    capacity; how often a key still finds its row is within half a percent of choosing from all.
    """

    capacity: int | None = Field(None, gt=0, lt=2**32, description="the most rows there may be")
    policy: Literal["lru", "lfu"] = Field("lru", description="which rows go first: least recently or least often used")
    ttl: int | None = Field(None, gt=0, lt=2**32, description="steps after its last use at which a row is forgotten")

    @model_validator(mode="after")
    def _bounds_something(self) -> "Eviction":
        if self.capacity is None and self.ttl is None:
            raise ValueError("eviction needs a capacity, a ttl, or both")
        if self.capacity is None and "policy" in self.model_fields_set:
            raise ValueError("an eviction policy needs a capacity")
        return self

    @model_serializer(mode="wrap")
    def _as_it_may_be_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = dump(self)
        return data if self.capacity is not None else {k: v for k, v in data.items() if k != "policy"}


class Table(Settings):
    """The rows of one entity, all of one shape, with one optimizer."""

    name: str = Field(min_length=1)
    dim: int = Field(ge=1, le=4096)
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: Optimizer = RowWiseAdagrad()
    init: Init = Uniform()
    admission: Admission | None = None
    eviction: Eviction | None = None


class Feature(Settings):
    """A column of the data that looks rows up in a table.

    `pooling` says what a sample gets: the "sum" or "mean" of its rows (weighted where the batch brings weights
    for the feature), or a "sequence" of them. A sample without keys gets zeros, or an empty sequence.
    In training `dropout` is the share of samples that get zeros, or of a sequence's rows that are zeros.
    """

    name: str = Field(min_length=1)
    table: str = Field("", description="the table it looks up; its own name if not given", validate_default=True)
    pooling: Literal["sum", "mean", "sequence"] = "sum"
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _own_table(cls, data: object) -> object:
        if isinstance(data, dict) and not data.get("table"):
            return {**data, "table": data.get("name", "")}
        return data
