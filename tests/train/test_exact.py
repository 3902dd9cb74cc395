"""Exact, pipelined: the same bits as `Sync`, over every kind of tier, and rows travel as seldom as said."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from hotrow.table import ByCount, ByProbability, Eviction
from hotrow.tiers import HostTier
from hotrow.train.exact import ExactPipeline
from hotrow.train.pipeline import Pipeline
from hotrow.train.trainer import train
from shapes import _COMMON, Case, cases
from travel import RemoteHost, assert_same_bits, columns, travel

ON_DEVICE = st.one_of(st.builds(SGD, **_COMMON), st.builds(RowWiseAdagrad, **_COMMON), st.builds(Adam, **_COMMON))
SPLIT = np.array([1, 2, 3, 5, 8, 13], np.int64)


def host(case):
    return {}


def remote(case):
    return {"tiers": {"remote": RemoteHost(case.tables, 5)}, "plan": Plan.all_on("remote", case.tables)}


def host_and_remote(case):
    tiers = {"host": HostTier(case.tables, 5), "remote": RemoteHost(case.tables, 5)}
    return {"tiers": tiers, "plan": Plan({t.name: (Share("host", SPLIT), Share("remote")) for t in case.tables})}


def device_and_remote(case):
    tiers = {"remote": RemoteHost(case.tables, 5)}
    return {"tiers": tiers, "plan": Plan({t.name: (Share("device", SPLIT), Share("remote")) for t in case.tables})}


def same_as_sync(case: Case, kind, lead: int, batches=None) -> Embeddings:
    """Trains both ways and compares everything; the one that was pipelined."""
    runs = []
    for policy in (Pipeline, partial(ExactPipeline, lead=lead)):
        embeddings = Embeddings(case.tables, case.features, seed=5, **kind(case))
        seen = travel(embeddings, batches or case.batches, policy)
        runs.append((embeddings, seen))
    (_, expected), (exact, seen) = runs
    assert_same_bits(seen, expected)
    assert_same_bits(columns(exact), columns(runs[0][0]))
    return exact


@pytest.mark.parametrize("kind", [host, remote, host_and_remote])
@settings(max_examples=25)
@given(cases(steps=7), st.integers(1, 4))
def test_the_same_bits_as_sync(kind, case, lead):
    same_as_sync(case, kind, lead)


@settings(max_examples=25)
@given(cases(steps=6, optimizers=ON_DEVICE), st.integers(1, 3))
def test_the_same_bits_as_sync_with_rows_on_the_device(case, lead):
    same_as_sync(case, device_and_remote, lead)


def keyed(*batches):
    return [Batch.plain({"item": torch.tensor(keys)}) for keys in batches]


def items(**settings):
    return Case([Table(name="item", dim=4, **settings)], [Feature(name="item")], [])


@pytest.mark.parametrize(
    "settings",
    [
        {"eviction": Eviction(capacity=6)},
        {"eviction": Eviction(capacity=6, policy="lfu")},
        {"eviction": Eviction(ttl=2)},
        {"admission": ByCount(count=2, bytes=4096)},
        {"admission": ByProbability(probability=0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [host, remote])
def test_the_same_bits_as_sync_where_rows_come_and_go(settings, kind):
    random = np.random.default_rng(3)
    batches = keyed(*(random.zipf(1.3, 5) % 12 for _ in range(40)))
    same_as_sync(items(optimizer=Adagrad(lr=0.3), **settings), kind, 3, batches)


def test_rows_are_fetched_ahead_and_shared_ones_once_they_are_final():
    batches = keyed([1, 2, 3], [3, 4, 5], [5, 6, 1], [7, 8, 6])
    case = items(optimizer=SGD(lr=0.1))
    remote_tier = same_as_sync(case, remote, 1, batches).router.tiers["remote"]
    asked = {}
    for what, step, keys in remote_tier.asked:
        asked.setdefault((what, step), []).append(keys["item"])
    assert asked["fetch", 1] == [[4, 5], [3]]
    assert asked["update", 0] == [[3], [1, 2]]  # what the next batch waits for, then the rest
    assert asked["update", 1] == [[5], [3, 4]]
    assert asked["fetch", 3] == [[7, 8], [6]]
    assert not any(what == "read" for what, _ in asked)
    assert asked["update", 3] == [[6, 7, 8]]  # nobody comes after


def test_a_table_with_adam_is_updated_in_one_go():
    batches = keyed([1, 2, 3], [3, 4, 5], [5, 6, 1])
    remote_tier = same_as_sync(items(optimizer=Adam(lr=0.1)), remote, 1, batches).router.tiers["remote"]
    first = next(keys["item"] for what, step, keys in remote_tier.asked if (what, step) == ("update", 0))
    assert first == [1, 2, 3]


@settings(max_examples=15)
@given(cases(steps=6, optimizers=ON_DEVICE), st.data())
def test_a_plan_that_changes_in_mid_run_changes_nothing(case, data):
    plans = []
    for _ in range(3):
        hot = np.array(data.draw(st.lists(st.integers(-5, 20))), np.int64)
        plans.append(Plan({t.name: (Share("device", hot), Share("host")) for t in case.tables}))
    runs = []
    for policy in (Pipeline, partial(ExactPipeline, lead=3)):
        embeddings = Embeddings(case.tables, case.features, seed=5, plan=plans[0])

        def change(step, pipeline, embeddings=embeddings):
            if step in (1, 3):
                with pipeline.paused():
                    embeddings.replan(plans[step // 2 + 1])

        runs.append(travel(embeddings, case.batches, policy, change))
    assert_same_bits(*runs)


def test_a_run_under_exact_ends_as_under_sync_and_so_does_a_resumed_one(make_run, tmp_path, same_weights):
    plain = make_run(train__evaluate_every=10, output__folder=str(tmp_path / "plain"))
    train(plain)
    exact = make_run(policy={"name": "exact"}, train__evaluate_every=10, train__checkpoint_every=7)
    train(exact)
    same_weights(plain, exact)
