"""The reader gives every sample once, in an order it can find again, whatever the sizes."""

import shutil
import threading

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data import Column, DataSet, DataSetWriter, Reader, Schema
from hotrow.data.ahead import ahead
from hotrow.data.rowgroups import RowGroup
from hotrow.errors import DataError, SettingsError
from old_formats import data_set_of_version_2
from session_logs import GROUPS, grouped, logs

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
    monkeypatch.setattr(Reader, "_load", lambda self, planned: loaded.append(planned.numbers) or real(self, planned))
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
    with pytest.raises(DataError, match="train-00001.parquet was altered"):
        for batch in reader:
            taken += keys_of(batch)
    assert taken == list(range(30))
    assert dataset.samples("train") == 60


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_data_set_that_is_overwritten_while_it_is_read_is_never_mixed_with_what_replaced_it(tmp_path, change):
    dataset = made(tmp_path / "set", 60)
    reader = iter(Reader(dataset, "train", 10, shuffle=False, window=1, threads=0, prefetch=1))
    flat = dataset.flat("train")
    assert keys_of(next(reader)) == list(range(10)) and next(flat).num_rows == 10
    if change == "removed":
        shutil.rmtree(dataset.path)
    else:
        with DataSetWriter(dataset.path, SCHEMA, row_group=10, part=30, overwrite=True) as writer:
            writer.write("train", log(120).slice(60))
    for rest in (reader, flat):
        with pytest.raises(DataError, match=r"set was replaced or removed while it was read. Start again"):
            list(rest)


def test_a_data_set_that_is_copied_to_its_own_place_is_read_on(tmp_path):
    dataset = made(tmp_path / "set", 60)
    reader = iter(Reader(dataset, "train", 10, shuffle=False, window=1, threads=0, prefetch=1))
    assert keys_of(next(reader)) == list(range(10))
    shutil.copytree(dataset.path, tmp_path / "copy")
    shutil.rmtree(dataset.path)
    (tmp_path / "copy").rename(dataset.path)
    assert [keys_of(batch)[0] for batch in reader] == [10, 20, 30, 40, 50]


def expanded(batch):
    """Each sample of a batch as the log has it, by its key k; and that the batch holds nothing else."""
    samples = [{} for _ in range(len(batch))]
    for group in batch.groups:
        count, used = group.unique_size, np.zeros(len(group.values), dtype=bool)
        lengths = np.diff(group.offsets.numpy())
        begins = group.offsets.numpy()[:-1] if group.begins is None else group.begins.numpy()
        inverse = np.arange(count) if group.inverse is None else group.inverse.numpy()
        assert sorted(set(inverse)) == list(range(count))
        for f, name in enumerate(group.features):
            for sample, row in zip(samples, inverse, strict=True):
                at = slice(begins[f * count + row], begins[f * count + row] + lengths[f * count + row])
                sample[name] = group.values[at].tolist()
                used[at] = True
                if group.weights is not None:
                    sample[f"{name}_weights"] = group.weights[at].tolist()
        assert used.all()
    for i, sample in enumerate(samples):
        sample["dense"] = repr(batch.dense[i].tolist())
        sample |= {"y": batch.labels[i].item(), "w": batch.weights[i].item(), "users": batch.users[i].item()}
    return samples


def as_read(log):
    """Each sample of a log as `expanded` gives it."""
    samples = []
    for row in log.to_pylist():
        made = {
            name: row[name] if isinstance(row[name], list) else [row[name]] for name in ("k", "user", "city", "seen")
        }
        made |= {name: row[name] for name in ("rated", "rated_weights", "tags", "marks", "marks_weights", "y", "w")}
        samples.append(made | {"dense": repr([row["price"], row["age"]]), "users": row["user"]})
    return samples


@given(
    log=logs(),
    groups=st.lists(st.sampled_from(GROUPS), unique_by=lambda g: g.name, min_size=1),
    batch_size=st.integers(1, 12),
    world=st.integers(1, 3),
    row_group=st.integers(1, 12),
    window=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_deduplicated_batches_are_the_flat_ones(
    tmp_path_factory, log, groups, batch_size, world, row_group, window, shuffle
):
    readers = {}
    for kind, chosen in (("flat", ()), ("deduplicated", tuple(groups))):
        path = tmp_path_factory.mktemp("set") / kind
        schema = grouped().model_copy(update={"groups": chosen})
        with DataSetWriter(path, schema, row_group=row_group, part=row_group * 2) as writer:
            writer.split("train")
            writer.write("train", log)
        options = {"shuffle": shuffle, "world": world, "window": window, "threads": 0}
        readers[kind] = [Reader(DataSet.open(path), "train", batch_size, rank=r, **options) for r in range(world)]
    want = as_read(log)
    for flat, deduplicated in zip(*readers.values(), strict=True):
        assert len(flat) == len(deduplicated)
        for plain, batch in zip(flat, deduplicated, strict=True):
            samples = expanded(batch)
            assert samples == expanded(plain) == [want[sample["k"][0]] for sample in samples]


def session_set(path, sessions, row_group, groups=GROUPS):
    """A data set whose session s has s % 5 + 1 samples."""
    sizes = [s % 5 + 1 for s in range(sessions)]
    n, session = sum(sizes), np.repeat(np.arange(sessions), sizes)
    flat = {"k": np.arange(n), "s": session, "user": session, "city": session // 2, "t": np.arange(n)}
    flat |= {name: np.zeros(n, np.float32) for name in ("y", "w", "price", "age")}
    for name in ("seen", "rated", "tags", "marks"):
        flat[name] = pa.array([[int(s), int(s) + 1] for s in session], pa.list_(pa.int64()))
        flat[f"{name}_weights"] = pa.array([[1.0, 2.0]] * n, pa.list_(pa.float32()))
    with DataSetWriter(path, grouped(*groups), row_group=row_group) as writer:
        writer.write("train", pa.table(flat))
    return DataSet.open(path), session


def test_sessions_are_shuffled_whole_and_stay_in_their_order(tmp_path):
    dataset, session = session_set(tmp_path / "set", 60, row_group=40)
    epochs = []
    for epoch in (0, 1):
        reader = Reader(dataset, "train", 7, window=2, seed=4)
        reader.seek(epoch)
        epochs.append([k for batch in reader for k in keys_of(batch)])
        order = session[epochs[-1]]
        runs = [k for i, k in enumerate(order) if i == 0 or k != order[i - 1]]
        assert len(runs) == len(set(runs)) == 60 and sorted(epochs[-1]) == list(range(len(session)))
        assert all(b - a == 1 for a, b in zip(epochs[-1], epochs[-1][1:], strict=False) if session[a] == session[b])
    assert epochs[0] != epochs[1] != list(range(len(session)))


def test_a_batch_holds_each_distinct_sample_of_a_session_once(tmp_path):
    dataset, session = session_set(tmp_path / "set", 60, row_group=40)
    for batch in Reader(dataset, "train", 16, seed=1):
        assert [g.features for g in batch.groups] == [
            ("k",),
            ("user",),
            ("city", "seen"),
            ("rated",),
            ("tags",),
            ("marks",),
        ]
        met = len(set(session[keys_of(batch)]))
        assert all(g.unique_size == met for g in batch.groups[1:])
        assert len(batch.group_of("seen").values) == met * 3  # a city and two keys for each session


def test_reading_leaves_out_columns_that_no_batch_needs(tmp_path, monkeypatch):
    dataset, _ = session_set(tmp_path / "set", 10, row_group=40)
    asked = set()
    real = RowGroup.read
    monkeypatch.setattr(
        RowGroup,
        "read",
        lambda self, schema, footers, without: asked.update(without) or real(self, schema, footers, without),
    )
    list(Reader(dataset, "train", 16))
    assert asked == {"t"}
    list(Reader(dataset, "train", 16, shuffle=False))
    assert asked == {"t", "s"}


def test_rows_that_are_not_there_are_named_and_not_read(tmp_path):
    session_set(tmp_path / "set", 10, row_group=40)
    data_set_of_version_2(tmp_path / "set")  # which has no checksums
    dataset = DataSet.open(tmp_path / "set")
    file = dataset.parts("train")[0].files[0].file
    table = pq.read_table(tmp_path / "set" / file)
    at = table.column_names.index("who")
    pq.write_table(
        table.set_column(at, table.schema.field(at), pc.add(table.column(at), 99).cast(pa.int32())), tmp_path / file
    )
    (tmp_path / file).replace(tmp_path / "set" / file)
    with pytest.raises(DataError, match='"who" refers to what its row group does not hold'):
        list(Reader(dataset, "train", 16))


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
