"""Requests: every kind of column, in each type of Python, NumPy, torch and Arrow, is taken or refused by name."""

import datetime
import decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotrow.data import Column, Schema, prepare
from hotrow.data.fresh import request_of, samples_of
from hotrow.data.schema import MISSING, key_of_text
from hotrow.errors import DataError, HotrowError

SCHEMA = Schema(
    label="y",
    dense=("price",),
    features=(
        Column(name="number"),
        Column(name="text"),
        Column(name="flag"),
        Column(name="both"),
        Column(name="numbers", kind="keys", weights="sizes"),
        Column(name="texts", kind="keys"),
    ),
)
GOOD = {
    "price": [0.5, 1.5],
    "number": [3, 4],
    "text": ["a", "b"],
    "flag": [True, False],
    "both": ["a", "4"],
    "numbers": [[1, 2], [3]],
    "sizes": [[0.5, 1], [2.0]],
    "texts": [["x"], ["y", "z"]],
}


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    """That of a data set whose log had these columns: what each holds is found."""
    folder = tmp_path_factory.mktemp("log")
    pq.write_table(pa.table({"y": [0.0, 1.0] * 4, **{n: c * 4 for n, c in GOOD.items()}}), folder / "log.parquet")
    return prepare(folder / "log.parquet", folder / "data", schema=SCHEMA, split="none").schema


def taken(schema, **columns):
    names = {"sizes": "numbers_weights"}
    return samples_of({names.get(name, name): column for name, column in {**GOOD, **columns}.items()}, schema)


def test_prepare_says_what_the_keys_of_each_feature_are(schema, tmp_path):
    found = {f.name: f.holds for f in schema.features}
    assert found == {
        "number": "integers",
        "text": "text",
        "flag": "integers",
        "both": "any",
        "numbers": "integers",
        "texts": "text",
    }
    (tmp_path / "log.csv").write_text("y,k,t,n\n" + "0,7,a,\n1,-8,5,\n" * 9)
    log = Schema(label="y", features=(Column(name="k"), Column(name="t"), Column(name="n")))
    made = prepare(tmp_path / "log.csv", tmp_path / "data", schema=log, split="none")
    assert [f.holds for f in made.schema.features] == ["integers", "any", None]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("number", np.array([3, 4], np.int8)),
        ("number", np.array([3, 4], np.uint64)),
        ("number", np.array([3.0, np.nan])),
        ("number", np.array([3.0, 4.0], np.float16)),
        ("number", ("3", "4")),
        ("number", range(3, 5)),
        ("number", [None, 2**62]),
        ("number", torch.tensor([3, 4])),
        ("number", torch.tensor([3.0, 4.0], requires_grad=True)),
        ("number", torch.tensor([3, 4], dtype=torch.bfloat16)),
        ("number", pa.array([3, 4], pa.uint8())),
        ("number", pa.chunked_array([[3], [4]])),
        ("number", pa.array([3, 4]).dictionary_encode()),
        ("number", np.ma.masked_array([3, 4], [False, True])),
        ("text", np.array(["a", "b"])),
        ("text", np.array(["a", None], object)),
        ("text", ["a", "77"]),
        ("text", pa.array(["a", "b"], pa.large_string())),
        ("text", pa.array(["a", "b"], pa.string_view())),
        ("text", pa.array(["a", "b"]).dictionary_encode()),
        ("flag", [1, 0]),
        ("flag", np.array([True, False])),
        ("flag", torch.tensor([True, False])),
        ("both", [3, 4]),
        ("both", ["x", "y"]),
        ("numbers", [np.array([1, 2]), torch.tensor([3])]),
        ("numbers", pa.array([[1, 2], [3]], pa.large_list(pa.int32()))),
        ("texts", ["x", "y z"]),
        ("texts", [[], None]),
        ("texts", np.array([["x", "y"], ["z", "x"]])),
        ("price", np.array([0.5, 1.5], np.float16)),
        ("price", torch.tensor([0.5, 1.5], dtype=torch.bfloat16)),
        ("price", [True, False]),
        ("price", ["0.5", "1e3"]),
        ("price", [decimal.Decimal("0.5"), None]),
        ("price", [1, 2]),
        ("sizes", np.array([[0.5, 1.5]] * 2, object)[:, :1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_columns_of_these_types_are_taken(schema, name, column):
    more = {"numbers": [[1], [3]]} if name == "sizes" else {}
    lengths = {"sizes": [[1.0, 1.0], [1.0]]} if name == "numbers" else {}
    assert len(taken(schema, **{**lengths, **more, name: column})) == 2


def test_samples_of_a_data_set_are_taken_though_their_texts_are_keys_already(tmp_path):
    pq.write_table(pa.table({"y": [0.0, 1.0] * 4, **{n: c * 4 for n, c in GOOD.items()}}), tmp_path / "log.parquet")
    dataset = prepare(tmp_path / "log.parquet", tmp_path / "data", schema=SCHEMA, split="none")
    flat = next(dataset.flat("train"))
    assert samples_of(flat.slice(0, 3), dataset.schema).equals(flat.slice(0, 3))
    with pytest.raises(DataError, match='column "text" holds .*; its keys are texts'):
        samples_of(flat.replace_schema_metadata(None), dataset.schema)


def test_values_are_those_given(schema):
    found = taken(schema, number=[None, "4"], text=["a", None], flag=[True, None])
    assert found["number"].to_pylist() == [MISSING, 4]
    assert found["text"].to_pylist() == [key_of_text("a"), MISSING]
    assert found["flag"].to_pylist() == [1, MISSING]


@pytest.mark.parametrize("name", ["number", "text", "flag", "both", "numbers", "texts", "price", "numbers_weights"])
@pytest.mark.parametrize(
    "value",
    [
        *("u7", b"u7", bytearray(b"u7"), 7, 7.5, True, None, {"a": 1}, {1, 2}, 7 + 1j, object(), iter([1, 2])),
        *(np.int64(7), np.array(7), torch.tensor(7), pa.scalar(7), datetime.date(2026, 1, 1), (x for x in (1, 2))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_value_where_a_column_is_needed_is_refused_by_name(schema, name, value):
    with pytest.raises(DataError, match=rf'Column "{name}" is .*but a request has a value for each sample'):
        samples_of({**GOOD, "numbers_weights": GOOD["sizes"], name: value}, schema)


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("text", [3, 4], 'Sample 1: column "text" holds 3; its keys are texts'),
        ("text", [True, False], 'column "text" holds True; its keys are texts'),
        ("text", [1.0, None], 'column "text" holds 1.0; its keys are texts'),
        ("texts", [["x"], ["7"]], None),
        (
            "texts",
            [[7], []],
            r'column "texts" holds \[7\]; it takes a list of keys for each sample, and its keys are t',
        ),
        ("texts", [7, 8], 'column "texts" holds 7; it takes a list of keys for each sample'),
        ("number", ["3", "u7"], "Sample 2: column \"number\" holds 'u7'; its keys are integers"),
        ("number", [3.5, 4.0], 'column "number" holds 3.5; its keys are integers'),
        ("number", [[3], [4]], r'column "number" holds \[3\]; its keys are integers'),
        ("number", [b"3", b"4"], "column \"number\" holds b'3'; its keys are integers"),
        ("number", [3, "a"], 'Column "number" is no column of values or lists of one kind'),
        ("number", [2**64, 1], 'Column "number" is no column'),
        ("number", [{"a": 1}, {"a": 2}], 'column "number" holds .*; its keys are integers'),
        ("number", [datetime.date(2026, 1, 1)] * 2, 'column "number" holds .*; its keys are integers'),
        ("number", np.array([1 + 1j, 2]), 'Column "number" is no column'),
        ("number", np.array(["2026-01-01"] * 2, "datetime64[D]"), 'column "number" holds .*; its keys are integers'),
        ("number", [object(), object()], 'Column "number" is no column'),
        ("number", torch.tensor([[0, 1], [1, 0]]).to_sparse(), 'Column "number" is no column'),
        ("flag", ["True", "False"], "column \"flag\" holds 'True'; its keys are integers"),
        ("both", [3.5, 4.0], 'column "both" holds 3.5; a key is an integer or a text'),
        ("numbers", [1, 2], 'column "numbers" holds 1; it takes a list of keys for each sample'),
        ("numbers", [[[1]], [[2]]], 'column "numbers" holds .*; it takes a list of keys'),
        ("numbers", ["a b", "c"], "column \"numbers\" holds 'a b'; it takes a list of keys.*integers"),
        ("sizes", [[1.0], [2.0]], 'column "numbers_weights" holds .*; it takes a finite number for each key'),
        ("sizes", [["a", "b"], ["c"]], 'column "numbers_weights" holds'),
        ("price", ["True", "False"], "column \"price\" holds 'True'; a dense value is a finite number"),
        ("price", [[0.5], [1.5]], r'column "price" holds \[0.5\]; a dense value is a finite number'),
        ("price", [float("inf"), 1.0], 'column "price" holds inf; a dense value is a finite number'),
        ("price", [b"1", b"2"], 'column "price" holds .*; a dense value is a finite number'),
        ("price", [datetime.datetime(2026, 1, 1)] * 2, 'column "price" holds .*; a dense value is a finite number'),
    ],
)
def test_a_column_of_another_type_is_refused_with_its_name_what_came_and_what_is_taken(schema, name, column, said):
    if said is None:
        assert len(taken(schema, **{name: column})) == 2
        return
    with pytest.raises(DataError, match=said):
        taken(schema, **{name: column})


class Frame:
    """What pandas' DataFrame has of a mapping."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def items(self):
        return self._columns.items()

    def __bool__(self):
        raise ValueError("The truth value of a DataFrame is ambiguous.")


def test_tables_of_arrow_pandas_and_polars_are_columns_too(schema):
    columns = {**GOOD, "numbers_weights": GOOD["sizes"], "unused": [object(), object()]}
    table = pa.table({name: column for name, column in columns.items() if name != "unused"})
    wanted = samples_of(columns, schema)
    series = {name: np.array(column, object) for name, column in columns.items()}
    for given in (table, table.to_batches()[0], Frame(series), SimpleNamespace(to_arrow=lambda: table)):
        assert samples_of(given, schema).equals(wanted)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ([{"number": 3}], r"A request is columns by name.*\[\{'number': 3\}\] \(list\) came"),
        ("number", "A request is columns by name.*'number'"),
        (None, "A request is columns by name.*None"),
        (np.zeros((2, 2)), "A request is columns by name"),
        (torch.zeros(2, 2), "A request is columns by name"),
        ({}, "needs columns: .*both, flag"),
        ({"nobody": [1]}, "needs columns"),
        ({3: [1, 2]}, "named by text, but one is named 3"),
        (pa.table([[1], [2]], ["number", "number"]), 'two columns "number"'),
    ],
)
def test_what_is_no_table_of_columns_is_refused(schema, columns, said):
    with pytest.raises(DataError, match=said):
        samples_of(columns, schema)


def test_a_log_whose_columns_changed_their_type_is_refused_or_set_aside(schema):
    with pytest.raises(HotrowError, match="column \"number\" holds 'abc'; its keys are integers, as the log had"):
        taken(schema, number=["abc", "d"])


def test_what_all_samples_of_a_request_share_is_looked_up_once_without_groups_too(schema):
    assert not schema.groups
    n = 50
    same = {name: [column[0]] * n for name, column in GOOD.items() if name != "sizes"}
    request = {**same, "number": list(range(n)), "numbers_weights": [GOOD["sizes"][0]] * n}
    batch = request_of(request, schema, ())
    sizes = {name: group.unique_size for group in batch.groups for name in group.features}
    assert sizes == {"number": n, **dict.fromkeys(("text", "flag", "both", "numbers", "texts"), 1)}
    for i in (0, 49):
        alone = request_of({name: [column[i]] for name, column in request.items()}, schema, ())
        assert alone["number"].values.tolist() == [i] and len(alone) == 1
