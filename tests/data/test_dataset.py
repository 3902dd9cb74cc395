"""A data set is whole or not there, and says what is missing of it."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.data.parts import PartsWriter
from hotrow.errors import DataError, SettingsError

SCHEMA = Schema(label="y", features=(Column(name="k"),))


def samples(n, first=0):
    keys = np.arange(first, first + n)
    return pa.record_batch({"y": pa.array(np.zeros(n, np.float32)), "k": pa.array(keys)})


def written(path, sizes=(10,), **options):
    with DataSetWriter(path, SCHEMA, **options) as writer:
        writer.split("train")
        first = 0
        for size in sizes:
            writer.write("train", samples(size, first))
            first += size
        writer.split("test")
        writer.facts["best_auc"] = 0.8
    return DataSet.open(path)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 20), st.integers(1, 4))
def test_row_groups_and_parts_do_not_depend_on_the_sizes_written(tmp_path_factory, sizes, row_group, groups):
    path = tmp_path_factory.mktemp("d") / "set"
    dataset = written(path, sizes, row_group=row_group, part=row_group * groups)
    total = sum(sizes)
    parts = dataset.parts("train")
    assert dataset.samples("train") == total and dataset.samples("test") == 0
    assert [n for part in parts for n in part.row_groups] == [
        min(row_group, total - at) for at in range(0, total, row_group)
    ]
    assert all(part.samples == row_group * groups for part in parts[:-1])
    read = [k for part in parts for k in pq.read_table(path / part.file).column("k").to_pylist()]
    assert read == list(range(total))
    for part in parts:
        footer = pq.ParquetFile(path / part.file).metadata
        assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == list(part.row_groups)
    dataset.verify()


def test_facts_and_sizes_survive(tmp_path):
    dataset = written(tmp_path / "set")
    assert dataset.facts == {"best_auc": 0.8}
    assert dataset.splits == ("train", "test")
    assert dataset.bytes == sum(f.stat().st_size for f in (tmp_path / "set").glob("*.parquet"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]


def test_what_is_missing_or_altered_is_named(tmp_path):
    path = tmp_path / "set"
    dataset = written(path)
    with pytest.raises(DataError, match='no split "tran".*"train"'):
        dataset.parts("tran")
    with pytest.raises(DataError, match="There is no data set"):
        DataSet.open(tmp_path / "none")
    part = path / "train-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(DataError, match="train-00000.parquet was altered"):
        DataSet.open(path).verify()
    part.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="train-00000.parquet has .* cut short"):
        DataSet.open(path)
    part.unlink()
    with pytest.raises(DataError, match="train-00000.parquet is missing"):
        DataSet.open(path)
    (path / "schema.json").unlink()
    with pytest.raises(DataError, match="schema.json cannot be read"):
        DataSet.open(path)
    (path / "manifest.json").unlink()
    with pytest.raises(DataError, match="not a data set, or prepare did not finish"):
        DataSet.open(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "format version 99, this Hotrow reads version 1"),
        ({"format": "other"}, "not the manifest of a data set"),
        ({"splits": {"train": [{"file": "x"}]}}, "splits.train.0.samples: this setting is needed"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(tmp_path, change, said):
    written(tmp_path / "set")
    manifest = tmp_path / "set" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(DataError, match=said):
        DataSet.open(tmp_path / "set")
    manifest.write_text("{")
    with pytest.raises(DataError, match="manifest.json cannot be read"):
        DataSet.open(tmp_path / "set")


def test_a_folder_in_use_is_kept_unless_overwritten(tmp_path):
    path = tmp_path / "set"
    written(path, (10,))
    with pytest.raises(DataError, match="is not empty"):
        written(path, (20,))
    assert DataSet.open(path).samples("train") == 10
    assert written(path, (20,), overwrite=True).samples("train") == 20
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_overwriting_never_deletes_what_is_not_a_data_set(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(DataError, match="not overwritten"):
        written(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        written(tmp_path / "file", overwrite=True)
    (tmp_path / "empty").mkdir()
    assert written(tmp_path / "empty").samples("train") == 10


def fail_after(monkeypatch, calls, error):
    real, left = PartsWriter._write_group, [calls]

    def write_group(self, group):
        if not left[0]:
            raise error
        left[0] -= 1
        real(self, group)

    monkeypatch.setattr(PartsWriter, "_write_group", write_group)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch, calls):
    fail_after(monkeypatch, calls, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DataError, match="The disk is full"):
        written(tmp_path / "set", (25, 10), row_group=10)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_leaves_the_old_data_set_whole(tmp_path, monkeypatch):
    path = tmp_path / "set"
    written(path, (10,))
    with monkeypatch.context() as patch:
        fail_after(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            written(path, (30,), row_group=10, overwrite=True)
    DataSet.open(path).verify()
    assert DataSet.open(path).samples("train") == 10
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_an_overwrite_that_cannot_be_put_in_place_gives_the_old_data_set_back(tmp_path, monkeypatch):
    path = tmp_path / "set"
    written(path, (10,))
    real = Path.rename

    def rename(self, target):
        if self.suffix == ".partial":
            raise OSError(errno.EACCES, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(DataError, match="could not be written: Permission denied"):
        written(path, (30,), overwrite=True)
    assert DataSet.open(path).samples("train") == 10
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_a_full_disk_at_the_manifest_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hotrow.data.dataset.write_text", full)
    with pytest.raises(DataError, match="The disk is full"):
        written(tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_row_groups_and_parts_must_be_possible(tmp_path):
    with pytest.raises(SettingsError, match="at least one row group"):
        DataSetWriter(tmp_path / "set", SCHEMA, row_group=10, part=5)


def test_a_data_set_may_be_moved(tmp_path):
    written(tmp_path / "set")
    shutil.move(tmp_path / "set", tmp_path / "moved")
    DataSet.open(tmp_path / "moved").verify()
