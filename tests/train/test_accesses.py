"""Accesses: a sample's use of a key counts once, however batches share and overlap what they store."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Table
from hotrow.plan import Plan, Share, row_bytes
from hotrow.profile.counts import LIMIT
from hotrow.store.optimizers import SGD
from hotrow.tiers import DeviceTier
from hotrow.train.accesses import Accesses, Seen, _limit, uses
from shapes import Case, cases


def accesses_of(case: Case) -> dict[str, Counter[int]]:
    """How often each key is used, with every sample spelled out."""
    counted: dict[str, Counter[int]] = {table.name: Counter() for table in case.tables}
    for batch in case.batches:
        spelled = batch.expand()
        for feature in case.features:
            counted[feature.table].update(spelled[feature.name].values.tolist())
    return counted


def table_of(case: Case) -> dict[str, str]:
    return {feature.name: feature.table for feature in case.features}


@given(cases(steps=2))
def test_uses_are_those_of_the_samples_spelled_out(case):
    counted: dict[str, Counter[int]] = {table.name: Counter() for table in case.tables}
    for batch in case.batches:
        for table, keys, times in uses(batch, table_of(case)):
            for key, n in zip(keys.tolist(), [1] * len(keys) if times is None else times.tolist(), strict=True):
                assert n > 0, "a key that no window covers counts as used"
                counted[table][key] += n
    assert counted == accesses_of(case)


@given(cases(steps=3, optimizers=st.just(SGD(lr=0.1))), st.booleans(), st.sets(st.integers(-5, 20)))
def test_hits_are_the_accesses_to_rows_the_device_holds(case, live, hot):
    held = np.array(sorted(hot), np.int64)
    plan = Plan({t.name: (Share("device", held), Share("host")) for t in case.tables})
    embeddings = Embeddings(case.tables, case.features, plan=plan)
    tier = embeddings.router.tiers["device"]
    assert isinstance(tier, DeviceTier)
    accesses = Accesses(tier, table_of(case))
    if live:
        accesses.count(case.tables, 1 << 20)
    for batch in case.batches:
        made = embeddings(batch)
        total = sum(group.rows.sum() for group in made.groups)
        total = total + sum(made.sequence(name).values.sum() for name in made.sequence_features)
        total.backward()
        embeddings.step()
        accesses.see(batch)
    wanted = accesses_of(case)
    hits = sum(n for keys in wanted.values() for key, n in keys.items() if key in hot)
    assert accesses.settle() == Seen(hits, sum(keys.total() for keys in wanted.values()))
    if live:
        for table, counts in accesses.counts.items():
            keys = np.array(sorted(wanted[table]), np.int64)
            assert counts.of(keys).tolist() == [wanted[table][key] for key in keys.tolist()]
            assert counts.total == wanted[table].total()
    accesses.close()


@pytest.fixture
def accesses():
    tables = [Table(name="item", dim=4)]
    found = Accesses(DeviceTier(tables, {"item": np.array([1])}), {"item": "item"})
    found.count(tables, 1 << 20)
    yield found
    found.close()


def test_what_was_counted_weighs_half_after_each_plan(accesses):
    old, new = (Batch.plain({"item": torch.full((8,), key)}) for key in (1, 2))
    accesses.see(old)
    accesses.forget()
    accesses.see(new)
    accesses.forget()
    accesses.see(new)
    accesses.settle()
    assert accesses.counts["item"].of(np.array([1, 2])).tolist() == [2, 8 // 2 + 8]
    assert (accesses.hits, accesses.total) == (8, 24), "what was hit is not forgotten"


def test_an_error_while_counting_is_raised_where_accesses_are_asked_for(accesses, monkeypatch):
    monkeypatch.setattr("hotrow.train.accesses.uses", lambda batch, table_of: 1 // 0)
    accesses.see(Batch.plain({"item": torch.tensor([1, 2])}))
    with pytest.raises(ZeroDivisionError):
        accesses.settle()


def test_counts_have_room_for_four_times_what_the_budget_holds_within_bounds():
    table = Table(name="item", dim=16)
    assert _limit(table, row_bytes(table) * 100_000) == 400_000
    assert _limit(table, 1) == 65_536
    assert _limit(table, 1 << 50) == LIMIT
