"""Each kind of log is read as its description says, and what is wrong in it is refused with its place."""

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data import Column, Schema, prepare
from hotrow.data.columns import floats, key_lists, keys, times, weight_lists
from hotrow.data.convert import BadRows
from hotrow.data.schema import hash_text, key_of_text
from hotrow.data.sources import Avazu, Criteo, Events, find_source, source, text
from hotrow.errors import DataError, SettingsError

SAMPLES = Path(__file__).parent / "samples"


def table_of(dataset, split="train"):
    parts = list(dataset.flat(split))
    return pa.concat_tables(parts).combine_chunks() if parts else None


def usable(path, schema):
    return find_source(path, "table", schema).source().usable(BadRows())


def prepared(source, tmp_path, **options):
    return table_of(prepare(source, tmp_path / "out", split="none", **options))


def test_the_kind_of_a_log_is_told_by_its_first_line():
    kinds = {"criteo.tsv": Criteo, "avazu.csv": Avazu, "ratings.dat": Events, "ratings.csv": Events}
    for name, kind in kinds.items():
        assert type(find_source(SAMPLES / name).source()) is kind
    with pytest.raises(SettingsError, match="does not say what its columns mean"):
        find_source(SAMPLES.parent / "test_sources.py")


def test_criteo_is_logarithms_and_hexadecimal_numbers(tmp_path):
    table = prepared(SAMPLES / "criteo.tsv", tmp_path)
    lines = [line.split("\t") for line in (SAMPLES / "criteo.tsv").read_text().splitlines()]
    assert len(table) == len(lines)
    for i, line in enumerate(lines):
        row = table.slice(i, 1).to_pylist()[0]
        assert row["label"] == float(line[0])
        for j, cell in enumerate(line[1:14], start=1):
            assert row[f"I{j}"] == pytest.approx(np.log1p(max(int(cell or 0), 0)), rel=1e-6)
        for j, cell in enumerate(line[14:], start=1):
            assert row[f"C{j}"] == (int(cell, 16) if cell else -1)


def test_packed_and_plain_files_give_the_same_however_they_are_cut(tmp_path, monkeypatch):
    plain = prepared(SAMPLES / "criteo.tsv", tmp_path / "a")
    content = (SAMPLES / "criteo.tsv").read_bytes()
    (tmp_path / "log.tsv.gz").write_bytes(gzip.compress(content))
    (tmp_path / "log.tsv.zst").write_bytes(pa.compress(content, "zstd", asbytes=True))
    assert prepared(tmp_path / "log.tsv.gz", tmp_path / "b").equals(plain)
    monkeypatch.setattr(text, "BLOCK", 300)
    for size in (997,):
        monkeypatch.setattr(source, "SLICE_BYTES", size)
        for name in ("log.tsv.gz", "log.tsv.zst"):
            assert prepared(tmp_path / name, tmp_path / f"{name}{size}").equals(plain)
        assert prepared(SAMPLES / "criteo.tsv", tmp_path / f"plain{size}").equals(plain)


def test_avazu_has_time_and_hashed_text(tmp_path):
    table = prepared(SAMPLES / "avazu.csv", tmp_path)
    header, *lines = [line.split(",") for line in (SAMPLES / "avazu.csv").read_text().splitlines()]
    assert "id" not in table.column_names and "hour" not in table.column_names
    for row, line in zip(table.to_pylist(), lines, strict=True):
        cells = dict(zip(header, line, strict=True))
        when = datetime.strptime(cells["hour"], "%y%m%d%H").replace(tzinfo=UTC)
        assert (row["time"], row["hour_of_day"], row["day_of_week"]) == (when.timestamp(), when.hour, when.weekday())
        assert row["click"] == float(cells["click"])
        for name in header[3:]:
            assert row[name] == key_of_text(cells[name])


@pytest.mark.parametrize("name", ["ratings.dat", "ratings.csv"])
def test_events_get_the_history_that_a_plain_loop_gives(tmp_path, name):
    table = prepared(SAMPLES / name, tmp_path, history=4, threshold=3)
    events = [tuple(map(int, line.split("::"))) for line in (SAMPLES / "ratings.dat").read_text().splitlines()]
    seen, expected = {}, []
    for user, item, rating, time in sorted(events, key=lambda e: e[3]):
        expected.append((float(rating >= 3), user, item, seen.get(user, [])[-4:], time))
        seen.setdefault(user, []).append(item)
    got = [tuple(row[n] for n in ("label", "user", "item", "history", "time")) for row in table.to_pylist()]
    assert got == expected


def criteo_with(line, cell, value):
    lines = [text.split("\t") for text in (SAMPLES / "criteo.tsv").read_text().splitlines()]
    lines[line - 1][cell] = value
    return "\n".join("\t".join(cells) for cells in lines) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.tsv", criteo_with(7, 3, "h12eca"), r'c\.tsv:7: column "I3" holds \'h12eca\'; it takes an integer'),
        ("c.tsv", criteo_with(9, 20, "xyz"), r'c\.tsv:9: column "C7" holds \'xyz\'; it takes a hexadecimal'),
        ("c.tsv", criteo_with(3, 0, ""), r'c\.tsv:3: column "label" holds nothing; a label is a number from 0 to 1'),
        ("c.tsv", criteo_with(4, 0, "nan"), r"c\.tsv:4: column \"label\" holds 'nan'"),
        ("c.tsv", criteo_with(5, 0, "2"), r"c\.tsv:5: column \"label\" holds '2'"),
        ("c.tsv", criteo_with(40, 39, "aa\tbb"), r"c\.tsv:40: expected 40 cells, found 41"),
        ("c.tsv", criteo_with(1, 5, "1")[:-200], r"c\.tsv:40: expected 40 cells, found"),
        ("a.csv", "id,click,hour,C1\n1,0,14102100,1\n2,1,14109900,1\n", r"a\.csv:3: column \"hour\" holds '14109900'"),
        ("a.csv", "id,click,hour,C1\n", r"a\.csv has no lines after its header"),
        ("r.csv", "userId,movieId,rating,timestamp\n1,2,good,5\n", r"r\.csv:2: column \"rating\" holds 'good'"),
        ("r.dat", "1::2::3::4\n1::2::3\n", r"r\.dat:2: expected 4 cells, found 3"),
        ("r.dat", "1::2::3::4\n1::2::3::x\n", r'r\.dat:2: column "time" holds \'x\'; a time is an integer'),
        ("r.dat", "", r"r\.dat is empty"),
    ],
)
def test_a_fault_is_refused_with_its_place(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        prepare(tmp_path / name, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("cut", [1 << 20, 50, 7])
def test_lines_are_counted_over_slices_blocks_blank_lines_and_files(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(text, "BLOCK", 16)
    monkeypatch.setattr(source, "SLICE_BYTES", cut)
    folder = tmp_path / "log"
    folder.mkdir()
    schema = Schema(label="y", features=(Column(name="k"),))
    (folder / "a.csv").write_text("y,k\r\n1,2\r\n\r\n0,3\r\n")
    (folder / "b.csv").write_text("y,k\n\n\n" + "1,5\n" * 30 + "7,5\n")
    with pytest.raises(DataError, match=r"b\.csv:34: column \"y\" holds '7'"):
        prepare(folder, tmp_path / "out", schema=schema)
    (folder / "b.csv").write_text("k,y\n" + "5,1\n\n" * 30 + "5")
    with pytest.raises(DataError, match=r"b\.csv:62: expected 2 cells, found 1"):
        prepare(folder, tmp_path / "out", schema=schema)
    (folder / "b.csv").write_text("k,y\n" + "5,1\n\n" * 30 + "6,0")
    table = prepared(folder, tmp_path, schema=schema)
    assert table.column("k").to_pylist() == [2, 3] + [5] * 30 + [6]


def test_bad_rows_can_be_set_aside_and_are_counted(tmp_path):
    text = criteo_with(7, 3, "h12eca").splitlines()
    text[1] = text[1] + "\tmore"
    text[9] = "5" + text[9][1:]
    (tmp_path / "c.tsv").write_text("\n".join(text) + "\n")
    dataset = prepare(tmp_path / "c.tsv", tmp_path / "out", split="none", bad="skip")
    assert dataset.samples("train") == 37
    aside = dataset.facts["set_aside"]
    assert aside["rows"] == 3
    assert [next(n for n in (2, 7, 10) if f"c.tsv:{n}:" in e) for e in aside["examples"]] == [2, 7, 10]
    good = table_of(prepare(SAMPLES / "criteo.tsv", tmp_path / "good", split="none"))
    kept = [i for i in range(40) if i not in (1, 6, 9)]
    assert table_of(dataset).equals(good.take(kept))


def test_bad_cells_can_count_as_missing_but_labels_cannot(tmp_path):
    (tmp_path / "c.tsv").write_text(criteo_with(7, 3, "h12eca"))
    (tmp_path / "empty.tsv").write_text(criteo_with(7, 3, ""))
    assert prepared(tmp_path / "c.tsv", tmp_path / "a", bad="missing").equals(
        prepared(tmp_path / "empty.tsv", tmp_path / "b")
    )
    (tmp_path / "c.tsv").write_text(criteo_with(7, 0, "x"))
    with pytest.raises(DataError, match=r"c\.tsv:7: column \"label\""):
        prepare(tmp_path / "c.tsv", tmp_path / "out", bad="missing")


def test_a_log_of_nothing_but_bad_rows_is_refused(tmp_path):
    (tmp_path / "l.csv").write_text("y,k\n5,1\n6,1\n")
    with pytest.raises(DataError, match="no sample is left: all 2 rows"):
        prepare(
            tmp_path / "l.csv", tmp_path / "out", schema=Schema(label="y", features=(Column(name="k"),)), bad="skip"
        )
    assert [p.name for p in tmp_path.iterdir()] == ["l.csv"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_truncated_packed_file_is_named(tmp_path, ending):
    content = (SAMPLES / "criteo.tsv").read_bytes()
    packed = gzip.compress(content) if ending == ".gz" else pa.compress(content, "zstd", asbytes=True)
    file = tmp_path / f"c.tsv{ending}"
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"c\.tsv\{ending} cannot be read to its end.*cut short"):
        prepare(file, tmp_path / "out", format="criteo")
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


RICH = Schema(
    label="y",
    dense=("d",),
    features=(
        Column(name="item", column="iid"),
        Column(name="tags", kind="keys", weights="tw", max_length=2),
        Column(name="words", kind="keys", separator="|"),
    ),
    session="sid",
    time="t",
    user="uid",
    weight="w",
)


def test_csv_and_parquet_of_the_same_log_are_the_same_data_set(tmp_path):
    (tmp_path / "log.csv").write_text(
        "y,d,iid,tags,tw,words,sid,t,uid,w,unused\n"
        '1,0.5,7,1 2 3,0.1 0.2 0.3,a|b,s1,10,"u,1",2,x\n'
        "0,,abc,,,,s2,20,u2,1,x\n"
        "0.25,1e3,,-9,1,c,s1,30,u1,0,x\n"
    )
    rows = pa.table(
        {
            "y": pa.array([True, False, None]),
            "d": pa.array([0.5, None, 1000], pa.float64()),
            "iid": pa.array(["7", "abc", None]).dictionary_encode(),
            "tags": pa.array([[1, 2, 3], None, [-9]], pa.large_list(pa.int32())),
            "tw": pa.array([[0.1, 0.2, 0.3], [], [1]], pa.list_(pa.float64())),
            "words": pa.array([["a", "b"], [], ["c"]]),
            "sid": ["s1", "s2", "s1"],
            "t": pa.array([10, 20, 30], pa.timestamp("us")),
            "uid": ["u,1", "u2", "u1"],
            "w": pa.array([2, 1, 0], pa.uint8()),
        }
    )
    rows = rows.set_column(0, "y", pa.array([1, 0, 0.25]))
    pq.write_table(rows, tmp_path / "log.parquet")
    one = prepared(tmp_path / "log.csv", tmp_path / "a", schema=RICH)
    two = prepared(tmp_path / "log.parquet", tmp_path / "b", schema=RICH)
    assert one.equals(two)
    assert one.to_pylist() == [
        {
            "y": 1.0,
            "d": 0.5,
            "item": 7,
            "tags": [2, 3],
            "tags_weights": [np.float32(0.2), np.float32(0.3)],
            "words": [hash_text("a"), hash_text("b")],
            "sid": hash_text("s1"),
            "t": 10,
            "uid": hash_text("u,1"),
            "w": 2.0,
        },
        {
            "y": 0.25,
            "d": 1000.0,
            "item": -1,
            "tags": [-9],
            "tags_weights": [1.0],
            "words": [hash_text("c")],
            "sid": hash_text("s1"),
            "t": 30,
            "uid": hash_text("u1"),
            "w": 0.0,
        },
        {
            "y": 0.0,
            "d": 0.0,
            "item": hash_text("abc"),
            "tags": [],
            "tags_weights": [],
            "words": [],
            "sid": hash_text("s2"),
            "t": 20,
            "uid": hash_text("u2"),
            "w": 1.0,
        },
    ]


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("y", [0.0, float("nan")], r'row 2: column "y" holds nan; a label'),
        ("y", [0.0, -0.1], r'row 2: column "y" holds -0.1'),
        ("y", [[1], [0]], r'row 1: column "y" holds \[1\]; a label is a number'),
        ("d", [0.0, float("inf")], r'row 2: column "d" holds inf; a dense value is a finite number'),
        ("d", ["1", "one"], r"row 2: column \"d\" holds 'one'"),
        ("iid", [1.0, 1.5], r'row 2: column "iid" holds 1.5; a key is an integer or a text'),
        ("iid", [{"a": 1}, {"a": 2}], r"row 1: column \"iid\" holds"),
        ("tags", [1, 2], r'row 1: column "tags" holds 1; it takes a list of keys for each sample'),
        ("tw", [[1.0], [1.0, 2.0]], r'row 2: column "tw" holds \[1.0, 2.0\]; it takes a finite number for each key'),
        ("tw", [[1.0], [float("nan")]], r'row 2: column "tw" holds \[nan\]'),
        ("t", [1, None], r'row 2: column "t" holds nothing; a time'),
        ("w", [1.0, -1.0], r'row 2: column "w" holds -1.0; a sample\'s weight'),
        ("y", [0, 1 << 60], r'row 2: column "y" holds 1152921504606846976; a label'),
        ("d", [1, -(1 << 53) - 1], r'row 2: column "d" holds -9007199254740993; a dense value .* at most 2\^53'),
        ("d", ["1", "9007199254740993"], r"row 2: column \"d\" holds '9007199254740993'; a dense value"),
        ("w", [1, 1 << 54], r'row 2: column "w" holds 18014398509481984; a sample\'s weight'),
        ("tw", [[1], [1 << 54]], r'row 2: column "tw" holds \[18014398509481984\]; it takes a finite number'),
        ("t", pa.array([1, 1 << 63], pa.uint64()), r'row 2: column "t" holds 9223372036854775808; a time'),
    ],
)
def test_a_wrong_value_in_parquet_is_refused_with_column_and_row(tmp_path, column, values, said):
    good = {"y": [0, 1], "d": [0.0, 1.0], "iid": [1, 2], "tags": [[1], [2]], "tw": [[1.0], [1.0]], "w": [1, 1]}
    good |= {"words": [["a"], ["b"]], "sid": [1, 1], "t": [1, 2], "uid": [1, 2]}
    pq.write_table(pa.table(good | {column: values}), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=rf"log\.parquet, {said}"):
        prepare(tmp_path / "log.parquet", tmp_path / "out", schema=RICH)
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_a_missing_column_is_named_with_the_nearest(tmp_path):
    schema = Schema(label="click", features=(Column(name="user"),))
    pq.write_table(pa.table({"clicks": [1], "user": [1]}), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r'log\.parquet: there is no column "click"\. Did you mean "clicks"\?'):
        usable(tmp_path / "log.parquet", schema)
    (tmp_path / "log.csv").write_text("click,users\n1,2\n")
    with pytest.raises(DataError, match=r'log\.csv: there is no column "user"\. Did you mean "users"\?'):
        usable(tmp_path / "log.csv", schema)
    (tmp_path / "twice.csv").write_text("click,user,user\n1,2,3\n")
    with pytest.raises(DataError, match=r'twice\.csv:1: the header has the column "user" twice'):
        prepare(tmp_path / "twice.csv", tmp_path / "out", schema=schema)


def test_a_column_that_stands_twice_in_parquet_is_named(tmp_path):
    twice = pa.Table.from_arrays([pa.array([0.0]), pa.array([1]), pa.array([2])], names=["y", "k", "k"])
    pq.write_table(twice, tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r'log\.parquet: there are two columns "k"'):
        usable(tmp_path / "log.parquet", Schema(label="y", features=(Column(name="k"),)))
    usable(tmp_path / "log.parquet", Schema(label="y", dense=("y",)))


@pytest.mark.parametrize(("name", "value"), [("split", 5), ("facts", [])])
def test_what_the_maker_of_a_log_says_wrong_is_named(tmp_path, name, value):
    (tmp_path / "log.csv").write_text("y,k\n1,2\n")
    (tmp_path / "log.json").write_text(json.dumps({name: value}))
    with pytest.raises(SettingsError, match=rf"log\.json\.{name}: input should be a valid"):
        find_source(tmp_path, "table", Schema(label="y", features=(Column(name="k"),)))


def test_files_that_are_no_log_are_named(tmp_path):
    schema = Schema(label="y", features=(Column(name="k"),))
    with pytest.raises(DataError, match="There is no .*nowhere"):
        find_source(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no file"):
        usable(tmp_path, schema)
    pq.write_table(pa.table({"y": [1.0], "k": [1]}), tmp_path / "log.parquet")
    whole = (tmp_path / "log.parquet").read_bytes()
    (tmp_path / "log.parquet").write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"log\.parquet is not a whole Parquet file"):
        usable(tmp_path / "log.parquet", schema)
    pq.write_table(pa.table({"y": pa.array([], pa.float32()), "k": pa.array([], pa.int64())}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"e\.parquet has no rows"):
        usable(tmp_path / "e.parquet", schema)
    (tmp_path / "b.csv").write_bytes(b"y,k\n1,2\n1,\xff\xfe\n")
    with pytest.raises(DataError, match=r"b\.csv:3: this is not a line of text in UTF-8"):
        prepare(tmp_path / "b.csv", tmp_path / "out", schema=schema)
    with pytest.raises(DataError, match="both Parquet and text"):
        usable(tmp_path, schema)
    with pytest.raises(SettingsError, match="has its own schema"):
        find_source(SAMPLES / "criteo.tsv", "criteo", schema)


def test_keys_of_every_integer_type_keep_their_value():
    for kind in (pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64()):
        assert keys(pa.array([0, 1, None, 127], kind))[0].to_pylist() == [0, 1, -1, 127]
    assert keys(pa.array([1 << 63, (1 << 64) - 2], pa.uint64()))[0].to_pylist() == [-(1 << 63), -2]
    assert keys(pa.array([1.0, None, float("nan"), -(2.0**40)]))[0].to_pylist() == [1, -1, -1, -(1 << 40)]
    assert keys(pa.array([True, None]))[0].to_pylist() == [1, -1]
    assert keys(pa.nulls(2))[0].to_pylist() == [-1, -1]


def test_lists_of_every_form_are_read():
    feature = Column(name="f", kind="keys", separator=",")
    for given in (
        pa.array([[1, 2], [], None], pa.list_(pa.int16())),
        pa.array([[1, 2], [], None], pa.large_list(pa.int64())),
        pa.array(["1,2", "", None]),
        pa.array(["1,2,", ",", None], pa.large_string()),
    ):
        made, wrong = key_lists(given, feature)
        assert made.to_pylist() == [[1, 2], [], []] and wrong is None
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    assert key_lists(fixed[1:], feature)[0].to_pylist() == [[3, 4]]
    assert key_lists(pa.nulls(2), feature)[0].to_pylist() == [[], []]
    made, wrong = weight_lists(pa.array([[1.0], None]), feature, key_lists(pa.array([[1], [2]]), feature)[0])
    assert made.to_pylist() == [[1.0], [1.0]] and wrong.tolist() == [False, True]


def test_times_are_integers_or_microseconds():
    stamp = datetime(2020, 1, 1, tzinfo=UTC)
    assert times(pa.array([stamp]))[0].to_pylist() == [1577836800000000]
    assert times(pa.array([stamp.replace(tzinfo=None)], pa.timestamp("ns")))[0].to_pylist() == [1577836800000000]
    assert times(pa.array([stamp.date()]))[0].to_pylist() == [1577836800000000]
    nanoseconds, most = 1_700_000_000_000_000_000, (1 << 63) - 1
    spelled = times(pa.array(["-5", "+6", f"{nanoseconds}", f"{most}", f"{-most - 1}"]))
    assert spelled[0].to_pylist() == [-5, 6, nanoseconds, most, -most - 1] and spelled[1] is None
    assert times(pa.array([f"{most + 1}", f"{-most - 2}", None, "", "0x1", "7"]))[1].tolist() == [True] * 5 + [False]
    assert times(pa.array([3.0, 4.5]))[1].tolist() == [False, True]


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ms"), pa.date32(), pa.date64()])
def test_times_beyond_an_int64_of_microseconds_are_at_fault_and_do_not_wrap(kind):
    far = pa.array([1, (1 << (31 if pa.types.is_date32(kind) else 63)) - 1, None], pa.int64())
    days = far.cast(pa.int32()) if pa.types.is_date32(kind) else far
    made, wrong = times(days.cast(kind))
    assert made[0].as_py() > 0 and wrong.tolist() == [False, True, True]


@pytest.mark.parametrize(("bad", "left"), [("skip", [1.0, 3.0]), ("missing", [1.0, 0.0, 3.0])])
@pytest.mark.parametrize("values", [[1, (1 << 53) + 1, 3], pa.array([1, (1 << 64) - 1, 3], pa.uint64())])
def test_an_integer_that_no_float_holds_is_set_aside_or_taken_as_missing(tmp_path, bad, left, values):
    pq.write_table(pa.table({"y": [0, 1, 0], "d": values, "k": [1, 2, 3]}), tmp_path / "log.parquet")
    schema = Schema(label="y", dense=("d",), features=(Column(name="k"),))
    made = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="none", bad=bad)
    assert table_of(made).column("d").to_pylist() == left
    facts = {"skip": made.facts.get("set_aside", {}).get("rows"), "missing": made.facts.get("taken_as_missing")}
    assert facts[bad] == (1 if bad == "skip" else {"d": 1})


def test_views_of_text_are_read_as_text(tmp_path):
    columns = {
        "y": ["0", "1", "x"],
        "d": ["1", " 2", "3"],
        "k": ["a", "7", ""],
        "t": ["1", "2", "3"],
        "h": ["1 2", "", "3"],
    }
    schema = Schema(label="y", dense=("d",), features=(Column(name="k"), Column(name="h", kind="keys")), time="t")
    log = pa.table({name: pa.array(cells, pa.string_view()) for name, cells in columns.items()})
    pq.write_table(log, tmp_path / "log.parquet")
    made = table_of(prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema, split="none", bad="skip"))
    assert made.column("k").to_pylist() == [hash_text("a"), 7] and made.column("h").to_pylist() == [[1, 2], []]
    assert made.column("d").to_pylist() == [1.0, 2.0]


@pytest.mark.parametrize("cell", ["nan", "-NaN", "nan(1)", "inf", "Infinity", "+1.5", ".5", "5.", "1e400"])
def test_what_a_number_is_does_not_depend_on_its_neighbours(cell):
    (alone, wrong), (beside, wrong_beside) = floats(pa.array([cell])), floats(pa.array([cell, "x", " 2"]))
    assert str(alone[0]) == str(beside[0]) and not wrong[0]
    assert wrong_beside.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log.csv", '\ufeff"y","k","t","x, ""z"""\n1,7,5,1\n'),
        ("log.tsv", "\ufeffy\tk\tt\n1\t7\t5\n"),
    ],
)
def test_headers_are_read_as_spreadsheets_write_them(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    features = (Column(name="k"), *([Column(name="x", column='x, "z"')] if name == "log.csv" else []))
    table = prepared(tmp_path / name, tmp_path, schema=Schema(label="y", features=features, time="t"))
    assert table.select(["y", "k", "t"]).to_pylist() == [{"y": 1.0, "k": 7, "t": 5}]


def test_a_byte_order_mark_does_not_hide_what_a_log_is(tmp_path):
    for name in ("ratings.csv", "avazu.csv"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (SAMPLES / name).read_bytes())
        marked = prepared(tmp_path / name, tmp_path / f"marked {name}")
        assert marked.equals(prepared(SAMPLES / name, tmp_path / f"plain {name}"))


def test_the_real_criteo_sample_is_refused_at_its_first_odd_cell_or_read_whole(shared_data, tmp_path):
    file = shared_data / "criteo.tsv.zst"
    with pytest.raises(DataError, match=r'criteo\.tsv\.zst:4016: column "I3" holds \'h61e14\''):
        prepare(file, tmp_path / "out")
    dataset = prepare(file, tmp_path / "out", bad="missing", split="samples:64000", validation=0)
    assert (dataset.samples("train"), dataset.samples("test")) == (64000, 16000)
    table = pa.concat_tables([table_of(dataset), table_of(dataset, "test")])
    assert table.column("label").to_numpy().mean() == pytest.approx(0.224, abs=0.001)
    categories = [set(table.column(f"C{i}").unique().to_pylist()) - {-1} for i in range(1, 27)]
    assert sum(map(len, categories)) == 200_184
    assert dataset.facts["taken_as_missing"]["I3"] > 0
