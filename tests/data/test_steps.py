"""Preprocessing works on each distinct value once and gives what it would give on samples spelled out."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hotrow.data import DataSet, DataSetWriter, Reader
from hotrow.data.flat import arrow_schema
from hotrow.data.mix import mix64
from hotrow.data.steps import Bucketise, Clip, Function, Hash, Log, Normalise, Step, Truncate, schema_after
from hotrow.errors import SettingsError
from hotrow.inspect import inspect
from hotrow.run import Data, load_run
from hotrow.settings import parse
from hotrow.train.evaluate import evaluate_path
from hotrow.train.trainer import train
from session_logs import MOST, grouped, logs

SEEN: list[np.ndarray] = []


def doubled(values):
    """A step of the tests' own; it remembers what it was given."""
    SEEN.append(values)
    return values * 2


def too_few(values):
    return values[1:]


def as_text(values):
    return values.astype(str)


NOT_A_FUNCTION = 3
OWN = f"{__name__}:"

STEPS = st.lists(
    st.sampled_from(
        [
            Hash(columns=("user", "seen", "marks"), buckets=3, salt=5),
            Hash(columns=("rated",), buckets=1 << 40),
            Truncate(columns=("seen", "tags"), length=2),
            Truncate(columns=("rated",), length=0),
            Clip(columns=("age", "price"), low=0.5, high=2.5),
            Log(columns=("price",)),
            Normalise(columns=("age",), mean=1.0, std=2.0),
            Bucketise(column="age", boundaries=(0.0, 1.0), keep=True, feature="how_old"),
            Bucketise(column="price", boundaries=(1.0, 2.0, 4.0)),
            Function(columns=("city", "tags", "age"), function=OWN + "doubled"),
        ]
    ),
    max_size=4,
    unique_by=repr,
).filter(lambda steps: _possible(steps))


def _possible(steps):
    try:
        schema_after(steps, grouped())
    except SettingsError:
        return False
    return True


def written(path, log, groups=None):
    schema = grouped()
    with DataSetWriter(path, schema if groups is None else schema.model_copy(update={"groups": groups})) as writer:
        writer.write("train", log)
    return DataSet.open(path)


def spelled_out(batch):
    whole = batch.expand()
    features = {
        name: [bag.tolist() for bag in np.split(whole[name].values.numpy(), whole[name].offsets[1:-1].numpy())]
        for name in sorted(whole.features)
    }
    return features, None if whole.dense is None else whole.dense.numpy().tobytes()


@settings(max_examples=40)  # each writes files and sees them to the disk
@given(logs(least=1), STEPS, st.integers(1, 20))
def test_steps_on_distinct_values_are_steps_on_samples(tmp_path_factory, log, steps, batch_size):
    folder = tmp_path_factory.mktemp("steps")
    readers = [
        Reader(written(folder / name, log, groups), "train", batch_size, steps=steps, threads=0)
        for name, groups in (("flat", ()), ("deduplicated", None))
    ]
    for flat, deduplicated in zip(*readers, strict=True):
        assert spelled_out(deduplicated) == spelled_out(flat)
        assert set(flat.features) == {f.name for f in readers[0].schema.features}
        assert flat.dense is None or flat.dense.shape[1] == len(readers[0].schema.dense)


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(least=1), st.integers(0, MOST))
def test_a_truncated_history_is_its_last_keys_and_nothing_else_is_in_the_batch(tmp_path_factory, log, length):
    data = written(tmp_path_factory.mktemp("steps") / "set", log)
    for batch in Reader(data, "train", 5, steps=[Truncate(columns=("rated",), length=length)], threads=0):
        group = batch.group_of("rated")
        lengths = np.diff(group.offsets.numpy())
        kept = spelled_out(batch)[0]
        for (sample,), bag in zip(kept["k"], kept["rated"], strict=True):
            whole = log.column("rated")[sample].as_py()
            assert bag == whole[max(0, len(whole) - length) :]
        used = {k for b, n in zip(group.begins.tolist(), lengths, strict=True) for k in range(b, b + n)}
        assert used == set(range(len(group.values)))


def one(log_values, step, dtype=np.float32):
    """What a step makes of values."""
    return step._values(np.array(log_values, dtype=dtype)).tolist()


def test_each_step_is_what_it_says():
    assert one([-5, 0, 5], Clip(columns=("x",), low=-1, high=2)) == [-1, 0, 2]
    assert one([-5, 5], Clip(columns=("x",), high=2)) == [-5, 2]
    assert one([math.e - 1, 0, 1 - math.e], Log(columns=("x",))) == pytest.approx([1, 0, -1])
    assert one([3, 5], Normalise(columns=("x",), mean=3, std=4)) == [0, 0.5]
    keys = [7, -1, 1 << 40]
    hashed = one(keys, Hash(columns=("x",), buckets=10), np.int64)
    plain = mix64(np.array(keys, np.int64).view(np.uint64) ^ mix64(np.zeros(1, np.uint64))) % np.uint64(10)
    assert hashed == [int(plain[0]), -1, int(plain[2])]
    assert one(list(range(100)), Hash(columns=("x",), buckets=1 << 40, salt=1), np.int64) != one(
        list(range(100)), Hash(columns=("x",), buckets=1 << 40, salt=2), np.int64
    )
    spread = one(list(range(9000)), Hash(columns=("x",), buckets=9), np.int64)
    assert np.bincount(spread, minlength=9).min() > 850


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(least=1))
def test_a_bucket_counts_the_boundaries_at_or_below_the_value(tmp_path_factory, log):
    data = written(tmp_path_factory.mktemp("steps") / "set", log)
    step = Bucketise(column="price", boundaries=(0.5, 3.0), table="price")
    (batch,) = Reader(data, "train", 1000, shuffle=False, steps=[step], threads=0)
    want = [sum(boundary <= price for boundary in (0.5, 3.0)) for price in log.column("price").to_pylist()]
    assert batch["price_bucket"].values.tolist() == want
    assert batch.dense.shape[1] == 1
    schema = schema_after([step], data.schema)
    assert schema.dense == ("age",) and schema.features[-1].table == "price"


def test_a_function_sees_each_distinct_value_once(tmp_path):
    n = 12
    schema = arrow_schema(grouped())
    flat = {f.name: pa.array([[]] * n if pa.types.is_list(f.type) else [0] * n, f.type) for f in schema}
    flat |= {"s": pa.array([i // 6 for i in range(n)]), "seen": pa.array([[i // 2, i // 2 + 1] for i in range(n)])}
    SEEN.clear()
    data = written(tmp_path / "set", pa.table(flat))
    list(Reader(data, "train", 4, threads=0, steps=[Function(columns=("seen",), function=OWN + "doubled")]))
    assert sorted(SEEN[0].tolist()) == [0, 1, 2, 3, 3, 4, 5, 6]  # one stretch a session, of 24 keys in samples


def test_steps_on_a_feature_leave_users_and_sessions_as_they_are(tmp_path):
    n, schema = 20, grouped().model_copy(update={"session": "user"})
    flat = {f.name: pa.array([[]] * n if pa.types.is_list(f.type) else [0] * n, f.type) for f in arrow_schema(schema)}
    flat |= {"user": pa.array([i // 2 for i in range(n)]), "k": pa.array(range(n))}
    with DataSetWriter(tmp_path / "set", schema) as writer:
        writer.write("train", pa.table(flat))
    steps = [Hash(columns=("user",), buckets=1)]
    (batch,) = Reader(DataSet.open(tmp_path / "set"), "train", n, steps=steps, seed=1)
    assert set(batch["user"].values.tolist()) == {0}
    keys = batch["k"].values.tolist()
    assert batch.users.tolist() == [k // 2 for k in keys]
    assert all(keys[i + 1] == keys[i] + 1 for i in range(0, n, 2)) and keys != sorted(keys)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Hash(columns=("sen",), buckets=3), 'hash: the data set has no feature "sen".*"seen"'),
        (Clip(columns=("user",), low=0), 'clip: the data set has no dense column "user"'),
        (Truncate(columns=("user",), length=3), 'truncate: the data set has no feature of lists "user"'),
        (Bucketise(column="age", boundaries=(1,), feature="city"), 'already a column "city"'),
        (Function(columns=("age",), function="no.such:thing"), "no.such:thing cannot be found"),
        (Function(columns=("age",), function=OWN + "missing"), "missing cannot be found"),
        (Function(columns=("age",), function=OWN + "NOT_A_FUNCTION"), "is not a function"),
    ],
)
def test_a_step_that_cannot_be_done_is_named_before_anything_is_read(step, said):
    with pytest.raises(SettingsError, match=said):
        schema_after([step], grouped())


@pytest.mark.parametrize("name", ["too_few", "as_text"])
def test_a_function_that_gives_something_else_is_named(name):
    with pytest.raises(SettingsError, match=f"{name} gave .* one value of that kind for each"):
        Function(columns=("age",), function=OWN + name)._values(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "hsh", "columns": ["a"]}, 'data.steps.0: there is no step "hsh". Did you mean "hash"?'),
        ({"name": "clip", "columns": ["a"]}, "clip needs low, high or both"),
        ({"name": "clip", "columns": ["a"], "low": 2, "high": 1}, "low .2.0. lies above high"),
        ({"name": "bucketise", "column": "a", "boundaries": [2, 1]}, "boundaries must be numbers that increase"),
        ({"name": "function", "columns": ["a"], "function": "os.system"}, "function"),
        ({"name": "normalise", "columns": ["a"], "mean": 0, "std": 0}, "std"),
    ],
)
def test_impossible_settings_are_refused(given, said):
    with pytest.raises(SettingsError, match=said.replace("?", r"\?")):
        parse(Data, {"path": "x", "steps": [given]}, "data")


def test_a_step_is_read_back_as_written():
    step = Bucketise(column="price", boundaries=(1.0, 2.0))
    assert TypeAdapter(Step).validate_python(step.model_dump(mode="json")) == step


def test_a_run_trains_and_is_evaluated_on_what_its_steps_give(tmp_path):
    n, schema = 64, grouped()
    flat = {f.name: pa.array([[1]] * n if pa.types.is_list(f.type) else [1] * n, f.type) for f in arrow_schema(schema)}
    flat |= {"s": pa.array([i // 4 for i in range(n)]), "y": pa.array([i % 2 for i in range(n)], pa.float32())}
    written(tmp_path / "set", pa.table(flat))
    (tmp_path / "run.toml").write_text(
        """
        [data]
        path = "set"
        batch_size = 16
        test = "train"
        [[data.steps]]
        name = "hash"
        columns = ["user", "seen"]
        buckets = 10
        [[data.steps]]
        name = "bucketise"
        column = "price"
        boundaries = [0.5, 2]
        [model]
        name = "dlrm"
        """
    )
    result = train(load_run(tmp_path / "run.toml"))
    assert "price_bucket" in inspect(result.folder)["tables"]
    _, _, metrics = evaluate_path(result.folder)
    assert metrics["log_loss"] == result.metrics["log_loss"]
