"""A profile is the same however it was divided, comes back from disk as it was, and knows whose it is."""

import errno
import hashlib
import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustered import GROUPED, SCHEMA, clustered
from hotrow.data import DataSet, DataSetWriter
from hotrow.errors import DataError, SettingsError
from hotrow.profile import PROFILE, Profile, fingerprint
from old_formats import profile_of_version_1

TABLE = pa.table(
    {
        "label": pa.array([0.0] * 6, pa.float32()),
        "age": pa.array([1.0, 1.0, 2.0, 2.0, 2.0, 3.0], pa.float32()),
        "price": pa.array([0.5] * 6, pa.float32()),
        "user": [1, 1, 1, 2, 2, 2],
        "item": [5, 6, 5, 7, 5, 8],
        "history": [[1], [1, 2], [1, 2], [], [3], [3]],
        "tags": [[1, 2], [1, 2], [2], [2], [2], []],
        "tags_weights": pa.array([[1.0, 2.0], [1.0, 2.0], [1.0], [1.0], [1.0], []], pa.list_(pa.float32())),
        "words": [[4], [4], [4], [4], [4], [4]],
        "session": [1, 1, 1, 2, 2, 3],
    }
)


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def data_set(path, table=TABLE, schema=GROUPED):
    with DataSetWriter(path, schema, row_group=3) as writer:
        writer.write("train", table)
        writer.write("test", table.slice(0, 3))
    return DataSet.open(path)


@settings(max_examples=15)
@given(table=clustered(), data=st.data())
def test_shares_merge_to_the_same_files_as_one_pass(tmp_path_factory, table, data):
    tmp_path = tmp_path_factory.mktemp("profile")
    session = table.column("session").to_pylist()
    cuts = [i for i in range(1, len(session)) if session[i] != session[i - 1] and data.draw(st.booleans())]
    edges = [0, *cuts, len(session)]
    for number, (a, b) in enumerate(itertools.pairwise(edges)):
        Profile.of(table.slice(a, b - a), GROUPED).save(tmp_path / f"share-{number}")
    shares = [tmp_path / f"share-{number}" for number in range(len(cuts) + 1)]
    Profile.merged(Profile.load(share) for share in shares).save(tmp_path / "merged", "x")
    Profile.of(table, GROUPED).save(tmp_path / "whole", "x")
    assert digests(tmp_path / "merged") == digests(tmp_path / "whole")


def test_keys_are_counted_by_feature_and_by_table(tmp_path):
    features = [f.model_copy(update={"table": "item"}) if f.name == "history" else f for f in GROUPED.features]
    found = Profile.of(TABLE, GROUPED.model_copy(update={"features": tuple(features)}))
    found.save(tmp_path / "p")
    for profile in (found, Profile.load(tmp_path / "p")):
        assert profile.samples == 6
        assert profile.tables == ("user", "item", "tags", "words")
        assert profile.keys["history"].of(np.array([1, 2, 3, 5])).tolist() == [3, 2, 2, 0]
        assert profile.table("item").of(np.array([1, 2, 3, 5])).tolist() == [3, 2, 2, 3]
        assert profile.table("item").total == 6 + 7
        assert profile.table("user") is profile.keys["user"]
        assert profile.repetition.repeats == GROUPED.groups
        with pytest.raises(SettingsError, match='no table "itme".* "item"'):
            profile.table("itme")


def test_merging_leaves_the_parts_as_they_were():
    a, b = Profile.of(TABLE.slice(0, 3), GROUPED), Profile.of(TABLE.slice(3), GROUPED)
    both = a.merge(b)
    assert (a.samples, b.samples, both.samples) == (3, 3, 6)
    assert (a.keys["user"].total, both.keys["user"].total) == (3, 6)
    with pytest.raises(DataError, match="no profile"):
        Profile.merged([])
    with pytest.raises(DataError, match="same features"):
        a.merge(Profile.of(TABLE, SCHEMA.model_copy(update={"features": SCHEMA.features[:2]})))


def test_a_data_set_without_a_profile_gets_one_and_keeps_it(tmp_path):
    dataset = data_set(tmp_path / "set")
    told = []
    found, saved = Profile.of_data_set(dataset, progress=told.append)
    assert not saved and told[-1] == 6
    again, saved = Profile.of_data_set(dataset)
    assert saved
    assert again.repetition.columns == found.repetition.columns == Profile.of(TABLE, GROUPED).repetition.columns
    assert again.repetition.session_lengths == {1: 1, 2: 1, 3: 1}
    test, saved = Profile.of_data_set(dataset, "test")
    assert not saved and test.samples == 3
    assert Profile.of_data_set(DataSet.open(tmp_path / "set"))[1]  # that of the train split is still there


def test_a_session_longer_than_a_row_group_is_counted_as_one(tmp_path):
    table = TABLE.set_column(TABLE.column_names.index("session"), "session", pa.array([1] * 5 + [2]))
    dataset = data_set(tmp_path / "set", table)
    assert len(dataset.parts("train")[0].row_groups) > 1
    assert Profile.read(dataset).repetition.session_lengths == {1: 1, 5: 1}


def test_a_profile_of_another_data_set_is_recognised(tmp_path):
    first = data_set(tmp_path / "first")
    other = data_set(tmp_path / "other", TABLE.slice(0, 5))
    Profile.of_data_set(other)
    (tmp_path / "other" / PROFILE).rename(tmp_path / "first" / PROFILE)
    with pytest.raises(DataError, match="of another data set"):
        Profile.load(tmp_path / "first" / PROFILE, fingerprint(first.parts("train")))
    found, saved = Profile.of_data_set(first)
    assert not saved and found.samples == 6
    assert Profile.load(tmp_path / "first" / PROFILE, fingerprint(first.parts("train"))).samples == 6


def test_a_data_set_that_may_only_be_read_has_a_profile_all_the_same(tmp_path, monkeypatch):
    dataset = data_set(tmp_path / "set")

    def refuse(error):
        def mkdir(*_, **__):
            raise error

        monkeypatch.setattr("pathlib.Path.mkdir", mkdir)

    refuse(OSError(errno.EROFS, "Read-only file system"))
    assert Profile.of_data_set(dataset)[0].samples == 6
    refuse(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DataError, match="The disk is full"):
        Profile.of_data_set(dataset)


def test_an_empty_split_has_no_profile(tmp_path):
    with DataSetWriter(tmp_path / "set", GROUPED) as writer:
        writer.split("train")
        writer.write("test", TABLE)
    with pytest.raises(DataError, match='"train" has no samples'):
        Profile.of_data_set(DataSet.open(tmp_path / "set"))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("profile.json", "{", "cannot be read"),
        ("profile.json", "[]", "cannot be read"),
        ("profile.json", '{"format": "hotrow-profile", "version": 9}', "not a profile"),
        ("profile.json", '{"format": "hotrow-profile", "version": 1}', "samples: this setting is needed"),
        ("changes.npz", "", "cannot be read"),
        ("changes.npz", "PK\x03\x04 and so on", "cannot be read"),
        ("keys-000-user.parquet", "PAR1", "cannot be read"),
    ],
)
def test_a_damaged_profile_is_named(tmp_path, file, content, said):
    Profile.of(TABLE, GROUPED).save(tmp_path / "p")
    (tmp_path / "p" / file).write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        Profile.load(tmp_path / "p")
    assert file in str(caught.value)


def test_parts_of_a_profile_that_do_not_belong_together_are_refused(tmp_path):
    Profile.of(TABLE, GROUPED).save(tmp_path / "p")
    profile_of_version_1(tmp_path / "p")
    saved = json.loads((tmp_path / "p" / "profile.json").read_text())
    del saved["columns"]["price"]
    (tmp_path / "p" / "profile.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match="does not fit"):
        Profile.load(tmp_path / "p")
    (tmp_path / "p" / "keys-000-user.parquet").unlink()
    with pytest.raises(DataError):
        Profile.load(tmp_path / "p")
    with pytest.raises(DataError, match="cannot be read"):
        Profile.load(tmp_path / "nowhere")
