"""`hotrow plan --topology` and `hotrow simulate`: from a data set to a plan for ranks, explained and replayed."""

import json

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.plan import Plan
from hotrow.plan.cluster import key_batches
from hotrow.profile import fingerprint

CLUSTER = """
nodes = 2
ranks = 2
memory = "64MiB"
[between]
bandwidth = "100Mbit/s"
[within]
bandwidth = "1Gbit/s"
"""
SCHEMA = Schema(
    label="y",
    features=(
        Column(name="item"),
        Column(name="seen", kind="keys", table="item", pooling="sequence"),
        Column(name="user"),
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, random, samples = tmp_path_factory.mktemp("ranks"), np.random.default_rng(0), 6000
    seen = random.zipf(1.3, (samples, 6)) % 900
    columns = {
        "y": np.zeros(samples, np.float32),
        "item": random.zipf(1.3, samples) % 900,
        "seen": list(seen),
        "user": random.integers(0, 2000, samples),
    }
    with DataSetWriter(folder / "set", SCHEMA, row_group=1000) as writer:
        writer.write("train", pa.table(columns))
    (folder / "cluster.toml").write_text(CLUSTER)
    return folder


def test_a_plan_for_ranks_explains_itself(made, call, tmp_path):
    pytest.importorskip("plotly")
    out = tmp_path / "p"
    code, said, err = call(
        "plan", made / "set", "--topology", made / "cluster.toml", "--compare", "--batch-size", 100, "--out", out,
        "--picture", tmp_path / "p.html",
    )  # fmt: skip
    assert code == 0, err
    for words in ("between", "on every rank", "rank dedup", "table-wise", "column-wise", "this plan"):
        assert words in " ".join(said.split())
    plan = Plan.load(out)
    assert plan.facts["dedup"] in ("rank", "node") and set(plan.shares) == {"item", "user"}
    assert plan.facts["fingerprint"] == fingerprint(DataSet.open(made / "set").parts("train"))
    assert all(shares[-1].tier == "world" for shares in plan.shares.values())
    page = (tmp_path / "p.html").read_text()
    assert "Rows by tier" in page and "Beside other plans" in page


def test_json_has_bytes_times_reasons_and_memory(made, call, tmp_path):
    code, out, err = call(
        "plan", made / "set", "--topology", made / "cluster.toml", "--compare", "--batch-size", 100, "--json",
        "--extra", "64KiB", "--out", tmp_path / "p", "--wire", "bfloat16",
    )  # fmt: skip
    assert code == 0, err
    data = json.loads(out)
    assert data["memory"]["plan"] <= data["memory"]["row_wise"] + 64 * 1024
    assert data["traffic"]["between"] == pytest.approx(sum(e["between"] for e in data["exchanges"]), abs=20)
    assert data["traffic"]["seconds"] == pytest.approx(sum(e["seconds"] for e in data["exchanges"]))
    rows = {r["name"]: r for r in data["compare"]}
    assert rows["this plan"]["seconds"] == data["traffic"]["seconds"]
    assert rows["this plan"]["seconds"] <= min(r["seconds"] for r in rows.values())
    assert 0 < rows["rank dedup"]["saved"] < rows["node dedup"]["saved"] < 1
    for name, table in data["tables"].items():
        held = table["tiers"]
        assert sum(t["rows"] for t in held.values()) == table["rows"]
        assert sum(t["share"] for t in held.values()) == pytest.approx(1)
        assert table["why"].endswith(".")
        named = {s.tier: len(s.keys) for s in Plan.load(tmp_path / "p").shares[name] if s.keys is not None}
        assert named == {tier: t["rows"] for tier, t in held.items() if t["rows"] and tier != "world"}
    assert data["curve"]["item"]["share"][-1] == pytest.approx(1)


def test_a_table_that_nothing_used_is_no_hindrance(call, tmp_path):
    schema = SCHEMA.model_copy(update={"features": (Column(name="item"), Column(name="never", kind="keys"))})
    columns = {
        "y": np.zeros(900, np.float32),
        "item": np.arange(900) % 30,
        "never": pa.array([[]] * 900, pa.list_(pa.int64())),
    }
    with DataSetWriter(tmp_path / "set", schema) as writer:
        writer.write("train", pa.table(columns))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    asked = ("--topology", tmp_path / "cluster.toml", "--batch-size", 100)
    code, out, err = call("plan", tmp_path / "set", *asked, "--compare", "--json", "--out", tmp_path / "p")
    assert code == 0, err
    table = json.loads(out)["tables"]["never"]
    assert table["rows"] == 0 and table["why"] == "No access of it was counted."
    assert [share.tier for share in Plan.load(tmp_path / "p").shares["never"]] == ["world"]
    code, _, err = call("simulate", tmp_path / "set", *asked, "--plan", tmp_path / "p", "--steps", 2, "--json")
    assert code == 0, err


def test_settings_of_ranks_are_refused_without_them(made, call):
    for given in (("--wire", "float16"), ("--batch-size", 5)):
        code, _, err = call("plan", made / "set", "--memory", "1KiB", *given)
        assert code and "--topology" in err
    code, _, err = call("plan", made / "set", "--memory", "1KiB", "--sample", 0)
    assert code and "above 0" in err


def test_the_plan_named_in_the_data_sets_keys_is_replayed_as_expected(made, call, tmp_path):
    asked = ("--topology", made / "cluster.toml", "--batch-size", 100)
    assert call("plan", made / "set", *asked, "--out", tmp_path / "p")[0] == 0
    code, out, err = call("simulate", made / "set", *asked, "--plan", tmp_path / "p", "--steps", 15, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["steps"] == 15
    for row in data["compare"]:
        assert abs(row["error"]["between"]) < 0.05 and abs(row["error"]["within"]) < 0.05
        assert abs(row["error"]["seconds"]) < 0.25
    batches = [keys for _, keys in zip(range(60), key_batches(DataSet.open(made / "set"), "train", 100), strict=True)]
    assert data["lookups"] == pytest.approx(np.mean([sum(len(k) for k in b.values()) for b in batches]))


def test_a_new_profile_says_what_moves(made, call, tmp_path):
    asked = ("--topology", made / "cluster.toml", "--batch-size", 100)
    assert call("plan", made / "set", *asked, "--extra", "0", "--out", tmp_path / "old")[0] == 0
    code, out, err = call(
        "plan", made / "set", *asked, "--out", tmp_path / "new", "--since", tmp_path / "old", "--json"
    )
    assert code == 0, err
    data = json.loads(out)
    new = Plan.load(tmp_path / "new")
    named = sum(len(k) for tier in ("replicated", "node") for k in new.keys_on(tier).values())
    assert sum(m["rows"] for m in data["moves"]["rows"]) == named
    assert (data["moves"]["between"] > 0) == (named > 0)
    code, out, err = call(
        "plan", made / "set", *asked, "--out", tmp_path / "new", "--since", tmp_path / "old", "--overwrite"
    )
    assert code == 0 and "Moving sends" in out, err


def test_a_law_is_replayed_for_a_cluster_that_is_not_here(made, call):
    code, out, err = call(
        "simulate", "--zipf", 1.05, "--rows", 20000, "--tables", 2, "--dim", 16, "--lookups", 500, "--steps", 2,
        "--topology", made / "cluster.toml", "--json",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["compare"]
    assert rows[0]["name"] == "row-wise" and rows[0]["saved"] == 0
    assert rows[-1]["seconds"] <= min(r["seconds"] for r in rows) * 1.02
    asked = ("--zipf", 1.05, "--rows", 5000, "--topology", made / "cluster.toml", "--lookups", 300)
    code, out, err = call("simulate", *asked)
    assert code == 0 and "this plan" in out and "Zipf 1.05" in out, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "SET", "--compare"), "give their --topology CLUSTER.toml"),
        (("plan", "SET", "--topology", "TOML", "--memory", "1MiB"), "give one of them"),
        (("plan", "SET", "--topology", "nowhere.toml"), "There is no cluster file nowhere.toml"),
        (("plan", "SET", "--topology", "TOML"), "takes 16,384, but the split"),
        (("plan", "SET", "--topology", "TOML", "--batch-size", "9", "--wire", "fp8"), 'no format "fp8"'),
        (("plan", "SET", "--topology", "TOML", "--batch-size", "9", "--extra", "1GiB"), "do not fit"),
        (("plan", "SET", "--topology", "TOML", "--batch-size", "9", "--sample", "0.5"), "Leave out --sample"),
        (("plan", "SET", "--topology", "TOML", "--batch-size", "9", "--since", "gone"), "There is no plan gone"),
        (("simulate", "--topology", "TOML"), "Say what to replay"),
        (("simulate", "SET", "--zipf", "1", "--topology", "TOML"), "Say what to replay"),
        (("simulate", "--zipf", "1"), "Say for which cluster"),
        (("simulate", "--zipf", "99", "--topology", "TOML"), "exponent from 0 to 10"),
        (("simulate", "--zipf", "1", "--rows", "0", "--topology", "TOML"), "from 1 to 2^40 rows"),
        (("simulate", "--zipf", "1", "--topology", "TOML", "--rows", "1e13"), "from 1 to 2^40 rows"),
    ],
)
def test_a_wrong_call_is_a_sentence(made, call, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    places = {"SET": made / "set", "TOML": made / "cluster.toml"}
    code, _, err = call(*(places.get(a, a) for a in arguments))
    assert code == 1 and said in err
    assert not (made / "set.plan").exists() and list(tmp_path.iterdir()) == []
