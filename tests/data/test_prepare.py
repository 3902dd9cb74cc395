"""Splits are what they say, sessions stand together, what cannot be used is named, a failed prepare leaves nothing."""

import errno

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.data import Column, DataSet, Reader, Schema, prepare
from hotrow.data.parts import PartWriter
from hotrow.data.prepare import order
from hotrow.data.prepare.late import late_rows
from hotrow.data.prepare.memory import memory_limit
from hotrow.data.schema import Repeats
from hotrow.data.sources import source, tabular
from hotrow.data.split import parse_split
from hotrow.errors import DataError, SettingsError
from hotrow.profile import PROFILE, Profile, fingerprint
from hotrow.train.progress import Progress

SCHEMA = Schema(label="y", features=(Column(name="k"),), time="t", user="u")
SESSIONS = SCHEMA.model_copy(update={"session": "s"})
LISTS = Schema(
    label="y", dense=("d",), features=(Column(name="k"), Column(name="h", kind="keys")), session="s", time="t", user="k"
)


def log(path, n, seed=0):
    """Key i at row i; times shuffled, with ties."""
    rng = np.random.default_rng(seed)
    columns = {"y": rng.integers(0, 2, n), "k": np.arange(n), "t": rng.integers(0, max(1, n // 2), n)}
    columns |= {"u": rng.integers(0, 20, n), "s": rng.integers(0, max(1, n // 5), n)}
    pq.write_table(pa.table(columns), path, row_group_size=max(1, n // 3))
    return columns


def session_log(path, n=3000, seed=0):
    """Histories that slide and values that seldom change, in order of time."""
    rng = np.random.default_rng(seed)
    session = rng.integers(0, 40, n) + np.arange(n) // 500 * 1000
    seen = {}
    history = []
    for s, item in zip(session.tolist(), rng.integers(0, 99, n).tolist(), strict=True):
        items = seen.setdefault(s, list(range(s, s + 12)))
        history.append(items[-12:])
        items.append(item)
    columns = {"y": rng.integers(0, 2, n), "d": (session % 7).astype(np.float32), "k": session % 50, "h": history}
    pq.write_table(pa.table(columns | {"s": session, "t": np.arange(n)}), path, row_group_size=max(1, n // 4))


def keys(dataset, split):
    return np.array([k for table in dataset.flat(split) for k in table.column("k").to_pylist()], dtype=np.int64)


def whole(dataset, split):
    return pa.concat_tables(list(dataset.flat(split))).combine_chunks()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("split", ["last:0.2", "time:30", "samples:70", "users:0.3", "none"])
@pytest.mark.parametrize("schema", [SCHEMA, SESSIONS])
def test_every_sample_is_in_one_split_and_the_right_one(tmp_path, split, schema):
    columns = log(tmp_path / "log.parquet", 100)
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split=split, validation=0.25)
    assert dataset.splits == ("train", "validation", "test")
    train, validation, test = (keys(dataset, name) for name in dataset.splits)
    assert sorted([*train, *validation, *test]) == list(range(100))
    t, u = columns["t"], columns["u"]
    if split in ("last:0.2", "time:30", "none"):
        assert t[train].max() < t[validation].min()
        assert len(train) + len(validation) >= 4 * len(train) // 3 and dataset.facts["validation"].startswith("time:")
    if split == "last:0.2":
        assert t[validation].max() < t[test].min()
        assert 20 <= len(test) <= 25
    if split == "time:30":
        assert (t[test] >= 30).all() and (t[validation] < 30).all()
    if split == "samples:70":
        assert sorted(train.tolist()) == list(range(52)) and sorted(test.tolist()) == list(range(70, 100))
    if split == "users:0.3":
        assert not set(u[train]) & set(u[test]) | set(u[train]) & set(u[validation]) | set(u[validation]) & set(u[test])
    if split == "none":
        assert not len(test)
    assert len(validation) and (len(test) or split == "none")
    if schema.session is None:  # the order is the log's
        assert (np.diff(train) > 0).all() and (np.diff(validation) > 0).all() and (np.diff(test) > 0).all()


def test_a_tenth_of_what_is_not_test_is_validation_unless_nothing_is_or_it_is_not_wanted(tmp_path):
    log(tmp_path / "log.parquet", 1000)

    def splits(name, **options):
        dataset = prepare(tmp_path / "log.parquet", tmp_path / name, schema=SCHEMA, **options)
        return {split: dataset.samples(split) for split in dataset.splits}, dataset.facts.get("validation")

    assert splits("a", split="samples:800") == ({"train": 720, "validation": 80, "test": 200}, "samples:720")
    assert splits("b", split="samples:800", validation=0) == ({"train": 800, "test": 200}, None)
    assert splits("c", split="none") == ({"train": 1000, "test": 0}, None)
    assert splits("d", split="samples:3") == ({"train": 3, "test": 997}, None)  # a tenth of three is none
    by_user, how = splits("e", split="users:0.5")
    assert how == "users:0.05" and sum(by_user.values()) == 1000


def test_where_all_is_of_one_time_nothing_is_validation(tmp_path):
    pq.write_table(pa.table({"y": [0.0] * 60, "k": range(60), "t": [5] * 60}), tmp_path / "log.parquet")
    schema = Schema(label="y", features=(Column(name="k"),), time="t")
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="time:9", validation=0.5)
    assert dataset.splits == ("train", "test") and dataset.samples("train") == 60


def test_without_a_time_the_last_samples_are_the_last_in_order(tmp_path):
    log(tmp_path / "log.parquet", 100)
    plain = Schema(label="y", features=(Column(name="k"),))
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=plain, split="last:0.25", validation=0.2)
    assert keys(dataset, "test").tolist() == list(range(75, 100))
    assert keys(dataset, "validation").tolist() == list(range(60, 75))
    assert (dataset.facts["split"], dataset.facts["validation"]) == ("samples:75", "samples:60")


@pytest.mark.parametrize("odd", ["T", "S", "__TIME", "__ROW"])
def test_names_that_differ_only_in_case_are_different_columns(tmp_path, odd):
    table = pa.table({"y": [0.0] * 6, odd: range(100, 94, -1), "t": range(6), "s": [0, 0, 1, 1, 2, 2]})
    pq.write_table(table, tmp_path / "log.parquet")
    schema = Schema(label="y", features=(Column(name=odd),), session="s", time="t")
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="time:3")
    assert whole(dataset, "train").column("t").to_pylist() == [0, 1, 2]
    assert whole(dataset, "test").column(odd).to_pylist() == [97, 96, 95]
    assert dataset.facts["sessions"] == 4  # the second goes on in test


@settings(max_examples=25)
@given(n=st.integers(1, 200), part=st.integers(20, 250), seed=st.integers(0, 5), timed=st.booleans())
def test_all_of_a_session_stands_together_in_order_of_time(tmp_path_factory, n, part, seed, timed):
    folder = tmp_path_factory.mktemp("s")
    columns = log(folder / "log.parquet", n, seed)
    schema = SESSIONS if timed else SESSIONS.model_copy(update={"time": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "SLICE_BYTES", 1)  # a slice for each row group
        dataset = prepare(
            folder / "log.parquet", folder / "out", schema=schema, split="none", part=part, row_group=part
        )
    order = keys(dataset, "train")
    assert sorted(order) == list(range(n))
    sessions, times = columns["s"][order], columns["t"][order] if timed else order
    runs = np.flatnonzero(np.append(True, sessions[1:] != sessions[:-1]))
    assert len(runs) == len(set(sessions))
    assert all((np.diff(times[a:b]) >= 0).all() for a, b in zip(runs, [*runs[1:], n], strict=True))
    assert (np.diff(times[runs]) >= 0).all()
    assert len(dataset.parts("train")) <= -(-n // part)
    assert len(dataset.parts("train")) > 1 or n <= part or len(runs) < 3


def test_what_repeats_is_kept_once_and_comes_back_as_it_was(tmp_path):
    session_log(tmp_path / "log.parquet")
    once = prepare(tmp_path / "log.parquet", tmp_path / "once", schema=LISTS, part=700)
    flat = prepare(tmp_path / "log.parquet", tmp_path / "flat", schema=LISTS, part=700, dedup=False)
    plain = prepare(tmp_path / "log.parquet", tmp_path / "plain", schema=LISTS, cluster=False)
    assert once.schema.groups and any("h" in group.slides for group in once.schema.groups)
    assert flat.schema.groups == plain.schema.groups == ()
    for split in ("train", "test"):
        assert len(once.parts(split)) == len(flat.parts(split))
        assert whole(once, split).equals(whole(flat, split))
        by_time = [("t", "ascending")]
        assert whole(flat, split).sort_by(by_time).equals(whole(plain, split))  # times are the log's order here
    assert len(once.parts("train")) > 2


def test_given_groups_are_taken_as_they_are(tmp_path):
    session_log(tmp_path / "log.parquet", 300)
    given_groups = (Repeats(name="g", columns=("k", "d")),)
    schema = LISTS.model_copy(update={"groups": given_groups})
    assert prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema).schema.groups == given_groups


def test_a_profile_of_the_train_split_is_made_in_passing(tmp_path):
    session_log(tmp_path / "log.parquet")
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=LISTS, part=700)
    made = Profile.load(dataset.path / PROFILE, fingerprint(dataset.parts("train")))
    read = Profile.read(dataset)
    assert made.samples == dataset.samples("train")
    assert made.repetition.columns == read.repetition.columns
    for name, counts in read.keys.items():
        assert made.keys[name].above(1)[1].tolist() == counts.above(1)[1].tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "lst:0.1"}, 'no split "lst:0.1". Did you mean "last"'),
        ({"split": "last:2"}, '"last:2" is not possible'),
        ({"split": "none:5"}, '"none:5" is not possible'),
        ({"split": "samples"}, '"samples" is not possible'),
        ({"bad": "ignore"}, 'no bad "ignore"'),
        ({"late": "drop"}, 'no late "drop"'),
        ({"late": "skip"}, "late = skip needs a session"),
        ({"engine": "spark"}, 'no engine "spark"'),
        ({"format": "cretio"}, 'no format "cretio". Did you mean "criteo"'),
        ({"memory": "lots"}, '"lots" is not a size'),
        ({"memory": "10MB"}, "prepare needs at least"),
        ({"schema": Schema(label="y", dense=("k",)), "split": "users:0.1"}, "needs a user column"),
        ({"schema": Schema(label="y", dense=("k",)), "split": "time:1"}, "needs a time column"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_read(tmp_path, options, said):
    log(tmp_path / "log.parquet", 10)
    with pytest.raises(SettingsError, match=said):
        prepare(tmp_path / "log.parquet", tmp_path / "out", **({"schema": SCHEMA} | options))
    assert names(tmp_path) == ["log.parquet"]


def test_splits_and_sizes_are_read_as_they_are_written():
    for text in ("last:0.1", "time:-5", "samples:0", "users:0.5", "none"):
        assert parse_split(text).text == text
    assert [memory_limit(m) for m in (5, "5", "1kB", "1.5 KiB", "2GiB", "3M")] == [5, 5, 1000, 1536, 2 << 30, 3_000_000]
    assert memory_limit(None) > 0


class Seen(Progress):
    def __init__(self):
        self.stages, self.samples, self.ends = [], 0, []

    def start(self, total, done, what):
        self.stages.append(what)
        self.total, self.samples = total, 0

    def step(self, done, samples, loss):
        self.done = done
        self.samples += samples

    def stop(self):
        self.ends.append((self.done == self.total, self.samples))


def test_progress_ends_at_the_whole(tmp_path):
    log(tmp_path / "log.parquet", 100)
    seen = Seen()
    prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SESSIONS, progress=seen)
    assert seen.stages == ["Converting, MB", "Routing, samples", "Writing, samples"]
    assert seen.ends == [(True, 100)] * 3


@pytest.mark.parametrize("where", [(PartWriter, "write"), (pq.ParquetWriter, "write_table"), (order.Order, "gather")])
def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch, where):
    log(tmp_path / "log.parquet", 100)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*where, full)
    with pytest.raises(DataError, match="The disk is full"):
        prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SESSIONS, split="last:0.5")
    assert names(tmp_path) == ["log.parquet"]


def test_an_output_below_a_file_is_refused_with_a_sentence(tmp_path):
    log(tmp_path / "log.parquet", 10)
    with pytest.raises(DataError, match="could not be written: Not a directory"):
        prepare(tmp_path / "log.parquet", tmp_path / "log.parquet" / "out", schema=SCHEMA)


def test_late_samples_are_sorted_set_aside_or_refused(tmp_path):
    columns = {"y": [0.0] * 6, "k": [0, 1, 2, 3, 4, 5], "s": [1, 1, 2, 1, 2, 1], "t": [5, 9, 1, 7, 1, 8]}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    schema = SESSIONS.model_copy(update={"user": None})
    options = {"schema": schema, "split": "none"}
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "sorted", **options)
    assert keys(dataset, "train").tolist() == [2, 4, 0, 3, 5, 1]
    assert dataset.facts["late"] == {"samples": 2, "were": "sorted by time"}
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "aside", late="skip", **options)
    assert keys(dataset, "train").tolist() == [2, 4, 0, 1]
    assert dataset.facts["late"]["were"] == "set aside"
    with pytest.raises(DataError, match=r"log\.parquet: time runs backwards: 2 samples, the first of them sample 4 "):
        prepare(tmp_path / "log.parquet", tmp_path / "refused", late="refuse", **options)
    assert names(tmp_path) == ["aside", "log.parquet", "sorted"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30))
def test_a_sample_is_late_if_an_earlier_row_of_its_session_has_a_later_time(rows):
    session, time = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    row = np.arange(len(rows))
    by = np.lexsort((row, time, session))
    late = [any(session[j] == session[i] and time[j] > time[i] for j in range(i)) for i in by]
    assert late_rows(session[by], row[by]).tolist() == late


def test_rows_without_a_session_are_refused_set_aside_or_on_their_own(tmp_path):
    table = pa.table({"y": [0.0] * 6, "k": range(6), "s": [7, None, 7, 8, None, 7], "t": [1, 2, 3, 4, 5, 6]})
    pq.write_table(table, tmp_path / "log.parquet")
    options = {"schema": SESSIONS.model_copy(update={"user": None}), "split": "none"}
    with pytest.raises(DataError, match=r'row 2: column "s" holds nothing; every sample needs a session'):
        prepare(tmp_path / "log.parquet", tmp_path / "out", **options)
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "aside", bad="skip", **options)
    assert keys(dataset, "train").tolist() == [0, 2, 5, 3]
    assert dataset.facts["set_aside"]["reasons"] == {'column "s"': 2}
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "alone", bad="missing", **options)
    assert keys(dataset, "train").tolist() == [0, 2, 5, 1, 3, 4]
    assert dataset.facts["taken_as_missing"] == {"s": 2}


def test_samples_without_a_session_share_nothing_with_their_neighbours(tmp_path):
    n = 200
    table = pa.table({"y": [0.0] * n, "k": range(n), "c": [5] * n, "s": pa.nulls(n, pa.int64()), "t": range(n)})
    pq.write_table(table, tmp_path / "log.parquet")
    once = (Repeats(name="g", columns=("c",)),)
    schema = Schema(label="y", features=(Column(name="k"), Column(name="c")), session="s", time="t", groups=once)
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="none", bad="missing")
    assert dataset.facts["sessions"] == n
    for profile in (Profile.load(dataset.path / PROFILE), Profile.of(whole(dataset, "train"), dataset.schema)):
        assert profile.repetition.session_lengths == {1: n} and profile.repetition.groups["g"].rows == n
    orders = []
    for epoch in (0, 1):
        reader = Reader(dataset, "train", n, seed=3)
        reader.seek(epoch)
        orders += [batch["k"].values.tolist() for batch in reader]
    assert orders[0] != orders[1] and all(order != sorted(order) == list(range(n)) for order in orders)


def parquet_folder(path, **files):
    path.mkdir()
    for name, columns in files.items():
        table = columns if isinstance(columns, pa.Table) else pa.table({"y": [0.0, 1.0]} | columns)
        pq.write_table(table, path / f"{name}.parquet")


@pytest.mark.parametrize(
    ("column", "other", "said"),
    [
        ("t", pa.array([1, 2], pa.timestamp("s")), r'b\.parquet: column "t" holds times, but numbers in .*a\.parquet'),
        ("k", ["x", "y"], r'b\.parquet: column "k" holds text, but numbers'),
        ("k", [[1], [2]], r'b\.parquet: column "k" holds lists of numbers, but numbers'),
    ],
)
def test_a_column_that_changes_type_between_files_is_named(tmp_path, column, other, said):
    good = {"k": [1, 2], "t": [3, 4], "u": [5, 6]}
    parquet_folder(tmp_path / "log", a=good, b=good | {column: other}, c=good)
    with pytest.raises(DataError, match=said):
        prepare(tmp_path / "log", tmp_path / "out", schema=SCHEMA)
    dataset = prepare(tmp_path / "log", tmp_path / "out", schema=SCHEMA, bad="skip")
    assert dataset.samples("train") + dataset.samples("test") == 4
    assert dataset.facts["set_aside"]["reasons"] == {f'column "{column}" of another type': 2}
    assert "b.parquet" in dataset.facts["files_set_aside"][0]


def test_integers_with_gaps_are_still_numbers(tmp_path):
    good = {"k": [1, 2], "t": [3, 4], "u": [5, 6]}
    parquet_folder(tmp_path / "log", a=good, b=good | {"k": pa.array([3.0, None])}, c=good | {"k": pa.nulls(2)})
    dataset = prepare(tmp_path / "log", tmp_path / "out", schema=SCHEMA, split="none")
    assert keys(dataset, "train").tolist() == [1, 2, 3, -1, -1, -1]


def test_empty_files_are_named_or_set_aside(tmp_path):
    good = {"k": [1, 2], "t": [3, 4], "u": [5, 6]}
    empty = pa.table({"y": [0.0], "k": [1], "t": [1], "u": [1]}).slice(0, 0)
    parquet_folder(tmp_path / "log", a=good, b=empty)
    with pytest.raises(DataError, match=r"b\.parquet has no rows\. .*--bad skip"):
        prepare(tmp_path / "log", tmp_path / "out", schema=SCHEMA)
    (tmp_path / "log" / "c.parquet").write_bytes(b"")
    dataset = prepare(tmp_path / "log", tmp_path / "out", schema=SCHEMA, bad="skip")
    assert [line.split("/")[-1].split(".")[0] for line in dataset.facts["files_set_aside"]] == ["b", "c"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.csv").write_text("y,k,t,u\n1,2,3,4\n")
    (tmp_path / "text" / "b.csv").write_text("y,k,t,u\n\n")
    (tmp_path / "text" / "c.csv").write_text("")
    with pytest.raises(DataError, match=r"b\.csv has no lines after its header"):
        prepare(tmp_path / "text", tmp_path / "two", schema=SCHEMA, split="none")
    dataset = prepare(tmp_path / "text", tmp_path / "two", schema=SCHEMA, split="none", bad="skip")
    assert dataset.samples("train") == 1 and len(dataset.facts["files_set_aside"]) == 2


def test_a_corrupt_page_is_named_or_its_rows_are_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "CHUNK_ROWS", 100)
    rng = np.random.default_rng(0)
    columns = {"y": np.zeros(3000), "k": rng.integers(0, 1 << 60, 3000), "t": np.arange(3000), "u": np.arange(3000)}
    file = tmp_path / "log.parquet"
    pq.write_table(pa.table(columns), file, row_group_size=1000, use_dictionary=False, write_page_checksum=True)
    at = pq.ParquetFile(file).metadata.row_group(1).column(1).data_page_offset + 500
    content = bytearray(file.read_bytes())
    content[at] ^= 255
    file.write_bytes(content)
    with pytest.raises(DataError, match=r'rows 1001 to 2000 \(row group 2\): column "k" cannot be read: .*'):
        prepare(file, tmp_path / "out", schema=SCHEMA, split="none")
    dataset = prepare(file, tmp_path / "out", schema=SCHEMA, split="none", bad="skip")
    assert whole(dataset, "train").column("t").to_pylist() == [*range(1000), *range(2000, 3000)]
    assert dataset.facts["set_aside"]["rows"] == 1000
    assert dataset.facts["set_aside"]["reasons"] == {"unreadable page": 1000}


def test_text_in_parquet_that_is_not_utf8_is_named_or_its_rows_are_set_aside(tmp_path):
    offsets = np.array([0, 1, 2, 3], np.int32)
    text = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"a\xffb")])
    table = pa.table({"y": [0.0] * 3, "k": text, "t": range(3), "u": range(3)})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=1)
    with pytest.raises(DataError, match=r'rows 2 to 2 \(row group 2\): column "k" cannot be read: .*UTF8'):
        prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA, split="none")
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA, split="none", bad="skip")
    assert whole(dataset, "train").column("t").to_pylist() == [0, 2]


def test_events_of_any_cut_have_the_same_histories(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    lines = [
        f"{rng.integers(0, 30)}::{rng.integers(0, 50)}::{rng.integers(1, 6)}::{rng.integers(0, 99)}" for _ in range(500)
    ]
    (tmp_path / "log.dat").write_text("\n".join(lines) + "\n")
    one = prepare(tmp_path / "log.dat", tmp_path / "one", split="samples:400")
    monkeypatch.setattr(source, "SLICE_BYTES", 700)
    from hotrow.data.prepare import begins

    monkeypatch.setattr(begins, "BUCKET_BYTES", 10_000)
    many = prepare(tmp_path / "log.dat", tmp_path / "many", split="samples:400", part=90)
    assert len(many.parts("train")) > 3
    assert [one.samples(split) for split in one.splits] == [360, 40, 100]
    for split in one.splits:
        assert whole(one, split).equals(whole(many, split))
    times = np.concatenate([whole(one, split).column("time").to_numpy() for split in one.splits])
    assert (np.diff(times) >= 0).all()


def test_events_without_a_user_are_refused_set_aside_or_without_a_history(tmp_path):
    lines = ["user,item,rating,time", "1,10,5,1", ",11,5,2", ",12,5,3", "1,13,1,4", ",14,5,5"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r'log\.csv:3: column "user" holds nothing; every event needs a user'):
        prepare(tmp_path / "log.csv", tmp_path / "out", split="none")
    skipped = prepare(tmp_path / "log.csv", tmp_path / "skipped", split="none", bad="skip")
    assert whole(skipped, "train").column("history").to_pylist() == [[], [10]]
    alone = prepare(tmp_path / "log.csv", tmp_path / "alone", split="none", bad="missing")
    assert whole(alone, "train").column("user").to_pylist() == [1, -1, -1, 1, -1]
    assert whole(alone, "train").column("history").to_pylist() == [[], [], [], [10], []]


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
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="none", part=30_000)
    assert isinstance(dataset, DataSet) and len(dataset.parts("train")) == 4
    sessions = whole(dataset, "train").column("session").to_numpy()
    assert len(sessions) == len(clicks)
    assert (np.diff(sessions) != 0).sum() + 1 == len(np.unique(sessions)) == dataset.facts["sessions"]
