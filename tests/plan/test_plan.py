"""A plan is saved whole, comes back as it was, and is refused where it does not fit."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import DataError, SettingsError
from hotrow.plan import Plan, Share, row_bytes
from hotrow.sealed import sealed
from hotrow.store.optimizers import SGD, Adam
from hotrow.tiers.host import HostTier

ITEM, USER = Table(name="item", dim=16), Table(name="user", dim=4)


def a_plan(**changes):
    shares = {
        "item": (Share("device", np.array([7, -3, 2**62])), Share("middle", np.array([1], np.int64)), Share("host")),
        "user": (Share("host"),),
    }
    return Plan(**{"shares": shares, "row_bytes": {"item": 84, "user": 36}, "facts": {"memory": 512}, **changes})


def keys_of(plan):
    return {
        name: [(s.tier, None if s.keys is None else sorted(s.keys.tolist())) for s in shares]
        for name, shares in plan.shares.items()
    }


def test_a_row_costs_values_state_and_index():
    assert row_bytes(ITEM) == 16 * 4 + 4 + 16
    assert row_bytes(Table(name="t", dim=10, dtype="bfloat16", optimizer=SGD())) == 20 + 16
    assert row_bytes(Table(name="t", dim=10, optimizer=Adam()), index=0) == 40 + 80


def test_a_saved_plan_comes_back(tmp_path):
    plan = a_plan()
    plan.save(tmp_path / "deep" / "p.plan")
    back = Plan.load(tmp_path / "deep" / "p.plan")
    assert keys_of(back) == keys_of(plan)
    assert (back.row_bytes, back.facts) == (plan.row_bytes, plan.facts)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["p.plan"]


def test_only_a_plan_is_replaced_and_only_when_asked(tmp_path):
    path = tmp_path / "p"
    a_plan().save(path)
    with pytest.raises(DataError, match="already there.*--overwrite"):
        a_plan().save(path)
    a_plan(facts={"memory": 9}).save(path, overwrite=True)
    assert Plan.load(path).facts == {"memory": 9}
    path.write_text("a letter")
    with pytest.raises(DataError, match="cannot be read"):
        a_plan().save(path, overwrite=True)
    assert path.read_text() == "a letter"


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotrow.files.flush", full)
    with pytest.raises(DataError, match="No space left"):
        a_plan().save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def _rewritten(path, change, seal=sealed):
    """The file with its JSON changed by `change`, and a checksum that fits."""
    with pa.ipc.open_file(path) as reader:
        about, batches = json.loads(reader.schema.metadata[b"plan"]), [reader.get_batch(i) for i in range(2)]
        schema = reader.schema
    changed = change(about)
    about.pop("checksum", None)
    about = changed if isinstance(changed, list) else seal(about)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema.with_metadata({"plan": json.dumps(about)})) as out,
    ):
        for batch in batches:
            out.write_batch(batch)


def test_a_plan_whose_settings_were_altered_is_refused_and_one_of_version_1_is_read(tmp_path):
    plan = a_plan()
    plan.save(tmp_path / "p")
    _rewritten(tmp_path / "p", lambda a: a.update(version=1), seal=dict)
    back = Plan.load(tmp_path / "p")
    assert keys_of(back) == keys_of(plan) and (back.row_bytes, back.facts) == (plan.row_bytes, plan.facts)
    plan.save(tmp_path / "p", overwrite=True)
    _rewritten(tmp_path / "p", lambda a: a["row_bytes"].update(item=1), seal=lambda a: {**a, "checksum": "0" * 64})
    with pytest.raises(DataError, match="was altered: its .checksum. is not that of what it says"):
        Plan.load(tmp_path / "p")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.update(format="x"), "is not a plan"),
        (lambda a: a.update(version=9), "format version 9"),
        (lambda a: a["tables"]["item"][0].update(batch=1, keys=1), "not those that were planned"),
        (lambda a: a["tables"]["item"][0].update(batch=9), "was altered"),
        (lambda a: a["tables"]["item"].pop(), "was altered: Plan for table item"),
        (lambda a: a.pop("row_bytes"), "was altered"),
        (lambda a: a.update(tables=3), "was altered"),
        (lambda a: [1], "is not a plan"),
    ],
)
def test_an_altered_plan_is_refused(tmp_path, change, said):
    a_plan().save(tmp_path / "p")
    _rewritten(tmp_path / "p", change)
    with pytest.raises(DataError, match=said):
        Plan.load(tmp_path / "p")


def test_what_is_no_plan_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no plan.*hotrow plan DATA"):
        Plan.load(tmp_path / "none")
    a_plan().save(tmp_path / "p")
    whole = (tmp_path / "p").read_bytes()
    for cut in (0, 8, len(whole) // 2, len(whole) - 3):
        (tmp_path / "p").write_bytes(whole[:cut])
        with pytest.raises(DataError, match="cannot be read"):
            Plan.load(tmp_path / "p")
    with pytest.raises(DataError, match="cannot be read"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([ITEM], 'for other tables: it has "user"'),
        ([ITEM, USER, Table(name="shop", dim=2)], 'for other tables: it says nothing of "shop"'),
        ([ITEM, Table(name="user", dim=5)], "counted 36 bytes a row of table user.*takes 40.*--run"),
        ([Table(name="item", dim=16, optimizer=Adam()), USER], "with dim 16, float32 and adam a row takes 208"),
    ],
)
def test_a_plan_for_other_tables_is_refused(tables, said):
    with pytest.raises(SettingsError, match=said):
        a_plan().check(tables)
    with pytest.raises(SettingsError, match=said):
        Embeddings(tables, [], plan=a_plan())


def test_a_plan_fits_its_own_tables_and_narrower_ones():
    a_plan().check([ITEM, USER])
    a_plan().check([USER, Table(name="item", dim=8)])


def test_a_key_in_no_profile_lives_on_the_last_tier():
    tiers = {name: HostTier([ITEM]) for name in ("device", "host")}
    plan = Plan({"item": (Share("device", np.array([1, 2])), Share("host"))})
    embeddings = Embeddings([ITEM], [Feature(name="item")], tiers=tiers, plan=plan)
    embeddings(Batch.plain({"item": torch.tensor([1, 2, 3, -(2**63)])}))
    assert len(tiers["device"].stores()["item"]) == 2
    assert len(tiers["host"].stores()["item"]) == 2
