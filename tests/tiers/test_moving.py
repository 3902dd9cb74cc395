"""Rows move with the plan of one process, named or not: none is lost, and none is in two places."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_device import rows_of

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import StoreError
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import Adam
from hotrow.tiers import Cache, CachedTier, HostTier, Tier
from serving import served, shards
from shapes import ON_DEVICE, Case, cases
from test_embeddings import assert_same_rows, both, loss_of, train

HOST = ("host", "spare", "cached")
"""Tiers that take any key."""
HOT = st.lists(st.one_of(st.integers(-5, 20), st.sampled_from([2**62, -(2**63)])))


def tiers(tables: list[Table]) -> dict[str, Tier]:
    behind = HostTier(tables, seed=5)
    cached = CachedTier(behind, Cache(capacity=5), seed=5)
    return {"host": HostTier(tables, seed=5), "spare": HostTier(tables, seed=5), "cached": cached}


@st.composite
def plans(draw: st.DrawFn, tables: list[Table]) -> Plan:
    """Any tier for the keys that nobody names, and some keys on any of the others."""
    shares = {}
    for table in tables:
        last = draw(st.sampled_from(HOST))
        others = draw(st.lists(st.sampled_from([t for t in (*HOST, "device") if t != last]), unique=True, max_size=2))
        shares[table.name] = (*(Share(tier, np.array(draw(HOT), np.int64)) for tier in others), Share(last))
    return Plan(shares)


def clocks(embeddings: Embeddings) -> dict[str, dict[int, int]]:
    """The updates of every row there is; one that is on two tiers fails."""
    for tier in embeddings.router.tiers.values():
        tier.flush()
    return {name: {key: row[2] for key, row in rows.items()} for name, rows in rows_of(embeddings).items()}


@given(cases(optimizers=ON_DEVICE), st.data())
def test_whatever_a_plan_changes_the_rows_are_those_of_one_plain_table(case, data):
    ours, plain = both(case, tiers=tiers(case.tables), plan=data.draw(plans(case.tables)))
    alone = both(case)[0]
    for batch in case.batches:
        train(Case(case.tables, case.features, [batch]), ours, plain)
        loss_of(alone(batch)).backward()
        alone.step()
        ours.replan(data.draw(plans(case.tables)))
        assert clocks(ours) == clocks(alone)
    assert_same_rows(case, ours, plain)


def trained(**settings: object) -> Embeddings:
    """Rows 0 to 8 after three updates; Adam's next one depends on how many there were."""
    table = Table(name="t", dim=4, optimizer=Adam(lr=0.1))
    ours = Embeddings([table], [Feature(name="t")], seed=5, **settings)
    for _ in range(3):
        step(ours)
    return ours


def step(ours: Embeddings) -> None:
    ours(Batch.plain({"t": torch.arange(9)})).vectors().square().sum().backward()
    ours.step()


def test_a_table_moves_to_shards_and_back_with_the_count_of_its_updates():
    host, alone = Plan({"t": (Share("host"),)}), trained()
    split = Plan({"t": (Share("host", np.array([2, 3])), Share("served"))})
    table = alone.tables["t"]
    with shards(2) as addresses, served(addresses, [table], seed=5) as remote:
        ours = trained(tiers={"host": HostTier([table], seed=5), "served": remote}, plan=host)
        for plan, here in ((split, 2), (host, 9)):
            ours.replan(plan)
            for each in (ours, alone):
                step(each)
            assert torch.equal(ours.read("t", torch.arange(9)), alone.read("t", torch.arange(9)))
            assert len(ours.router.tiers["host"].stores()["t"]) == here
            assert ours.stats()["t"]["rows"] == 9


def test_a_plan_that_cannot_be_put_in_force_leaves_every_row_where_it_is(tmp_path):
    table = Table(name="t", dim=4, optimizer=Adam(lr=0.1))
    spare = {"host": HostTier([table], seed=5), "spare": HostTier([table], seed=5)}
    ours, alone = trained(tiers=spare, plan=Plan({"t": (Share("host"),)})), trained()
    snapshot = ours.snapshot(tmp_path / "rows")
    to_spare = Plan({"t": (Share("host", np.array([1])), Share("spare"))})
    with pytest.raises(StoreError, match="already under way"):  # its rows cannot be listed while they are written
        ours.replan(to_spare)
    assert rows_at(ours) == rows_at(alone) == {"host": 9}
    snapshot.write()
    ours.replan(to_spare)
    assert rows_at(ours) == {"host": 1, "spare": 8}


def rows_at(ours: Embeddings) -> dict[str, int]:
    return {name: rows for name, tier in ours.router.tiers.items() if (rows := len(tier.stores()["t"]))}
