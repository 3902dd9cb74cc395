"""A table that a device cannot hold stays on the host and trains as without a plan; whoever plans or trains says so."""

import numpy as np
import pytest
import torch

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.capabilities import refused
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.plan.hot import hot_rows
from hotrow.profile.counts import KeyCounts
from hotrow.store.optimizers import SGD, Momentum
from hotrow.table import ByCount, Eviction

WRONG = {
    "admission": ({"admission": ByCount(count=3)}, "admits keys"),
    "capacity": ({"eviction": Eviction(capacity=4)}, "forgets rows"),
    "ttl": ({"eviction": Eviction(ttl=2)}, "forgets rows"),
    "momentum": ({"optimizer": Momentum(lr=0.1)}, "it has momentum"),
    "dtype": ({"dtype": "bfloat16"}, "it has bfloat16"),
    "dim": ({"dim": 2048}, "take 1024 at most"),
}
wrong = pytest.mark.parametrize(("settings", "why"), WRONG.values(), ids=WRONG)


def tables(settings: dict) -> list[Table]:
    """Two that a device can hold and one that it cannot."""
    fine = {"dim": 4, "optimizer": SGD(lr=0.1)}
    return [Table(name=name, **fine) for name in "ab"] + [Table(**{"name": "t", **fine, **settings})]


def trained(settings: dict, plan: Plan | None) -> Embeddings:
    ours = Embeddings(tables(settings), [Feature(name=name) for name in "abt"], plan=plan)
    draw = torch.Generator().manual_seed(0)
    for _ in range(6):
        keys = {name: torch.randint(0, 4, (2,), generator=draw) for name in "abt"}
        ours(Batch.plain(keys)).vectors().sin().sum().backward()
        ours.step()
    return ours


@wrong
def test_a_table_that_a_device_cannot_hold_trains_as_without_a_plan(settings, why):
    named = Plan({name: (Share("device", np.arange(3)), Share("host")) for name in "abt"})
    with pytest.warns(UserWarning, match=f"In host memory.*: t .*{why}"):
        ours = trained(settings, named)
    assert list(ours.router.plan.keys_on("device")) == ["a", "b"]
    alone = trained(settings, None)
    for name in "abt":
        keys = torch.arange(6)
        torch.testing.assert_close(ours.read(name, keys), alone.read(name, keys), rtol=1e-2, atol=1e-5)
    assert ours.stats()["t"]["rows"] == alone.stats()["t"]["rows"]


@wrong
def test_the_planner_gives_the_whole_budget_to_tables_that_a_device_can_hold(settings, why):
    counts = {}
    for name, most in (("a", 1), ("b", 1), ("t", 100)):  # the one that cannot be hot would be hottest
        counts[name] = KeyCounts()
        counts[name].add(np.repeat(np.arange(10), most))
    hot = hot_rows(tables(settings), counts, 32 * 10)
    assert list(hot.kept) == ["t"] and why in hot.kept["t"]
    assert sum(map(len, hot.plan.keys_on("device").values())) == 10 and hot.tables["t"].rows == 0
    assert hot.share.value == pytest.approx(10 / 1020)


def test_a_budget_for_tables_of_which_a_device_can_hold_none_is_refused_with_the_reasons():
    counts = {"t": KeyCounts()}
    counts["t"].add(np.arange(10))
    with pytest.raises(SettingsError, match="it has momentum.*nothing to plan"):
        hot_rows([table_like("momentum")], counts, 1000)


def table_like(which: str) -> Table:
    return Table(**{"name": "t", "dim": 4, **WRONG[which][0]})


def test_rows_of_one_device_have_the_dtype_of_most_tables():
    half, full = ([Table(name=f"{d}{i}", dim=4, dtype=d) for i in range(2)] for d in ("bfloat16", "float32"))
    assert list(refused([*half, *full])) == ["bfloat160", "bfloat161"]
    assert list(refused([*half, full[0]])) == ["float320"]
    assert refused([*half, table_like("momentum")]).keys() == {"t"}


def test_staged_rows_keep_their_precision_beside_a_device_of_another_dtype():
    some = [Table(name="a", dim=4, dtype="bfloat16"), Table(name="b", dim=4)]
    plan = Plan({"a": (Share("device", np.arange(9)), Share("host")), "b": (Share("host"),)})
    features = [Feature(name=name) for name in "ab"]
    batch = Batch.plain({name: torch.arange(9) for name in "ab"})
    found = [Embeddings(some, features, plan=p)(batch).vector("b") for p in (plan, None)]
    assert torch.equal(*found)
