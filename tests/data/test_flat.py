"""From a data set there is a way back to the flat samples, in Hotrow and in any tool that reads Parquet."""

import json

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hotrow.cli import app
from hotrow.data import DataSet, DataSetWriter
from hotrow.data.flat import arrow_schema
from hotrow.data.flatten import flatten
from hotrow.errors import DataError
from session_logs import grouped, logs, same


def written(path, train, test=None, row_group=5):
    with DataSetWriter(path, grouped(), row_group=row_group, part=2 * row_group) as writer:
        writer.write("train", train)
        writer.split("test")
        if test is not None:
            writer.write("test", test)
    return DataSet.open(path)


def joined(tables):
    tables = list(tables)
    return pa.concat_tables(tables) if tables else arrow_schema(grouped()).empty_table()


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(), logs(most_sessions=2), st.integers(1, 12))
def test_flat_gives_exactly_what_was_written(tmp_path_factory, train, test, row_group):
    path = tmp_path_factory.mktemp("flat") / "set"
    dataset = written(path, train, test, row_group)
    assert same(joined(dataset.flat("train")), train) and same(joined(dataset.flat("test")), test)
    dataset.verify()
    flatten(dataset, path / "out.parquet")
    assert same(pq.read_table(path / "out.parquet"), pa.concat_tables([train, test]))
    flatten(dataset, path / "out.parquet", splits=["test"], overwrite=True)
    assert same(pq.read_table(path / "out.parquet"), test)


@settings(max_examples=20)  # each writes files and sees them to the disk
@given(logs(least=2))
def test_a_join_in_any_tool_gives_the_flat_log_back(tmp_path_factory, log):
    path = tmp_path_factory.mktemp("flat") / "set"
    written(path, log, row_group=1 << 16)
    stem = path / "train-00000"
    rows = duckdb.sql(f"""
        SELECT k, who.user, past.city, lists.tags, (
            SELECT coalesce(list(key.seen ORDER BY key.file_row_number), [])
            FROM read_parquet('{stem}.past.seen.parquet', file_row_number = true) key
            WHERE key.file_row_number >= past.seen_begin
            AND key.file_row_number < past.seen_begin + past.seen_length) AS seen
        FROM '{stem}.parquet' samples
        JOIN read_parquet('{stem}.who.parquet', file_row_number = true) who ON who.file_row_number = samples.who
        JOIN read_parquet('{stem}.past.parquet', file_row_number = true) past ON past.file_row_number = samples.past
        JOIN read_parquet('{stem}.lists.parquet', file_row_number = true) lists ON lists.file_row_number = samples.lists
        ORDER BY k""").fetchall()
    names = ("k", "user", "city", "tags", "seen")
    assert rows == [tuple(sample[name] for name in names) for sample in log.to_pylist()]


@pytest.fixture
def dataset(tmp_path):
    schema = grouped()
    flat = {f.name: pa.array([[]] * 9 if pa.types.is_list(f.type) else [1] * 9, f.type) for f in arrow_schema(schema)}
    return written(tmp_path / "set", pa.table(flat), row_group=2)


def test_flatten_is_a_command(dataset, tmp_path):
    out = tmp_path / "out.parquet"
    said = CliRunner().invoke(app, ["flatten", str(dataset.path), str(out), "--split", "train", "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert told["samples"] == 9 == len(pq.read_table(out)) and told["splits"] == ["train"]
    assert told["bytes"] == out.stat().st_size and told["data_set_bytes"] == dataset.bytes
    shown = CliRunner().invoke(app, ["flatten", str(dataset.path), str(out), "--overwrite"])
    assert shown.exit_code == 0 and "in the data set" in shown.stdout


def test_flatten_keeps_what_is_there_and_leaves_nothing_half_written(dataset, tmp_path):
    out = tmp_path / "out.parquet"
    out.write_text("mine")
    with pytest.raises(DataError, match="already there"):
        flatten(dataset, out)
    (dataset.path / "train-00001.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="train-00001.parquet"):
        flatten(dataset, out, overwrite=True)
    assert out.read_text() == "mine"
    with pytest.raises(DataError, match='no split "tran"'):
        flatten(dataset, tmp_path / "other.parquet", splits=["tran"])
    for below in ("no", "out.parquet"):
        with pytest.raises(DataError, match="could not be written"):
            flatten(dataset, tmp_path / below / "other.parquet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet", "set"]
