"""The reader gives every sample once, in an order it can find again, whatever the sizes."""

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data import Column, DataSet, DataSetWriter, Reader, Schema
from hotrow.data.ahead import ahead
from hotrow.errors import DataError, SettingsError

SCHEMA = Schema(
    label="y",
    dense=("a", "b"),
    features=(
        Column(name="k"),
        Column(name="recent", kind="keys", table="k", pooling="sequence"),
        Column(name="tags", kind="keys", weights="tag_weights"),
        Column(name="c"),
    ),
    user="k",
    weight="w",
).prepared()


def log(n):
    """Sample i has key i, i % 4 recent keys, (i + 1) % 3 weighted tags."""
    i = np.arange(n)
    return pa.table(
        {
            "y": pa.array((i % 2).astype(np.float32)),
            "a": pa.array(i.astype(np.float32)),
            "b": pa.array(-i.astype(np.float32)),
            "k": pa.array(i),
            "recent": pa.array([list(range(j, j + j % 4)) for j in range(n)], pa.list_(pa.int64())),
            "tags": pa.array([[j] * ((j + 1) % 3) for j in range(n)], pa.list_(pa.int64())),
            "tags_weights": pa.array([[j + 0.5] * ((j + 1) % 3) for j in range(n)], pa.list_(pa.float32())),
            "c": pa.array(i * 7 - 3),
            "w": pa.array(i.astype(np.float32) + 1),
        }
    )


def made(path, n, row_group=10, groups=3):
    with DataSetWriter(path, SCHEMA, row_group=row_group, part=row_group * groups) as writer:
        writer.write("train", log(n))
    return DataSet.open(path)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Data sets by size, made when first asked for."""
    folder, known = tmp_path_factory.mktemp("sets"), {}

    def get(n, row_group=10):
        if (n, row_group) not in known:
            known[n, row_group] = made(folder / f"{n}-{row_group}", n, row_group)
        return known[n, row_group]

    return get


def keys_of(batch):
    return batch["k"].values.tolist()


def check(batch):
    """Every part of a sample is where its key says."""
    keys = batch["k"].values
    assert batch.labels.tolist() == [k % 2 for k in keys]
    assert batch.dense.tolist() == [[k, -k] for k in keys.tolist()]
    assert batch.weights.tolist() == [k + 1 for k in keys.tolist()]
    assert batch.users.tolist() == keys.tolist()
    assert batch["c"].values.tolist() == [k * 7 - 3 for k in keys.tolist()]
    recent, tags = batch["recent"], batch["tags"]
    for i, k in enumerate(keys.tolist()):
        assert recent.values[recent.offsets[i] : recent.offsets[i + 1]].tolist() == list(range(k, k + k % 4))
        assert tags.values[tags.offsets[i] : tags.offsets[i + 1]].tolist() == [k] * ((k + 1) % 3)
        assert tags.weights[tags.offsets[i] : tags.offsets[i + 1]].tolist() == [k + 0.5] * ((k + 1) % 3)


@given(
    n=st.integers(0, 90),
    batch_size=st.integers(1, 40),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    window=st.integers(1, 4),
    threads=st.integers(0, 2),
)
def test_each_sample_comes_once_whatever_the_sizes(sets, n, batch_size, world, shuffle, drop_last, window, threads):
    options = {"shuffle": shuffle, "drop_last": drop_last, "window": window, "threads": threads, "seed": 3}
    readers = [Reader(sets(n), "train", batch_size, rank=r, world=world, **options) for r in range(world)]
    batches = [list(reader) for reader in readers]
    seen = [key for per_rank in batches for batch in per_rank for key in keys_of(batch)]
    assert len(set(seen)) == len(seen)
    assert {len(per_rank) for per_rank in batches} == {len(readers[0])}
    assert len(seen) + readers[0].dropped == n
    assert readers[0].dropped <= (world * batch_size - 1 if drop_last else world - 1)
    for per_rank in batches:
        assert all(len(batch) == batch_size for batch in per_rank[:-1])
        assert all(0 < len(batch) <= batch_size for batch in per_rank)
        for batch in per_rank[:3]:
            check(batch)


@given(n=st.integers(1, 90), world=st.integers(1, 4), per_rank=st.integers(1, 12))
def test_a_step_has_the_same_samples_for_any_number_of_ranks(sets, n, world, per_rank):
    one = [keys_of(b) for b in Reader(sets(n), "train", world * per_rank, seed=5, window=2, threads=0)]
    ranks = [Reader(sets(n), "train", per_rank, seed=5, window=2, threads=0, rank=r, world=world) for r in range(world)]
    steps = [[key for batch in step for key in keys_of(batch)] for step in zip(*ranks, strict=True)]
    assert steps == one[: len(steps)]


@given(n=st.integers(1, 90), batch_size=st.integers(1, 20), world=st.integers(1, 3), data=st.data())
def test_seek_equals_skipping(sets, n, batch_size, world, data):
    options = {"seed": 1, "window": 2, "rank": world - 1, "world": world}
    reader = Reader(sets(n), "train", batch_size, **options)
    epoch = data.draw(st.integers(0, 2))
    skip = data.draw(st.integers(0, len(reader)))
    for _ in range(epoch):
        list(reader)
    whole = [keys_of(b) for b in reader]
    other = Reader(sets(n), "train", batch_size, **options)
    other.seek(epoch, skip)
    if skip < len(reader):
        assert [keys_of(b) for b in other] == whole[skip:]
    assert other.position == (epoch + 1, 0)


def test_seek_reads_nothing_of_what_it_jumps_over(sets, monkeypatch):
    reader = Reader(sets(90), "train", 5, window=1, threads=0, seed=2)
    loaded = []
    real = Reader._load
    monkeypatch.setattr(Reader, "_load", lambda self, groups, rows: loaded.append(groups) or real(self, groups, rows))
    reader.seek(1, 16)
    list(reader)
    assert len(loaded) == 1


def test_the_position_is_that_of_the_next_batch_taken_not_of_the_next_one_read(sets):
    reader = Reader(sets(90), "train", 10, prefetch=4)
    taken = iter(reader)
    next(taken), next(taken)
    assert reader.position == (0, 2)
    resumed = Reader(sets(90), "train", 10)
    resumed.seek(*reader.position)
    assert [keys_of(b) for b in resumed] == [keys_of(b) for b in taken]
    assert reader.position == (1, 0)


def test_epochs_differ_and_seeds_differ_and_order_is_that_of_the_files_without_shuffle(sets):
    reader = Reader(sets(90), "train", 90, window=9)
    orders = [keys_of(next(iter(Reader(sets(90), "train", 90, window=9, seed=s)))) for s in (0, 1)]
    epochs = [keys_of(next(iter(reader))) for _ in range(2)]
    assert orders[0] == epochs[0]
    assert orders[0] != orders[1] and epochs[0] != epochs[1]
    alone = Reader(sets(90, row_group=100), "train", 90)
    assert keys_of(next(iter(alone))) != keys_of(next(iter(alone)))
    plain = Reader(sets(90), "train", 7, shuffle=False)
    assert [k for b in plain for k in keys_of(b)] == list(range(90))


def test_batches_own_their_memory(sets):
    batches = list(Reader(sets(30), "train", 30, shuffle=False, threads=0))
    batches[0].dense.zero_()
    batches[0].groups[0].values.zero_()
    check(next(iter(Reader(sets(30), "train", 30, shuffle=False))))


def test_features_stand_in_the_order_of_the_schema_weighted_ones_apart(sets):
    batch = next(iter(Reader(sets(30), "train", 4)))
    assert [group.features for group in batch.groups] == [("k", "recent", "c"), ("tags",)]
    assert all(group.inverse is None for group in batch.groups)


def test_nulls_are_missing_keys_zeros_and_empty_bags(tmp_path):
    table = pa.table(
        {
            **{name: log(2).column(name) for name in ("y", "b", "c")},
            "w": pa.array([None, 2.0], pa.float32()),
            "a": pa.array([None, 1.0], pa.float32()),
            "k": pa.array([None, 5], pa.int64()),
            "recent": pa.array([None, [1, None]], pa.list_(pa.int64())),
            "tags": pa.array([[4], None], pa.list_(pa.int64())),
            "tags_weights": pa.array([[None], None], pa.list_(pa.float32())),
        }
    )
    with DataSetWriter(tmp_path / "set", SCHEMA) as writer:
        writer.write("train", table)
    for shuffle in (False, True):
        batch = next(iter(Reader(DataSet.open(tmp_path / "set"), "train", 2, shuffle=shuffle)))
        first = batch["k"].values.tolist().index(-1)
        assert batch["k"].values.tolist()[1 - first] == 5
        assert batch.dense[first].tolist()[0] == 0.0 and batch.weights[first] == 1.0
        assert batch["recent"].lengths[first] == 0 and batch["recent"].values.tolist() == [1, -1]
        assert batch["tags"].lengths[1 - first] == 0 and batch["tags"].weights.tolist() == [1.0]


def test_a_part_that_cannot_be_read_is_named_where_the_batch_is_taken(tmp_path):
    dataset = made(tmp_path / "set", 60)
    part = tmp_path / "set" / "train-00001.parquet"
    part.write_bytes(b"\0" * part.stat().st_size)
    reader = Reader(DataSet.open(tmp_path / "set"), "train", 10, shuffle=False, window=1)
    taken = []
    with pytest.raises(DataError, match="train-00001.parquet, row group 0, cannot be read"):
        for batch in reader:
            taken += keys_of(batch)
    assert taken == list(range(30))
    assert dataset.samples("train") == 60


def reader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("hotrow-")]


def test_an_abandoned_reader_leaves_no_thread(sets):
    iterator = iter(Reader(sets(90), "train", 1, threads=2, prefetch=1))
    next(iterator)
    assert reader_threads()
    iterator.close()
    assert not reader_threads()
    for _ in Reader(sets(90), "train", 1, threads=2, prefetch=2):
        break
    assert not reader_threads()


def test_reading_ahead_is_bounded_and_errors_arrive_in_their_place():
    made_so_far, room = [], 3

    def items():
        for i in range(10):
            made_so_far.append(i)
            yield i
        raise DataError("the end")

    stream = ahead(items(), room)
    for i in range(10):
        assert next(stream) == i
        assert len(made_so_far) <= i + 1 + room + 1
    with pytest.raises(DataError, match="the end"):
        next(stream)
    assert not reader_threads()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"rank": 2, "world": 2}, "Rank 2 is not one of 2"),
        ({"prefetch": 0}, "prefetch must be at least 1"),
        ({"split": "tset"}, 'no split "tset"'),
    ],
)
def test_impossible_readers_are_refused(sets, options, said):
    with pytest.raises((SettingsError, DataError), match=said):
        Reader(sets(30), **options)
    with pytest.raises(SettingsError, match="There is no batch 9"):
        Reader(sets(30), "train", 10).seek(0, 9)


def test_a_batch_is_int64_and_float32(sets):
    batch = next(iter(Reader(sets(30), "train", 4)))
    assert batch.dense.dtype == batch.labels.dtype == batch.weights.dtype == torch.float32
    assert batch.users.dtype == batch.groups[0].values.dtype == torch.int64
