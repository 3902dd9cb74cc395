"""Samples with one label, several, or none: what is kept of them, what a run may train on, and what is refused."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotrow import Batch, Predictor
from hotrow.data import DataSet, Reader, Schema, prepare
from hotrow.errors import BatchError, DataError, HotrowError, SettingsError
from hotrow.inspect import inspect
from hotrow.run import load_run
from hotrow.scores import _table, write_scores
from hotrow.train.trainer import train
from objectives.conftest import MINUTES, samples, schema_of
from old_formats import data_set_of_version_2


def test_a_run_trains_on_the_label_that_it_names(make_run, weights_of):
    alone = make_run(["click"], "alone")
    among = make_run(["buy", "click"], "among", objective={"label": "click"})
    other = make_run(["buy", "click"], "other", objective={"label": "buy"})
    results = [train(run).metrics for run in (alone, among, other)]
    assert results[0] == results[1] != results[2]
    assert weights_of(alone) == weights_of(among) != weights_of(other)


@pytest.mark.parametrize(
    ("labels", "objective", "said"),
    [
        (["buy", "click"], {}, "several labels: buy, click. Name one"),
        (["buy", "click"], {"label": "clik"}, 'no label "clik". Did you mean "click"'),
        ([], {}, "samples have no label"),
    ],
)
def test_a_label_that_is_not_there_is_refused_before_anything_starts(make_run, labels, objective, said):
    run = make_run(labels, objective=objective)
    with pytest.raises(SettingsError, match=said):
        train(run)
    assert not run.output.folder.exists()


def test_one_label_is_said_in_two_ways_and_means_the_same():
    one, other = schema_of(["click"]), schema_of(None, label="click")
    assert one == other and one.to_json() == other.to_json() and '"labels"' not in one.to_json()
    assert schema_of([MINUTES]).label_columns[0].kind == "number"
    assert Schema.model_validate(json.loads(schema_of(["click", MINUTES]).to_json())) == schema_of(["click", MINUTES])


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (None, 'name the label, label = "click"'),
        (["click", "click"], 'the label "click" stands twice'),
        ([{"name": "click", "kind": "chance"}], "kind"),
    ],
)
def test_a_schema_must_say_what_its_labels_are(labels, said):
    with pytest.raises(ValueError, match=said):
        schema_of(labels)
    with pytest.raises(ValueError, match="name the label"):
        schema_of(["click"], label="click")


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("labels", [[], ["click"], ["click", MINUTES], ["minutes-of", "click"]])
def test_prepare_and_reader_keep_every_label(tmp_path, labels, sessions):
    if labels[:1] == ["minutes-of"]:
        labels = [MINUTES, "click", "buy"]
    table = samples(500, 3)
    (tmp_path / "log").mkdir()
    pq.write_table(table, tmp_path / "log" / "a.parquet")
    session = {"session": "user"} if sessions else {}
    (tmp_path / "log" / "schema.json").write_text(schema_of(labels, **session).to_json())
    prepare(tmp_path / "log", tmp_path / "data", split="last:0.2")
    data = DataSet.open(tmp_path / "data")
    assert inspect(tmp_path / "data")["labels"] == list(data.schema.label_names)
    names = data.schema.label_names
    for split in data.splits:
        flat = pa.concat_tables(data.flat(split))
        batches = list(Reader(data, split, 64, shuffle=False))
        if not names:
            assert all(batch.labels is None for batch in batches)
            continue
        found = torch.cat([batch.labels for batch in batches]).numpy()
        assert found.shape == ((len(flat),) if len(names) == 1 else (len(flat), len(names)))
        wanted = np.stack([flat[name].to_numpy() for name in names], axis=1)
        np.testing.assert_array_equal(found.reshape(len(flat), -1), wanted)
    everything = np.concatenate([table[name].to_numpy() for name in names]) if names else np.zeros(0)
    whole = pa.concat_tables(rows for split in data.splits for rows in data.flat(split))
    kept = np.concatenate([whole[name].to_numpy() for name in names]) if names else np.zeros(0)
    np.testing.assert_array_equal(np.sort(kept), np.sort(everything))


@pytest.mark.parametrize(
    ("labels", "column", "value", "said"),
    [
        (["click", "buy"], "buy", 2.0, 'column "buy" holds 2.0; a label is a number from 0 to 1'),
        (["click", "minutes"], "minutes", -3.0, 'column "minutes" holds -3.0; a label is a number from 0 to 1'),
        (["click", MINUTES], "minutes", float("inf"), 'column "minutes" holds inf; a label of this kind is a finite'),
        (["click", MINUTES], "minutes", None, 'column "minutes" holds nothing; a label of this kind is a finite'),
    ],
)
def test_a_label_out_of_its_range_is_refused_with_its_place(tmp_path, labels, column, value, said):
    table = samples(20, 3)
    for name in ("minutes", "buy"):  # nothing else is at fault
        table = table.set_column(table.column_names.index(name), name, pa.array(np.zeros(20, np.float32)))
    cells = table[column].to_pylist()
    cells[7] = value
    table = table.set_column(table.column_names.index(column), column, pa.array(cells, pa.float32()))
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(DataError, match=f"row 8: {said}"):
        prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema_of(labels))
    prepare(tmp_path / "log.parquet", tmp_path / "out", schema=schema_of(labels), bad="skip", split="last:0.2")
    data = DataSet.open(tmp_path / "out")
    assert sum(data.samples(split) for split in data.splits) == 19


def test_predict_writes_the_labels_that_a_log_has(make_run, tmp_path):
    run = make_run(["click", "buy"], objective={"label": "click"}, train__steps=2)
    train(run)
    (tmp_path / "log").mkdir()
    table = samples(40, 5)
    pq.write_table(table, tmp_path / "log" / "a.parquet")
    pq.write_table(table.drop_columns(["buy"]), tmp_path / "log" / "b.parquet")
    pq.write_table(table.drop_columns(["click", "buy"]), tmp_path / "log" / "c.parquet")
    with Predictor(run.output.folder) as predictor:
        write_scores(predictor, run.data.path, tmp_path / "of_data.parquet")
        write_scores(predictor, tmp_path / "log", tmp_path / "of_log.parquet")
    scored = pq.read_table(tmp_path / "of_data.parquet")
    assert scored.column_names == ["score", "label_click", "label_buy", "user"]
    assert scored["label_buy"].to_pylist() == samples(200, 2)["buy"].to_pylist()
    scored = pq.read_table(tmp_path / "of_log.parquet")
    assert scored["label_click"].to_pylist() == [*table["click"].to_pylist() * 2, *[None] * 40]
    assert scored["label_buy"].to_pylist() == [*table["buy"].to_pylist(), *[None] * 80]
    assert scored["score"].to_pylist()[:40] == scored["score"].to_pylist()[80:]


def test_labels_and_users_take_no_predictions_place():
    batch = Batch.plain({"item": torch.arange(2)}, labels=torch.tensor([0.0, 1.0]), users=torch.arange(2))
    score = torch.tensor([0.3, 0.6]).numpy()
    assert _table(batch, {"score": score}, ["label"]).column_names == ["score", "label", "user"]
    beside = _table(batch, {"label": score}, ["label"])
    assert beside.column_names == ["label", "label_label", "user"]
    assert beside["label"].to_numpy().tolist() == score.tolist()
    with pytest.raises(DataError, match="predicts user, and a column of that name"):
        _table(batch, {"user": score}, ["label"])


def test_a_batch_takes_labels_of_one_or_two_dimensions():
    keys = {"item": torch.tensor([1, 2, 3])}
    assert Batch.plain(keys, labels=torch.zeros(3, 2)).labels.shape == (3, 2)
    with pytest.raises(BatchError, match="labels must have 1 dimension, not 3"):
        Batch.plain(keys, labels=torch.zeros(3, 2, 1))
    with pytest.raises(BatchError, match="labels has 2 samples, the batch has 3"):
        Batch.plain(keys, labels=torch.zeros(2, 3))


def test_a_log_without_labels_is_followed_and_read_but_not_trained_on_by_binary(log_of):
    batch = next(iter(Reader(DataSet.open(log_of([])), "train", 64)))
    assert batch.labels is None and len(batch) == 64
    from hotrow.objectives import BinarySettings, ObjectiveInputs
    from hotrow.objectives.inputs import Inputs

    objective = BinarySettings().build(ObjectiveInputs([], ("click",)))
    with pytest.raises(HotrowError, match="no labels"):
        objective.loss(torch.zeros(3), Inputs())


def test_a_data_set_of_one_label_is_written_and_read_as_ever(log_of, tmp_path):
    shutil.copytree(log_of(["click"]), tmp_path / "old")
    said = json.loads((tmp_path / "old" / "schema.json").read_text())
    assert said["label"] == "click" and "labels" not in said
    data_set_of_version_2(tmp_path / "old")
    data = DataSet.open(tmp_path / "old")
    assert data.schema.label_names == ("click",)
    assert next(iter(Reader(data, "test", 200, shuffle=False))).labels.tolist() == samples(200, 2)["click"].to_pylist()


def test_a_graph_is_of_the_label_that_is_named(log_of, call, tmp_path):
    data, table = log_of(["click", "buy"]), samples(600, 1)

    def edges(*options):
        out = tmp_path / f"{len(options)}{options[-1:]}.graph"
        code, said, error = call("graph", log_of([]) if not options else data, "--out", out, "--json", *options)
        return json.loads(said)["edges"] if code == 0 else error

    pairs = list(zip(table["user"].to_pylist(), table["item"].to_pylist(), strict=True))
    for label in ("click", "buy"):
        positive = {pair for pair, value in zip(pairs, table[label].to_pylist(), strict=True) if value > 0.5}
        assert edges("--label", label) == len(positive)
    assert edges() == len(set(pairs))
    assert "--label: samples have several labels: click, buy" in edges("--positive", "0.5")


def test_commands_that_need_no_label_work_without_one(log_of, call, tmp_path):
    data = log_of([])
    for command in (("inspect", data), ("profile", data), ("advise", data), ("flatten", data, tmp_path / "f.parquet")):
        code, _, error = call(*command)
        assert code == 0, (command, error)
    assert pq.read_table(tmp_path / "f.parquet").column_names[0] == "price"


@pytest.mark.parametrize(
    ("labels", "objective"), [(["click"], "binary"), ([MINUTES], "regression"), (["click", MINUTES], "multi_task")]
)
def test_advise_writes_a_run_for_the_labels_there_are(log_of, call, tmp_path, labels, objective):
    assert call("advise", log_of(labels), "--out", tmp_path / "run.toml")[0] == 0
    run = load_run(tmp_path / "run.toml", ["train.steps=1"])
    assert run.objective.name == objective
    assert train(run).metrics
