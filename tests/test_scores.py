"""`hotrow predict`: the scores of a predictor, for a data set or for a log that may lack its labels."""

import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from hotrow import Predictor
from hotrow.cli import app
from hotrow.data import DataSet, DataSetWriter, Reader
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.trainer import train
from train.conftest import SCHEMA, samples


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    with DataSetWriter(folder / "data", SCHEMA, row_group=256) as writer:
        writer.write("train", samples(400, 1))
        writer.write("test", samples(150, 2))
    settings = {
        "data": {"path": str(folder / "data"), "batch_size": 64},
        "tables": {"dim": 4},
        "model": {"name": "wide_deep", "deep": [8]},
        "train": {"threads": 1},
        "output": {"folder": str(folder / "run"), "tensorboard": False},
    }
    run = parse(Run, settings)
    train(run)
    return run


def predict(*words):
    return CliRunner().invoke(app, ["predict", *map(str, words)])


def wanted(run):
    """The scores of the test split, in order."""
    with Predictor(run.output.folder) as predictor:
        batches = Reader(DataSet.open(run.data.path), "test", 64, shuffle=False)
        return torch.cat([predictor.score(batch) for batch in batches])


def scored(out):
    return torch.from_numpy(pq.read_table(out)["score"].to_numpy().copy())


def test_a_data_set_is_scored_in_order_with_its_labels(run, tmp_path):
    out = tmp_path / "scores.parquet"
    result = predict(run.output.folder, run.data.path, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["samples"], said["split"]) == (150, "test")
    assert torch.equal(scored(out), wanted(run))
    assert said["mean_score"] == pytest.approx(float(wanted(run).double().mean()))
    assert pq.read_table(out)["label"].to_pylist() == samples(150, 2)["click"].to_pylist()
    assert pq.read_table(out)["user"].to_pylist() == samples(150, 2)["user"].to_pylist()
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet"]


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_log_is_scored_as_its_data_set_is_with_labels_or_without(run, tmp_path, labelled, form):
    rows = samples(150, 2)
    if form == "csv":
        texts = [" ".join(map(str, keys)) for keys in rows["history"].to_pylist()]
        rows = rows.set_column(rows.column_names.index("history"), "history", pa.array(texts))
    if not labelled:
        rows = rows.drop_columns(["click"])
    log = tmp_path / f"log.{form}"
    if form == "csv":
        pa.csv.write_csv(rows, log)
    else:
        pq.write_table(rows, log)
    out = tmp_path / "scores.parquet"
    result = predict(run.output.folder, log, "--out", out)
    assert result.exit_code == 0, result.output
    assert "150" in result.output
    torch.testing.assert_close(scored(out), wanted(run), rtol=1e-5, atol=1e-6)
    assert ("label" in pq.read_table(out).column_names) == labelled


@pytest.mark.parametrize("labelled", ["a", "b"])
def test_labels_that_only_some_files_have_are_null_for_the_others(run, tmp_path, labelled):
    rows = samples(150, 2)
    files = {"a": rows.slice(0, 90), "b": rows.slice(90)}
    (tmp_path / "log").mkdir()
    for name, part in files.items():
        pq.write_table(part if name == labelled else part.drop_columns(["click"]), tmp_path / "log" / f"{name}.parquet")
    out = tmp_path / "scores.parquet"
    result = predict(run.output.folder, tmp_path / "log", "--out", out)
    assert result.exit_code == 0, result.output
    torch.testing.assert_close(scored(out), wanted(run), rtol=1e-5, atol=1e-6)
    labels = {
        name: part["click"].to_pylist() if name == labelled else [None] * len(part) for name, part in files.items()
    }
    assert pq.read_table(out)["label"].to_pylist() == labels["a"] + labels["b"]


def test_what_cannot_be_scored_is_refused_with_a_sentence_and_leaves_nothing(run, tmp_path):
    out = tmp_path / "scores.parquet"
    rows = samples(5, 2)
    pq.write_table(rows.set_column(1, "price", pa.array(["1", "x", "3", "4", "5"])), tmp_path / "bad.parquet")
    pq.write_table(rows.drop_columns(["item"]), tmp_path / "lacks.parquet")
    for words, sentence in (
        ((run.output.folder, tmp_path / "bad.parquet"), 'row 2: column "price" holds'),
        ((run.output.folder, tmp_path / "lacks.parquet"), 'no column "item"'),
        ((run.output.folder, tmp_path / "nothing"), "There is no"),
        ((run.output.folder, run.data.path, "--split", "tset"), 'Did you mean "test"'),
        ((run.output.folder, run.data.path, "--bad", "skipp"), 'Did you mean "skip"'),
        ((tmp_path, run.data.path), "not a complete checkpoint"),
        ((run.output.folder, run.data.path, "--out", tmp_path / "bad.parquet" / "out"), "could not be written"),
    ):
        result = predict(words[0], "--out", out, *words[1:])
        assert result.exit_code == 1
        assert sentence in str(result.exception), result.exception
        assert not list(tmp_path.glob("*scores*")) and not list(tmp_path.glob(".*"))
    assert predict(run.output.folder, tmp_path / "bad.parquet", "--bad", "skip", "--out", out).exit_code == 0
    assert len(scored(out)) == 4
    again = predict(run.output.folder, run.data.path, "--out", out)
    assert "already there" in str(again.exception)
    assert predict(run.output.folder, run.data.path, "--out", out, "--overwrite").exit_code == 0
    assert len(scored(out)) == 150
