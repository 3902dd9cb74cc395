"""The factor expected is the factor reached, in files and in batches of any size."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given

from clustered import GROUPED, SCHEMA, clustered
from hotrow.data import Batch, DataSet, DataSetWriter, Group, Reader
from hotrow.data.synth import PRESETS, SynthSettings, generate
from hotrow.profile import Repetition, expected, find_groups, reached, stored
from hotrow.profile.factor import met

SETTINGS = SynthSettings(samples=70_000, **{**PRESETS["recd"], "users": 2_000})


@pytest.fixture(scope="module")
def log():
    table = pa.Table.from_batches([rows for rows, _ in generate(SETTINGS)])
    return table.sort_by([("session", "ascending"), ("time", "ascending")])


@pytest.fixture(scope="module")
def dataset(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("factor") / "set"
    schema = SETTINGS.log_schema().prepared()
    schema = schema.model_copy(update={"groups": find_groups(log, schema)})
    with DataSetWriter(path, schema, row_group=16_384) as writer:
        writer.write("train", log)
    return DataSet.open(path)


@pytest.fixture(scope="module")
def found(log, dataset):
    return Repetition.of(log, dataset.schema)


def near(ours, theirs, rel):
    assert ours.total == pytest.approx(theirs.total, rel=rel)
    assert ours.groups == pytest.approx(theirs.groups, rel=rel)
    assert ours.features == pytest.approx(theirs.features, rel=rel)


@pytest.mark.parametrize("batch_size", [40, 512, 4096])
def test_batches_reach_what_is_expected_within_two_percent(dataset, found, batch_size):
    wanted = expected(found, dataset.schema, batch_size)
    near(reached(Reader(dataset, "train", batch_size, drop_last=True), dataset.schema), wanted, rel=0.02)
    assert len(wanted.groups) == 3
    if batch_size == 4096:
        assert wanted.total > 8 and wanted.features["history"] > 12


def test_a_few_batches_of_a_shuffled_epoch_reach_it_as_well(dataset, found):
    reader = Reader(dataset, "train", 4096, seed=5)
    some = [batch for batch, _ in zip(reader, range(5), strict=False)]
    assert reached(some, dataset.schema).total == pytest.approx(expected(found, dataset.schema, 4096).total, rel=0.03)


def test_files_hold_what_is_expected_of_one_large_batch(dataset, found):
    near(stored(dataset, found), expected(found, dataset.schema, found.samples), rel=0.005)


def test_groups_that_were_not_counted_are_expected_from_the_sample_of_changes(dataset, found, log):
    flat = Repetition.of(log, dataset.schema.model_copy(update={"groups": None}))
    near(expected(flat, dataset.schema, 4096), expected(found, dataset.schema, 4096), rel=0.02)


def test_a_profile_of_other_sessions_of_the_log_expects_the_same(dataset, log):
    half = log.filter(pa.compute.equal(pa.compute.bit_wise_and(log.column("session"), 1), 0))
    wanted = expected(Repetition.of(half, dataset.schema), dataset.schema, 4096)
    seen = reached(Reader(dataset, "train", 4096, drop_last=True), dataset.schema)
    assert seen.total == pytest.approx(wanted.total, rel=0.05)


@given(clustered())
def test_one_batch_of_everything_is_expected_exactly(table):
    found = Repetition.of(table, GROUPED)
    wanted = expected(found, GROUPED, 1 << 20)
    for name, counts in found.columns.items():
        if name in wanted.features:
            first = counts.values / found.samples + (found.samples - 1) * counts.kept / found.samples
            assert wanted.features[name] == pytest.approx(counts.values / first if counts.values else 1.0)
    nothing = expected(found, SCHEMA, 64)
    assert (nothing.total, nothing.groups) == (pytest.approx(1.0), {})


def test_what_a_batch_holds_is_counted_by_hand():
    windows = Group(
        ("history",),
        torch.arange(5),
        torch.tensor([0, 3, 6, 8]),
        torch.tensor([0, 0, 1, 2, 2]),
        begins=torch.tensor([0, 1, 3]),
    )
    user = Group(("user",), torch.tensor([7, 8]), torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0, 1, 1]))
    item = Group(("item", "tags"), torch.arange(10), torch.arange(11))
    batch = Batch((windows, user, item), labels=torch.zeros(5))
    schema = SCHEMA.model_copy(
        update={
            "features": SCHEMA.features[:4],
            "groups": tuple(
                g.model_copy(update={"columns": c, "slides": s})
                for g, c, s in zip(GROUPED.groups, (("user",), ("history",)), ((), ("history",)), strict=True)
            ),
        }
    )
    found = reached([batch, batch], schema)
    assert found.features == {"user": 5 / 2, "item": 1.0, "history": 13 / 5, "tags": 1.0}
    assert found.groups == {"slowly": 5 / 2, "sliding": 5 / 3}
    assert found.total == (5 + 13 + 10) / (2 + 5 + 10)


def test_samples_of_a_session_meet_where_they_stand_together(log):
    found = Repetition.of(log, SETTINGS.log_schema().prepared())
    session = log.column("session").to_numpy()
    for clustered_log in (True, False):
        order = session if clustered_log else np.random.default_rng(0).permutation(session)
        sessions = sum(len(np.unique(batch)) for batch in order.reshape(-1, 500))
        assert met(found, 500, clustered=clustered_log) == pytest.approx(len(session) / sessions, rel=0.01)
