"""The device tier gives what a plain table gives, whatever part of the rows it holds and however the plan changes.

On a CPU the tier is a dense array and the kernels are their plain twins; where there is a GPU the same is tested there.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import Adam, Momentum
from hotrow.tiers import DeviceTier
from shapes import ON_DEVICE, PHASES, Case, cases
from test_embeddings import assert_same_rows, both, loss_of, train

HOT = st.lists(st.one_of(st.integers(-5, 20), st.sampled_from([2**62, -(2**63)])))


@st.composite
def plans(draw: st.DrawFn, case: Case) -> Plan:
    """Some keys of some tables on the device."""
    shares: dict[str, tuple[Share, ...]] = {}
    for table in case.tables:
        hot = np.array(draw(HOT), np.int64)
        shares[table.name] = (Share("device", hot), Share("host")) if draw(st.booleans()) else (Share("host"),)
    return Plan(shares)


def check_split(device: str, case: Case, data: st.DataObject) -> None:
    ours, plain = both(case, plan=data.draw(plans(case)), device=device)
    train(case, ours, plain)
    assert_same_rows(case, ours, plain)


def check_changes(device: str, case: Case, data: st.DataObject) -> None:
    ours, plain = both(case, plan=data.draw(plans(case)), device=device)
    for batch in case.batches:
        train(Case(case.tables, case.features, [batch]), ours, plain)
        ours.replan(data.draw(plans(case)))
    assert_same_rows(case, ours, plain)


@given(cases(optimizers=ON_DEVICE), st.data())
def test_rows_split_between_device_and_host_equal_one_plain_table(case, data):
    check_split("cpu", case, data)


@given(cases(optimizers=ON_DEVICE), st.data())
def test_a_plan_that_changes_in_mid_run_loses_no_update(case, data):
    check_changes("cpu", case, data)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", [check_split, check_changes])
@settings(max_examples=6, phases=PHASES)  # every shape is compiled for, which takes seconds each
@given(case=cases(optimizers=ON_DEVICE), data=st.data())
def test_the_same_on_a_gpu(check, case, data):
    check("cuda", case, data)


@given(cases(optimizers=ON_DEVICE, steps=2), st.data())
def test_lookups_made_before_a_change_of_plan_are_trained_on_after_it(case, data):
    ours, plain = both(case, plan=data.draw(plans(case)))
    grouped = [ours.group(batch) for batch in case.batches]
    first = ours.embed(ours.fetch(grouped[0]))
    loss_of(first).backward()
    ours.replan(data.draw(plans(case)))  # between backward and step
    ours.step()
    loss_of(ours.embed(ours.fetch(grouped[1]))).backward()
    ours.step()
    for batch in case.batches:
        loss_of(plain(batch)).backward()
        plain.step()
    assert_same_rows(case, ours, plain)


@given(cases(optimizers=ON_DEVICE, steps=2), st.data())
def test_several_lookups_on_the_device_before_a_step_make_one_update(case, data):
    ours, plain = both(case, plan=data.draw(plans(case)))
    for embeddings in (ours, plain):
        sum(loss_of(embeddings(batch)) for batch in case.batches).backward()
        embeddings.step()
    assert_same_rows(case, ours, plain)


def _trained(plan: Plan | None, dtype: str = "float32") -> Embeddings:
    torch.manual_seed(0)
    tables = [Table(name="a", dim=4, dtype=dtype), Table(name="b", dim=8, dtype=dtype, optimizer=Adam(lr=0.1))]
    ours = Embeddings(tables, [Feature(name="a"), Feature(name="b")], plan=plan)
    for step in range(4):
        keys = {"a": torch.tensor([1, 2, 3 + step]), "b": torch.tensor([7, 7, step])}
        (ours(Batch.plain(keys)).vectors() * torch.randn(3, 12)).sum().backward()
        ours.step()
    return ours


PLAN = Plan(
    {
        "a": (Share("device", np.array([1, 4, 99])), Share("host")),
        "b": (Share("device", np.array([0, 7])), Share("host")),
    }
)


def rows_of(embeddings: Embeddings) -> dict[str, dict[int, tuple]]:
    """Every row a snapshot holds, by table and key, wherever it lives."""
    found: dict[str, dict[int, tuple]] = {name: {} for name in embeddings.tables}
    from hotrow.store.store import Cut

    for tier in embeddings.router.tiers.values():
        for name, store in tier.stores().items():
            moment = store.begin_cut(Cut.PEEK)
            while len((c := moment.read_snapshot(1000))["keys"]):
                n = len(c["keys"])
                for i, key in enumerate(c["keys"].tolist()):
                    assert key not in found[name], "a row lives on two tiers"
                    values, state = c["values"].reshape(n, -1)[i], c["state"].reshape(n, -1)[i]
                    meta = [int(c[m][i]) for m in ("clocks", "uses", "last")]
                    found[name][key] = (values.tolist(), state.tolist(), *meta)
            moment.end_snapshot(True)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_of_device_and_host_loads_on_any_plan(tmp_path, dtype):
    split = _trained(PLAN, dtype)
    split.snapshot(tmp_path / "rows").write()
    for plan in (None, PLAN, Plan({"a": (Share("host"),), "b": (Share("device", np.arange(9)), Share("host"))})):
        other = Embeddings(list(split.tables.values()), list(split.features.values()), plan=plan)
        other.restore(tmp_path / "rows")
        assert rows_of(other) == rows_of(split)
        assert other.steps == split.steps == 4


def test_what_moved_since_the_last_snapshot_is_in_the_next_incremental_one(tmp_path):
    ours = _trained(PLAN)
    ours.snapshot(tmp_path / "full").write()
    ours.replan(Plan({"a": (Share("device", np.array([2])), Share("host")), "b": (Share("host"),)}))
    ours.snapshot(tmp_path / "more", tmp_path / "full").write()
    other = Embeddings(list(ours.tables.values()), list(ours.features.values()))
    other.restore(tmp_path / "more")
    assert rows_of(other) == rows_of(ours)


def test_a_plan_may_change_while_a_snapshot_is_still_being_written(tmp_path):
    ours = _trained(PLAN)
    first = ours.snapshot(tmp_path / "full")
    ours.replan(Plan({"a": (Share("device", np.array([2])), Share("host")), "b": (Share("host"),)}))
    first.write()
    ours.snapshot(tmp_path / "more", tmp_path / "full").write()
    other = Embeddings(list(ours.tables.values()), list(ours.features.values()))
    other.restore(tmp_path / "more")
    assert rows_of(other) == rows_of(ours)


def test_split_and_host_rows_have_the_same_clocks_uses_and_last_steps():
    split, host = rows_of(_trained(PLAN)), rows_of(_trained(None))
    assert {t: {k: row[2:] for k, row in rows.items()} for t, rows in split.items()} == {
        t: {k: row[2:] for k, row in rows.items()} for t, rows in host.items()
    }


def test_evaluation_changes_nothing_on_the_device():
    ours = _trained(PLAN)
    before = rows_of(ours)
    ours.eval()
    ours(Batch.plain({"a": torch.tensor([1, 99, 50]), "b": torch.tensor([0, 7, 8])}))
    assert rows_of(ours) == before


def test_the_tier_counts_the_bytes_it_holds():
    tier = DeviceTier([Table(name="a", dim=64)], {"a": np.arange(100)})
    # values, state, clock and last use; state is padded to 64 rows, clocks have one more
    assert tier.bytes == 100 * (64 * 4 + 4 + 4 + 4) + (128 - 100) * 4 + 8


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([Table(name="a", dim=4, optimizer=Momentum())], "it has momentum"),
        ([Table(name="a", dim=4), Table(name="b", dim=4, dtype="bfloat16")], "b .it has bfloat16"),
        ([Table(name="a", dim=2000)], "take 1024 at most"),
    ],
)
def test_what_the_device_cannot_hold_is_refused_with_a_sentence(tables, said):
    with pytest.raises(SettingsError, match=said):
        DeviceTier(tables, {table.name: np.arange(3) for table in tables})
