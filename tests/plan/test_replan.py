"""Moves are exactly the keys whose tier changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share, moved_bytes, moves
from hotrow.table import Table

TIERS = ("replicated", "node", "world")
PLACES = st.lists(st.sampled_from(TIERS), min_size=12, max_size=12)


def plan_of(places):
    at = np.array(places)
    named = [Share(tier, np.flatnonzero(at == tier)) for tier in TIERS[:2]]
    return Plan({"t": (*(s for s in named if len(s.keys)), Share("world"))})


@given(PLACES, PLACES)
def test_every_key_whose_tier_changes_moves_once(before, after):
    found = moves(plan_of(before), plan_of(after))
    moved = {int(key): (m.source, m.target) for m in found for key in m.keys}
    assert sum(len(m.keys) for m in found) == len(moved)
    assert moved == {k: (a, b) for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


def test_a_moved_row_goes_to_all_other_ranks():
    found = moves(plan_of(["world"] * 12), plan_of(["replicated"] * 3 + ["world"] * 9))
    within, between = moved_bytes(found, cluster(3, 2), [Table(name="t", dim=8)])
    row = 8 * 4 + 4 + 20
    assert (within, between) == (3 * row * 1, 3 * row * 4)
    assert moved_bytes((), cluster(3, 2), []) == (0, 0)


def test_plans_that_cannot_follow_each_other_are_refused():
    with pytest.raises(SettingsError, match="different tables"):
        moves(plan_of(["world"] * 12), Plan({"u": (Share("world"),)}))
    with pytest.raises(SettingsError, match="from world to host whole"):
        moves(Plan({"t": (Share("world"),)}), Plan({"t": (Share("host"),)}))
    with pytest.raises(SettingsError, match="from world to host whole"):
        moves(plan_of(["node"] * 12), Plan({"t": (Share("node", np.array([3])), Share("host"))}))
