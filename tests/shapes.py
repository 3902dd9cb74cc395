"""Hypothesis strategies for tables, features and batches of every shape the embeddings must handle."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import Phase
from hypothesis import strategies as st

from hotrow import Batch, Feature, Group, Table
from hotrow.schedule import Constant, Linear
from hotrow.store.optimizers import SGD, Adagrad, Adam, Momentum, RowWiseAdagrad
from hotrow.table import Normal, Uniform

PHASES = (Phase.explicit, Phase.generate)  # where an example takes seconds: a failing one is not made smaller

KEYS = st.one_of(st.integers(-5, 20), st.sampled_from([2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1]))

_COMMON = {
    "lr": st.sampled_from([0.1, 1.0]),
    "schedule": st.sampled_from([Constant(), Constant(warmup=3), Linear(steps=5, final=0.1)]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "clip_value": st.sampled_from([None, 0.5]),
    "clip_norm": st.sampled_from([None, 0.7]),
    "bound": st.sampled_from([None, 0.3]),
}

ON_DEVICE = st.one_of(
    st.builds(SGD, **_COMMON),
    st.builds(Adagrad, **_COMMON, initial=st.sampled_from([0.0, 0.1])),
    st.builds(RowWiseAdagrad, **_COMMON, initial=st.sampled_from([0.0, 0.1])),
    st.builds(Adam, **_COMMON),
)
"""Those that the device tier knows."""
OPTIMIZERS = st.one_of(
    ON_DEVICE,
    st.builds(
        Momentum,
        **_COMMON,
        dampening=st.sampled_from([0.0, 0.4]),
        nesterov=st.booleans(),
        momentum=st.just(0.8),
    ),
)


@dataclass
class Case:
    """Tables, features and the batches of a few steps."""

    tables: list[Table]
    features: list[Feature]
    batches: list[Batch]


@st.composite
def cases(draw: st.DrawFn, steps: int = 3, optimizers: st.SearchStrategy = OPTIMIZERS) -> Case:
    """Any optimizer; features pooled, weighted or sequences, several a table; groups that repeat, slide, or neither."""
    dims = st.integers(1, 20)
    inits = st.sampled_from([Uniform(scale=0.2), Normal(std=0.1)])
    tables = [
        Table(name=f"t{i}", dim=draw(dims), optimizer=draw(optimizers), init=draw(inits))
        for i in range(draw(st.integers(1, 3)))
    ]
    groups, features = [], []
    for g in range(draw(st.integers(1, 3))):
        weighted = draw(st.booleans())
        names = []
        for f in range(draw(st.integers(1, 3))):
            poolings = ["sum", "mean"] if weighted else ["sum", "mean", "sequence"]
            name = f"g{g}f{f}"
            table = draw(st.sampled_from(tables)).name
            features.append(Feature(name=name, table=table, pooling=draw(st.sampled_from(poolings))))
            names.append(name)
        groups.append(GroupShape(tuple(names), weighted, draw(st.booleans()), draw(st.booleans())))
    return Case(tables, features, [draw(batches(groups)) for _ in range(steps)])


class GroupShape(NamedTuple):
    """What a drawn group has: features, and whether weights, repeated samples and windows that overlap."""

    names: tuple[str, ...]
    weighted: bool
    inverted: bool
    windowed: bool
    single: tuple[str, ...] = ()
    """Features with exactly one key a sample."""


@st.composite
def batches(draw: st.DrawFn, groups: list[GroupShape], keys: st.SearchStrategy[int] = KEYS) -> Batch:
    """One to six samples, bags of up to four keys."""
    size = draw(st.integers(1, 6))
    return Batch(tuple(draw(_groups(shape, size, keys)) for shape in groups))


@st.composite
def _groups(draw: st.DrawFn, shape: GroupShape, size: int, keys: st.SearchStrategy[int]) -> Group:
    inverse, unique = None, size
    if shape.inverted:  # every unique sample is someone's
        drawn = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
        found, inverse = torch.unique(drawn, return_inverse=True)
        unique = len(found)
    shortest = [1 if name in shape.single else 0 for name in shape.names for _ in range(unique)]
    lengths = [draw(st.integers(least, 4 - 3 * least)) for least in shortest]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    begins, count = None, int(offsets[-1])
    if shape.windowed:  # anywhere in the values: overlapping, with gaps, across features
        count = draw(st.integers(max(lengths), max(lengths) + 6))
        begins = torch.tensor([draw(st.integers(0, count - n)) for n in lengths], dtype=torch.int64)
    values = torch.tensor(draw(st.lists(keys, min_size=count, max_size=count)), dtype=torch.int64)
    weights = None
    if shape.weighted:
        number = st.sampled_from([0.0, 0.5, 1.0, 2.0])
        weights = torch.tensor(draw(st.lists(number, min_size=count, max_size=count)), dtype=torch.float32)
    return Group(shape.names, values, offsets, inverse, weights, begins)
