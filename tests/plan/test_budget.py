"""`hotrow plan`: from a data set to a plan that keeps its budget, in words, as JSON and as a picture."""

import functools
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.errors import DataError
from hotrow.plan import Plan, row_bytes
from hotrow.plan.budget import count_keys
from hotrow.profile import Profile, fingerprint
from hotrow.table import Table

SCHEMA = Schema(
    label="y", features=(Column(name="item"), Column(name="seen", kind="keys", table="item"), Column(name="user"))
)
RUN = """
[data]
path = "set"
[tables]
dim = 16
[tables.user]
dim = 4
[model]
name = "dlrm"
"""


def write(path, seed=0, samples=4000, shift=0):
    random = np.random.default_rng(seed)
    item = random.zipf(1.3, samples) % 900 + shift
    seen = [row[: i % 3].tolist() for i, row in enumerate(random.zipf(1.3, (samples, 2)) % 900 + shift)]
    columns = {"y": np.zeros(samples, np.float32), "item": item, "seen": seen, "user": np.arange(samples) // 9}
    with DataSetWriter(path, SCHEMA, row_group=500) as writer:
        writer.write("train", pa.table(columns))
    return DataSet.open(path)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "set")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def call(call):
    """Runs `hotrow plan`."""
    return functools.partial(call, "plan")


def true_share(dataset, plan):
    flat = pa.concat_tables(dataset.flat("train"))
    keys = {"item": np.concatenate([flat["item"].to_numpy(), flat["seen"].combine_chunks().flatten().to_numpy()])}
    keys["user"] = flat["user"].to_numpy()
    hot = {name: shares[0].keys if len(shares) == 2 else [] for name, shares in plan.shares.items()}
    hits = {name: np.isin(keys[name], hot[name]) for name in keys}
    return sum(h.sum() for h in hits.values()) / sum(len(h) for h in hits.values())


def test_a_plan_is_printed_written_and_drawn(folder, call):
    pytest.importorskip("plotly")
    code, out, err = call(
        folder / "set", "--memory", "20KiB", "--run", folder / "run.toml", "--picture", folder / "plan.html"
    )
    assert code == 0, err
    assert "accesses to hot rows" in out and "samples with hot rows only" in out and "▲ 20.0 KiB" in out
    plan = Plan.load(folder / "set.plan")
    tables = [Table(name="item", dim=16), Table(name="user", dim=4)]
    plan.check(tables)
    used = sum(len(plan.shares[t.name][0].keys) * row_bytes(t) for t in tables if len(plan.shares[t.name]) == 2)
    assert used == plan.facts["bytes"] <= 20 * 1024
    assert plan.facts["share"]["value"] == pytest.approx(true_share(DataSet.open(folder / "set"), plan))
    page = (folder / "plan.html").read_text()
    assert "20.0 KiB of rows take" in page.replace("19.9", "20.0") and "Plan for" in page


def test_json_has_everything_and_a_sample_has_intervals_that_hold(folder, call):
    code, out, err = call(folder / "set", "--memory", "8KiB", "--sample", "0.3", "--threshold", "300", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["counted"] == "sample" and data["fraction"] == pytest.approx(0.3, abs=0.03)
    share = data["share"]
    assert share["level"] == 0.99 and share["low"] < share["high"]
    truth = true_share(DataSet.open(folder / "set"), Plan.load(folder / "set.plan"))
    assert share["low"] <= truth <= share["high"]
    assert [c["threshold"] for c in data["thresholds"]["item"]] == [300]
    assert data["thresholds"]["item"][0]["rows"]["low"] < data["thresholds"]["item"][0]["rows"]["high"]
    assert data["curve"]["share"][-1] == pytest.approx(1) and len(data["curve"]["bytes"]) <= 400
    assert set(data["tables"]) == {"item", "user"} and data["tables"]["item"]["row_bytes"] == 84


def test_drift_to_another_data_set_or_its_profile(folder, call):
    other = write(folder / "later", seed=1, shift=50)
    Profile.read(other).save(folder / "kept", fingerprint(other.parts("train")))
    shown = []
    for path in (folder / "later", folder / "kept"):
        code, out, err = call(folder / "set", "--drift", path, "--json")
        assert code == 0, err
        shown.append(json.loads(out)["drift"]["tables"])
    assert shown[0] == shown[1]
    assert shown[0]["user"]["total_variation"] == 0 and shown[0]["item"]["total_variation"] > 0.5
    assert not (folder / "set.plan").exists()
    code, out, err = call(folder / "set", "--drift", folder / "later")
    assert code == 0 and "new keys" in out, err


def test_a_run_that_changes_keys_is_planned_for_the_changed_ones(folder, call):
    steps = '[[data.steps]]\nname = "hash"\ncolumns = ["item", "seen"]\nbuckets = 5\n'
    (folder / "run.toml").write_text(steps + RUN)
    code, out, err = call(folder / "set", "--memory", "1MiB", "--run", folder / "run.toml", "--json")
    assert code == 0, err
    assert json.loads(out)["tables"]["item"]["keys"] == 5
    assert set(Plan.load(folder / "set.plan").shares["item"][0].keys.tolist()) <= set(range(-1, 5))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Say how much memory hot rows may take"),
        (("--memory", "lots"), '"lots" is not a memory budget. Write a number and a unit'),
        (("--memory", "83"), "83 bytes holds no row"),
        (("--memory", "1KiB", "--sample", "2"), "above 0 and up to 1"),
        (("--memory", "1KiB", "--sample", "0.1", "--profile", "x"), "give one of them"),
        (("--memory", "1KiB", "--sample", "0.1", "--threshold", "20"), "Draw a larger sample"),
        (("--memory", "1KiB", "--set", "train.epochs=2"), "without --run only tables can be set"),
        (("--memory", "1KiB", "--set", "tables.dims=2"), 'there is no setting "dims"'),
        (("--memory", "1KiB", "--split", "tran"), 'no split "tran"'),
        (("--drift", "nowhere"), "cannot be read"),
    ],
)
def test_a_wrong_call_is_a_sentence(folder, call, arguments, said):
    code, _, err = call(folder / "set", *arguments)
    assert code == 1 and said in err
    assert not (folder / "set.plan").exists()


def test_a_profile_of_another_data_set_is_refused(folder, call):
    other = write(folder / "later", seed=1)
    Profile.read(other).save(folder / "kept", fingerprint(other.parts("train")))
    code, _, err = call(folder / "set", "--memory", "1MiB", "--profile", folder / "kept")
    assert code == 1 and "is of another data set" in err
    with pytest.raises(DataError, match="is of another data set"):
        count_keys(DataSet.open(folder / "set"), profile=folder / "kept")


def test_a_profile_left_in_a_copied_folder_is_not_believed(folder):
    other = write(folder / "later", seed=1, shift=10_000)
    count_keys(other)
    shutil.rmtree(folder / "set" / "profile", ignore_errors=True)
    shutil.copytree(folder / "later" / "profile", folder / "set" / "profile")
    assert count_keys(DataSet.open(folder / "set")).counts["item"].of(np.arange(900)).sum() > 0


def test_a_plan_is_not_replaced_unasked(folder, call):
    assert call(folder / "set", "--memory", "1MiB")[0] == 0
    code, _, err = call(folder / "set", "--memory", "2MiB")
    assert code == 1 and "--overwrite" in err
    assert call(folder / "set", "--memory", "2MiB", "--overwrite")[0] == 0
    assert Plan.load(folder / "set.plan").facts["memory"] == 2 << 20
