"""Splits are what they say, sessions stand together, and a failed prepare leaves nothing."""

import errno

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data import Column, DataSetWriter, Schema, prepare
from hotrow.data.split import parse_split
from hotrow.errors import DataError, SettingsError

SCHEMA = Schema(label="y", features=(Column(name="k"),), time="t", user="u")
SESSIONS = SCHEMA.model_copy(update={"session": "s"})


def log(path, n, seed=0):
    """Key i at row i; times shuffled, with ties."""
    rng = np.random.default_rng(seed)
    columns = {"y": rng.integers(0, 2, n), "k": np.arange(n), "t": rng.integers(0, max(1, n // 2), n)}
    columns |= {"u": rng.integers(0, 20, n), "s": rng.integers(0, max(1, n // 5), n)}
    pq.write_table(pa.table(columns), path)
    return columns


def keys(dataset, split):
    found = [k for p in dataset.parts(split) for k in pq.read_table(dataset.path / p.file).column("k").to_pylist()]
    return np.array(found, dtype=np.int64)


@pytest.mark.parametrize("split", ["last:0.2", "time:30", "samples:70", "users:0.3", "none"])
def test_every_sample_is_in_one_split_and_the_right_one(tmp_path, split):
    columns = log(tmp_path / "log.parquet", 100)
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA, split=split)
    train, test = keys(dataset, "train"), keys(dataset, "test")
    assert sorted([*train, *test]) == list(range(100))
    t, u = columns["t"], columns["u"]
    if split == "last:0.2":
        assert t[train].max() < t[test].min()
        assert 20 <= len(test) <= 25
    if split == "time:30":
        assert (t[test] >= 30).all() and (t[train] < 30).all()
    if split == "samples:70":
        assert train.tolist() == list(range(70))
    if split == "users:0.3":
        assert set(u[train]) & set(u[test]) == set() and len(test)
    if split == "none":
        assert not len(test)


def test_without_a_time_the_last_samples_are_the_last_in_order(tmp_path):
    log(tmp_path / "log.parquet", 100)
    plain = Schema(label="y", features=(Column(name="k"),))
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=plain, split="last:0.25")
    assert keys(dataset, "test").tolist() == list(range(75, 100))
    assert dataset.facts["split"] == "samples:75"


@given(n=st.integers(1, 200), window=st.integers(1, 300), seed=st.integers(0, 5))
def test_sessions_stand_together_within_a_window(tmp_path_factory, n, window, seed):
    folder = tmp_path_factory.mktemp("s")
    columns = log(folder / "log.parquet", n, seed)
    dataset = prepare(folder / "log.parquet", folder / "out", schema=SESSIONS, split="none", window=window)
    order = keys(dataset, "train")
    assert sorted(order) == list(range(n))
    for at in range(0, n, window):
        part = order[at : at + window]
        assert sorted(part) == list(range(at, min(at + window, n)))
        sessions, times = columns["s"][part], columns["t"][part]
        runs = np.flatnonzero(np.append(True, sessions[1:] != sessions[:-1]))
        assert len(runs) == len(set(sessions))
        assert all((np.diff(times[a:b]) >= 0).all() for a, b in zip(runs, [*runs[1:], len(part)], strict=True))
        assert (np.diff(times[runs]) >= 0).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "lst:0.1"}, 'no split "lst:0.1". Did you mean "last"'),
        ({"split": "last:2"}, '"last:2" is not possible'),
        ({"split": "none:5"}, '"none:5" is not possible'),
        ({"split": "samples"}, '"samples" is not possible'),
        ({"bad": "ignore"}, 'no bad "ignore"'),
        ({"format": "cretio"}, 'no format "cretio". Did you mean "criteo"'),
        ({"schema": Schema(label="y", dense=("k",)), "split": "users:0.1"}, "needs a user column"),
        ({"schema": Schema(label="y", dense=("k",)), "split": "time:1"}, "needs a time column"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_read(tmp_path, options, said):
    log(tmp_path / "log.parquet", 10)
    with pytest.raises(SettingsError, match=said):
        prepare(tmp_path / "log.parquet", tmp_path / "out", **({"schema": SCHEMA} | options))
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_splits_are_written_as_they_are_read():
    for text in ("last:0.1", "time:-5", "samples:0", "users:0.5", "none"):
        assert parse_split(text).text == text


def test_progress_ends_at_the_whole(tmp_path):
    log(tmp_path / "log.parquet", 100)
    seen = []
    prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA, progress=lambda *d: seen.append(d))
    size = (tmp_path / "log.parquet").stat().st_size
    assert seen[-1] == (100, size, size)


@pytest.mark.parametrize("split", ["last:0.5", "none"])
def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch, split):
    log(tmp_path / "log.parquet", 100)

    def full(self, split, samples):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DataSetWriter, "write", full)
    with pytest.raises(DataError, match="The disk is full"):
        prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA, split=split)
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_a_disk_that_fills_up_while_spooling_leaves_nothing_behind(tmp_path, monkeypatch):
    log(tmp_path / "log.parquet", 100)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", full)
    with pytest.raises(DataError, match="The disk is full"):
        prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA, split="last:0.5")
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_real_sessions_stand_together(shared_data, tmp_path):
    clicks = pq.ParquetFile(shared_data / "globo.parquet").read_row_group(0).slice(0, 100_000)
    clicks = clicks.append_column("label", pa.array(np.ones(len(clicks), np.float32)))
    pq.write_table(clicks, tmp_path / "log.parquet")
    schema = Schema(
        label="label",
        features=(Column(name="user", column="user_id"), Column(name="item", column="click_article_id")),
        session="session",
        time="click_timestamp",
        user="user_id",
    )
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="none")
    table = pa.concat_tables([pq.read_table(dataset.path / p.file) for p in dataset.parts("train")])
    sessions = table.column("session").to_numpy()
    assert len(sessions) == len(clicks)
    assert (np.diff(sessions) != 0).sum() + 1 == len(np.unique(sessions))
