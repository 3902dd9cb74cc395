"""What is counted is what travels: entry by entry as a plain walk over ranks finds it, and as real ranks send it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import CLUSTERS, cluster, drawn_steps, drawn_table, split_plan
from hotrow import _native
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.plan.simulate import count_step, memory, simulate, whole_steps
from hotrow.plan.traffic import owners
from hotrow.table import Table

TABLE = Table(name="t", dim=4)
ROW = 16


def walked(plan, topology, step, dedup):
    """Bytes within nodes and between them, found by walking from rank to rank, key by key."""
    size, g, nodes = topology.size, topology.ranks, topology.nodes
    bytes_ = {"within": 0, "between": 0}
    shares = plan.shares["t"]
    tier_of = {k: s.tier for s in shares if s.keys is not None for k in s.keys.tolist()}
    owner = {k: int(owners(np.array([k]), size)[0]) for batch in step for k in batch["t"].tolist()}

    def send(a, b, amount):
        if a != b:
            bytes_["within" if a // g == b // g else "between"] += amount

    used = {tier: [sorted({k for k in b["t"].tolist() if tier_of.get(k, "world") == tier}) for b in step]
            for tier in ("replicated", "node", "world")}  # fmt: skip
    for rank, batch in enumerate(step):
        if dedup != "node":
            lookups = [k for k in batch["t"].tolist() if tier_of.get(k, "world") == "world"]
            for k in lookups if dedup == "none" else used["world"][rank]:
                send(rank, owner[k], 8 + ROW)  # key, gradient
                send(owner[k], rank, ROW)
        for tier, there, back in (("world", 8 + ROW, ROW), ("node", 8 + ROW, ROW), ("replicated", 8 + ROW, 0)):
            for k in used[tier][rank] if tier != "world" or dedup == "node" else ():
                mate = rank // g * g + owner[k] % g
                send(rank, mate, there)
                send(mate, rank, back)
    for node in range(nodes):
        for tier in ("world", "node", "replicated"):
            if tier == "world" and dedup != "node":
                continue
            for k in set().union(*used[tier][node * g : (node + 1) * g]):
                mate = node * g + owner[k] % g
                if tier == "world":
                    send(mate, owner[k], 8 + ROW)
                    send(owner[k], mate, ROW)
                elif nodes == 2:
                    send(mate, (1 - node) * g + owner[k] % g, 8 + ROW)
                else:
                    send(mate, owner[k], 8 + ROW)
    for tier in ("node", "replicated"):
        for k in set().union(*used[tier]):
            for node in range(nodes):
                mate = node * g + owner[k] % g
                if nodes > 2:
                    send(owner[k], mate, 8 + ROW)
                for rank in range(node * g, (node + 1) * g) if tier == "replicated" else ():
                    send(mate, rank, 8 + ROW)
    return bytes_["within"], bytes_["between"]


def without_counts(traffic):
    kept = [e for e in traffic.exchanges if not e.name.startswith("counts")]
    return sum(e.within for e in kept), sum(e.between for e in kept)


@given(CLUSTERS, st.integers(0, 6), st.integers(0, 6), st.sampled_from(["none", "rank", "node"]), st.integers(0, 99))
def test_every_entry_is_counted_once(topology, replicated, node, dedup, seed):
    plan, _ = split_plan(20, replicated, node)
    p = np.arange(20, 0, -1) / 210
    (step,) = drawn_steps(p, 15, topology, 1, seed)
    assert without_counts(count_step(plan, topology, step, [TABLE], dedup=dedup)) == walked(plan, topology, step, dedup)


@pytest.mark.parametrize(
    ("shape", "dedup", "wire", "copies"),
    [
        ((2, 2), "none", "float32", False),
        ((2, 2), "rank", "bfloat16", True),
        ((2, 2), "node", "float32", True),
        ((1, 4), "node", "float16", True),
        ((4, 1), "rank", "float32", True),
        ((3, 1), "node", "float16", True),
    ],
)
def test_real_ranks_send_as_many_bytes_as_are_counted(pool, shape, dedup, wire, copies):
    topology = cluster(*shape)
    random = np.random.default_rng(0)
    named = {"a": {"replicated": [0, 1, 2], "node": [3, 4, 5, 6]} if copies else {}, "b": {}}
    dims = {"a": 4, "b": 7}
    batches = [{name: random.zipf(1.3, 40) % 30 for name in dims} for _ in range(topology.size)]
    plan = Plan(
        {n: (*(Share(tier, np.array(keys)) for tier, keys in s.items()), Share("world")) for n, s in named.items()}
    )
    sent = pool.run(topology.size, "plan_work:exchanged", dims, named, dedup, wire, batches, node_size=topology.ranks)
    counted = count_step(
        plan, topology, batches, [Table(name=n, dim=d) for n, d in dims.items()], wire=wire, dedup=dedup
    )
    assert (sum(w for w, _ in sent), sum(b for _, b in sent)) == (counted.within, counted.between)


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40, unique=True), st.integers(1, 4096))
def test_owners_are_those_of_the_native_core(keys, ranks):
    array = np.array(keys)
    out = _native.Outgoing(
        keys=[array], positions=[None], repeats=None, starts=[0], dims=[1], ranks=ranks, divide=1, members=ranks
    )
    assert np.bincount(owners(array, ranks), minlength=ranks).tolist() == np.asarray(out.counts).reshape(-1).tolist()


def test_the_busiest_bound_every_exchange():
    topology = cluster(2, 2)
    p, _ = drawn_table(1 / np.arange(1, 200), 100, topology)
    plan, _ = split_plan(199, 5, 10)
    for exchange in count_step(plan, topology, drawn_steps(p, 100, topology, 1)[0], [TABLE]).exchanges:
        assert exchange.within / topology.size <= exchange.busiest_rank <= exchange.within
        assert exchange.between / topology.nodes <= exchange.busiest_node <= exchange.between


def test_a_mean_step_is_the_mean_of_steps():
    topology = cluster(2, 2)
    p, _ = drawn_table(np.ones(50), 30, topology)
    plan, _ = split_plan(50, 3, 3)
    steps = drawn_steps(p, 30, topology, 3)
    single = [count_step(plan, topology, step, [TABLE]) for step in steps]
    found = simulate(plan, topology, steps, [TABLE])
    assert found.traffic.between == pytest.approx(np.mean([t.between for t in single]))
    assert found.seconds == pytest.approx(np.mean([t.seconds(topology) for t in single]))
    assert found.steps == 3


def test_memory_is_that_of_each_rank():
    topology = cluster(2, 2)
    plan, _ = split_plan(100, 10, 20)
    found = memory(plan, topology, [TABLE], {"t": np.arange(100)})
    width, owner = 4 * 4 + 4 + 16, owners(np.arange(100), 4)
    for rank in range(4):
        rows = 10 + (owner[10:30] % 2 == rank % 2).sum() + (owner[30:] == rank).sum()
        assert found[rank] == rows * width + 30 * 18


def test_what_cannot_be_replayed_is_a_sentence():
    topology, plan = cluster(2, 2), Plan.all_on("world", [TABLE])
    with pytest.raises(SettingsError, match="a batch for each of 4 ranks, not for 1"):
        count_step(plan, topology, [{"t": np.arange(3)}], [TABLE])
    with pytest.raises(SettingsError, match='"node", "rank" or "none", not by "all"'):
        count_step(plan, topology, [{"t": np.arange(3)}] * 4, [TABLE], dedup="all")
    with pytest.raises(SettingsError, match='table t on tier "host", which no ranks share'):
        count_step(Plan.all_on("host", [TABLE]), topology, [{"t": np.arange(3)}] * 4, [TABLE])
    with pytest.raises(SettingsError, match="no whole step to replay"):
        simulate(plan, topology, whole_steps([{"t": np.arange(3)}] * 3, topology, 9), [TABLE])


def test_batches_become_steps_rank_after_rank():
    topology = cluster(1, 2)
    steps = list(whole_steps(({"t": np.array([i])} for i in range(7)), topology, 2))
    assert json.dumps([[int(b["t"][0]) for b in step] for step in steps]) == "[[0, 1], [2, 3]]"
