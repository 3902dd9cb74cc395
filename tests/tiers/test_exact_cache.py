"""The exact cache gives several workers in sync the same bits as without it, and rows that nobody else uses stay."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cached import in_step

from hotrow import Table
from hotrow.errors import SettingsError
from hotrow.store.optimizers import SGD
from hotrow.table import Fill
from hotrow.tiers import Cache, Gradients, Part, Tier
from hotrow.tiers.exact_cache import ExactCachedTier
from hotrow.world import World
from serving import Breaking, served, shards
from shapes import OPTIMIZERS

KEYS = 20
Steps = list[list[np.ndarray]]  # of each step the keys of every rank


def train(tier: Tier, tables: list[Table], steps: Steps, rank: int, seen: list[np.ndarray]) -> None:
    """Gradients that depend on what is read: a row that is another one shows at once. Each step ends by reading all."""
    every, end = [], 0
    for i, table in enumerate(tables):
        every.append(Part(table.name, i, np.arange(KEYS), None, end))
        end += KEYS * table.dim
    for step, of_rank in enumerate(steps):
        parts, start = [], 0
        for i, table in enumerate(tables):
            parts.append(Part(table.name, i, of_rank[rank], None, start))
            start += len(of_rank[rank]) * table.dim
        rows = np.empty(start, np.float32)
        ticket = tier.fetch(parts, rows, step)
        seen.append(rows.copy())
        tier.update(parts, Gradients(np.cos(rows + step).astype(np.float32)), step, ticket)
        rows = np.empty(end, np.float32)
        tier.read(every, rows, step + 1)
        seen.append(rows)


def run(tables: list[Table], steps: Steps, ranks: int, addresses: list[str], cache: Cache | None) -> tuple:
    """What every rank read, what every row and state is in the end, and the exact caches' counters."""
    seen: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    counters: list[dict] = [{} for _ in range(ranks)]

    def work(rank: int, _: object) -> None:
        world = World(rank, ranks, ranks)
        with served(addresses, tables, world=world, group="one") as backing:
            tier = backing if cache is None else ExactCachedTier(backing, cache, world=world)
            train(tier, tables, steps, rank, seen[rank])
            counters[rank] = dict(tier.counters())

    in_step(ranks, work)
    with served(addresses, tables) as backing:
        rows = {name: backing.stores()[name].take(np.arange(KEYS)) for name in backing.tables}
    return seen, rows, counters


@settings(max_examples=25)
@given(
    OPTIMIZERS,
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(2, 3),
    st.integers(1, 2),
    st.sampled_from([1, 4, 100]),
    st.integers(0, 2**32 - 1),
)
def test_the_same_bits_are_read_and_left_with_and_without_the_cache(optimizer, dtype, ranks, count, capacity, seed):
    tables = [Table(name="a", dim=5, optimizer=optimizer, dtype=dtype), Table(name="b", dim=3, optimizer=optimizer)]
    rng = np.random.default_rng(seed)
    steps = [[np.unique((KEYS * rng.random(4) ** 2).astype(np.int64)) for _ in range(ranks)] for _ in range(8)]
    found = []
    for cache in (None, Cache(capacity=capacity)):
        with shards(count) as addresses:
            found.append(run(tables, steps, ranks, addresses, cache)[:2])
    for rank in range(ranks):
        for one, other in zip(found[0][0][rank], found[1][0][rank], strict=True):
            assert np.array_equal(one, other)
    for name in found[0][1]:
        for column in ("keys", "values", "state", "clocks"):
            assert np.array_equal(found[0][1][name][column], found[1][1][name][column])


def test_rows_that_nobody_else_uses_never_come_down_again():
    tables = [Table(name="a", dim=64)]
    own = [np.arange(0, 8), np.arange(8, 16)]
    shared = np.arange(16, KEYS)
    steps = [[np.concatenate([own[rank], shared]) for rank in range(2)] for _ in range(10)]
    with shards(1) as addresses:
        _, _, counters = run(tables, steps, 2, addresses, Cache(capacity=100))
    for of_rank in counters:
        assert of_rank["fetched_rows"] == 8 + 10 * 4  # own ones once, those that both use at every step
        assert of_rank["bytes_in"] < 10 * 4 * (64 * 4 + 8) + 10 * 100


def test_each_row_is_minus_its_uses_over_lines_that_break():
    """What is not known after a repeat is fetched again."""
    ranks, rng = 2, np.random.default_rng(1)
    table = Table(name="a", dim=4, optimizer=SGD(lr=float(ranks)), init=Fill(value=0.0))
    steps = [[np.unique(rng.integers(0, KEYS, 8)) for _ in range(ranks)] for _ in range(150)]
    uses = np.zeros(KEYS)
    for of_rank in steps:
        for keys in of_rank:
            uses[keys] += 1
    with contextlib.ExitStack() as stack:
        (address,) = stack.enter_context(shards(1))
        lines = [stack.enter_context(Breaking(address, rank, (500, 8_000))) for rank in range(ranks)]

        def work(rank: int, _: object) -> None:
            world = World(rank, ranks, ranks)
            with served([lines[rank].address], [table], world=world, group="one") as backing:
                tier = ExactCachedTier(backing, Cache(capacity=10), world=world)
                for step, of_rank in enumerate(steps):
                    parts = [Part("a", 0, of_rank[rank], None, 0)]
                    ticket = tier.fetch(parts, np.empty(4 * len(of_rank[rank]), np.float32), step)
                    tier.update(parts, Gradients(np.ones(4 * len(of_rank[rank]), np.float32)), step, ticket)

        in_step(ranks, work)
        assert sum(line.broken for line in lines) > 2
        with served([address], [table]) as backing:
            rows = np.empty(KEYS * 4, np.float32)
            backing.read([Part("a", 0, np.arange(KEYS), None, 0)], rows, 0)
    assert np.array_equal(rows.reshape(KEYS, 4), np.repeat(-uses[:, None], 4, 1))


def test_pushes_that_are_not_combined_or_rounded_on_the_way_are_refused():
    table = Table(name="a", dim=4)
    with shards(1) as addresses:
        for wrong in ({}, {"world": World(0, 2), "group": "g", "wire": "bfloat16"}):
            with served(addresses, [table], **wrong) as tier, pytest.raises(SettingsError, match="combine the pushes"):
                ExactCachedTier(tier)
