"""A data set is whole or not there, and says what is missing of it."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.data.dataset import write_manifest
from hotrow.data.flat import arrow_schema
from hotrow.data.parts import Part, PartsWriter, PartWriter
from hotrow.errors import DataError, SettingsError
from hotrow.profile import fingerprint
from old_formats import data_set_of_version_2
from session_logs import grouped, logs

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
    read = [k for part in parts for k in pq.read_table(path / part.files[0].file).column("k").to_pylist()]
    assert read == list(range(total))
    for part in parts:
        footer = pq.ParquetFile(path / part.files[0].file).metadata
        assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == list(part.row_groups)
    dataset.verify()


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(), st.integers(1, 12), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1))
def test_row_groups_end_where_sessions_do_whatever_the_sizes_written(tmp_path_factory, log, row_group, groups, sizes):
    folder = tmp_path_factory.mktemp("d")
    for name, chunks in (("whole", [max(1, len(log))]), ("chunked", sizes)):
        with DataSetWriter(folder / name, grouped(), row_group=row_group, part=row_group * groups) as writer:
            writer.split("train")
            at, turn = 0, 0
            while at < len(log):
                writer.write("train", log.slice(at, chunks[turn % len(chunks)]))
                at, turn = at + chunks[turn % len(chunks)], turn + 1
    whole, chunked = (DataSet.open(folder / name) for name in ("whole", "chunked"))
    assert whole.manifest == chunked.manifest
    sessions, at = log.column("s").to_pylist(), 0
    for part in whole.parts("train"):
        assert part.samples <= row_group * groups
        for size in part.row_groups:
            assert 0 < size <= row_group
            if at and sessions[at] == sessions[at - 1]:  # a session was cut: it is longer than a row group
                assert sessions.count(sessions[at]) > row_group
            at += size
    assert at == len(log)


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(least=1), st.integers(1, 12))
def test_row_group_i_of_the_samples_refers_to_row_group_i_of_the_other_files_only(tmp_path_factory, log, row_group):
    path = tmp_path_factory.mktemp("d") / "set"
    with DataSetWriter(path, grouped(), row_group=row_group) as writer:
        writer.write("train", log)
    (part,) = DataSet.open(path).parts("train")
    assert [f.file for f in part.files] == [
        f"train-00000{name}.parquet" for name in ("", ".who", ".past", ".past.seen", ".past.rated", ".lists")
    ]
    ends = {file.table: np.cumsum([0, *file.rows]) for file in part.files}
    for number in range(len(part.row_groups)):
        read = {f.table: pq.ParquetFile(path / f.file).read_row_group(number) for f in part.files}
        rows = read[""].column("past").to_numpy()
        assert rows.min() == ends["past"][number] and rows.max() == ends["past"][number + 1] - 1
        windows = read["past"].column("seen_begin").to_numpy()
        assert windows.min() >= ends["past.seen"][number]
        assert (windows + read["past"].column("seen_length").to_numpy()).max() <= ends["past.seen"][number + 1]


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(), st.integers(1, 12))
def test_a_part_written_alone_is_the_part_of_a_data_set(tmp_path_factory, log, row_group):
    folder = tmp_path_factory.mktemp("d")
    with DataSetWriter(folder / "set", grouped(), row_group=row_group, part=1 << 20) as writer:
        writer.split("train")
        writer.write("train", log)
    (folder / "parts").mkdir()
    alone = PartWriter(folder / "parts", "train-00000", grouped(), row_group=row_group)
    alone.write(log)
    part = alone.finish()
    assert (() if part is None else (part,)) == DataSet.open(folder / "set").parts("train")
    assert part is None or Part.model_validate_json(part.model_dump_json()) == part
    write_manifest(folder / "parts", grouped(), {"train": [part] if part else []}, {"made": "alone"})
    DataSet.open(folder / "parts").verify()
    assert DataSet.open(folder / "parts").samples("train") == len(log)


def test_an_abandoned_part_can_be_written_again(tmp_path):
    for _ in range(2):
        writer = PartWriter(tmp_path, "train-00000", SCHEMA, row_group=3)
        writer.write(samples(10))
        writer.abandon()
    again = PartWriter(tmp_path, "train-00000", SCHEMA, row_group=3)
    again.write(samples(10))
    part = again.finish()
    assert part is not None and part.row_groups == (3, 3, 3, 1)
    assert pq.read_table(tmp_path / "train-00000.parquet").column("k").to_pylist() == list(range(10))


def test_version_1_is_read_as_it_is(tmp_path):
    dataset = written(tmp_path / "set", (10, 5), row_group=4, part=8)
    manifest = tmp_path / "set" / "manifest.json"
    old = {"format": "hotrow-dataset", "version": 1, "facts": {"best_auc": 0.8}, "splits": {"test": []}}
    old["splits"]["train"] = [
        {"file": f.file, "samples": sum(f.rows), "bytes": f.bytes, "sha256": f.sha256, "row_groups": f.rows}
        for part in dataset.parts("train")
        for f in part.files
    ]
    manifest.write_text(json.dumps(old))
    read = DataSet.open(tmp_path / "set")
    read.verify()
    assert fingerprint(read.parts("train")) == fingerprint(dataset.parts("train")) and read.facts == dataset.facts
    assert [k for table in read.flat("train") for k in table.column("k").to_pylist()] == list(range(15))
    manifest.write_text(json.dumps(old | {"splits": {"train": [{"file": "x"}]}}))
    with pytest.raises(DataError, match="splits.train.0.samples: this setting is needed"):
        DataSet.open(tmp_path / "set")


def test_version_2_is_read_as_it_is(tmp_path):
    """It had no checksums but those of whole files, and a profile with the fingerprint of these."""
    dataset = written(tmp_path / "set", (10, 5), row_group=4, part=8)
    data_set_of_version_2(tmp_path / "set")
    read = DataSet.open(tmp_path / "set")
    read.verify()
    assert all(file.checks is None for part in read.parts("train") for file in part.files)
    assert fingerprint(read.parts("train")) == fingerprint(dataset.parts("train")) and read.facts == dataset.facts
    assert [k for table in read.flat("train") for k in table.column("k").to_pylist()] == list(range(15))


@pytest.mark.parametrize(
    ("column", "values", "encoding"),
    [
        ("k", np.arange(1000) * 10**15, "PLAIN"),
        ("k", np.arange(1000) % 7 * 10**15, "RLE_DICTIONARY"),
        ("price", np.random.default_rng(0).random(1000, np.float32), "BYTE_STREAM_SPLIT"),
        ("price", np.arange(1000, dtype=np.float32) % 7, "RLE_DICTIONARY"),
        ("t", np.arange(1000), "DELTA_BINARY_PACKED"),
        ("past", None, "DELTA_BINARY_PACKED"),
    ],
)
def test_columns_are_encoded_by_what_they_hold(tmp_path, column, values, encoding):
    schema = grouped()
    flat = {
        f.name: pa.array([[1]] * 1000 if pa.types.is_list(f.type) else [1] * 1000, f.type) for f in arrow_schema(schema)
    }
    if values is not None:
        flat[column] = pa.array(values)
    writer = PartWriter(tmp_path, "train-00000", schema)
    writer.write(pa.table(flat))
    writer.finish()
    footer = pq.ParquetFile(tmp_path / "train-00000.parquet").metadata.row_group(0)
    (found,) = [c for c in map(footer.column, range(footer.num_columns)) if c.path_in_schema == column]
    assert encoding in found.encodings and found.compression == "ZSTD"
    assert ("RLE_DICTIONARY" in found.encodings) == (encoding == "RLE_DICTIONARY")


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
        ({"version": 99}, "format version 99, this Hotrow reads versions 1 to 3"),
        ({"format": "other"}, "not the manifest of a data set"),
        ({"splits": {"train": [{"file": "x"}]}}, "manifest.json was altered"),
        ({"splits": {"train": [{"file": "x"}]}, "version": 2}, "splits.train.0.files: this setting is needed"),
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
