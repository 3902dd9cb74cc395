"""The loop: it learns, it evaluates and stops when told, and a resumed run is the run it would have been."""

import json
import math
import signal
import threading

import pyarrow as pa
import pytest
import torch

from hotrow.data import DataSet
from hotrow.errors import CheckpointError, DataError, HotrowError, SettingsError
from hotrow.train import batches, trainer
from hotrow.train.checkpoint import Checkpoint, Checkpoints, chain_of
from hotrow.train.evaluate import evaluate_path
from hotrow.train.logs import RunFolder
from hotrow.train.progress import Progress
from hotrow.train.trainer import train


def lines(run, kind=None):
    """The metrics of a run without what depends on the clock of the wall."""
    timed = {"seconds", "samples_per_second", "stopped_training_for"}
    found = [
        {k: v for k, v in line.items() if k not in timed}
        for line in RunFolder(run.output.folder).lines()
        if line["kind"] != "machine"
    ]
    return [line for line in found if line["kind"] == kind] if kind else found


class Interrupt(Progress):
    """Sends this process a signal at a step."""

    def __init__(self, at, number=signal.SIGTERM):
        self.at, self.number = at, number

    def step(self, done, samples, loss):
        if done == self.at:
            signal.raise_signal(self.number)


def test_a_run_learns_and_leaves_its_folder(make_run):
    run = make_run(train__epochs=3)
    result = train(run)
    assert result.stopped == "end"
    assert result.steps == 96
    assert result.samples == 6000
    assert result.metrics["auc"] > 0.7
    assert result.metrics.keys() == {
        "auc",
        "log_loss",
        "normalized_entropy",
        "calibration",
        "user_auc",
        "samples",
    }
    losses = [line["loss"] for line in lines(run, "train")]
    assert len(losses) == 24
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines(run, "evaluate")] == [96]
    assert RunFolder(run.output.folder).run() == run
    assert Checkpoint(result.checkpoint).step == 96


@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "deepfm", "wide_deep"])
def test_every_model_trains(make_run, model):
    assert train(make_run(model={"name": model}, train__steps=3)).steps == 3


def test_a_history_can_be_attended_to(make_run):
    run = make_run(model={"name": "din"}, features={"history": {"pooling": "sequence"}}, train__steps=3)
    assert train(run).steps == 3


def test_two_runs_of_the_same_settings_are_the_same_bit_for_bit(make_run, tmp_path, same_weights):
    one = make_run(train__steps=20)
    two = make_run(train__steps=20, output__folder=str(tmp_path / "two"))
    train(one)
    train(two)
    same_weights(one, two)


def test_evaluations_and_checkpoints_on_the_way_change_nothing(make_run, tmp_path, same_weights):
    plain = make_run(train__epochs=2)
    busy = make_run(
        train__epochs=2,
        train__evaluate_every=5,
        train__checkpoint_every=3,
        train__incremental=2,
        output__folder=str(tmp_path / "busy"),
    )
    train(plain)
    train(busy)
    same_weights(plain, busy)


@pytest.mark.parametrize("incremental", [0, 2])
@pytest.mark.parametrize("stop", [1, 7, 40])
def test_a_run_stopped_by_a_signal_and_resumed_is_the_run_it_would_have_been(
    make_run, tmp_path, stop, incremental, same_weights
):
    settings = {"train__epochs": 2, "train__evaluate_every": 10, "train__incremental": incremental}
    whole = make_run(**settings, output__folder=str(tmp_path / "whole"))
    train(whole)

    run = make_run(**settings, train__checkpoint_every=3)
    before = signal.getsignal(signal.SIGTERM)
    first = train(run, progress=Interrupt(stop))
    assert signal.getsignal(signal.SIGTERM) is before
    assert first.stopped == "SIGTERM"
    assert first.steps == stop
    assert Checkpoint(first.checkpoint).step == stop
    second = train(run, resume=True)
    assert second.stopped == "end"
    assert second.steps == 64
    assert second.samples == 4000
    same_weights(whole, run)
    for kind in ("train", "evaluate"):
        assert lines(run, kind) == lines(whole, kind)


@pytest.mark.parametrize(
    "tables",
    [
        {"admission": {"name": "count", "count": 2, "bytes": 4096}},
        {"admission": {"name": "probability", "probability": 0.5}},
        {"eviction": {"capacity": 40}},
        {"eviction": {"capacity": 40, "policy": "lfu"}},
        {"eviction": {"ttl": 3}},
        {"dtype": "bfloat16", "optimizer": {"name": "momentum"}},
        {"optimizer": {"name": "rowwise_adagrad", "schedule": {"name": "linear", "steps": 40}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("incremental", [0, 9])
def test_whatever_tables_do_with_their_rows_a_resumed_run_does_too(
    make_run, tmp_path, same_weights, tables, incremental
):
    whole = make_run(tables=tables, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(tables=tables, train__checkpoint_every=4, train__incremental=incremental)
    first = train(run, progress=Interrupt(21))
    assert bool(chain_of(first.checkpoint)) == bool(incremental)
    train(run, resume=True)
    same_weights(whole, run)


def test_with_several_threads_too_a_resumed_run_is_the_same(make_run, tmp_path, same_weights):
    whole = make_run(train__threads=2, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(train__threads=2)
    train(run, progress=Interrupt(13))
    train(run, resume=True)
    same_weights(whole, run)


def test_a_signal_between_a_checkpoint_and_the_next_step_loses_nothing(make_run, tmp_path, same_weights):
    whole = make_run(output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(train__evaluate_every=8)

    class AfterEvaluation(Progress):
        def say(self, text):
            signal.raise_signal(signal.SIGINT)

    first = train(run, progress=AfterEvaluation())
    assert (first.stopped, first.steps) == ("SIGINT", 8)
    assert Checkpoint(first.checkpoint).step == 8
    train(run, resume=True)
    same_weights(whole, run)


def test_a_signal_before_the_first_step_leaves_a_run_that_can_be_resumed(make_run, tmp_path, same_weights):
    whole = make_run(output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run()

    class Early(batches.Signals):
        def __enter__(self):
            super().__enter__()
            signal.raise_signal(signal.SIGTERM)
            return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "Signals", Early)
        assert train(run).steps == 0
    train(run, resume=True)
    same_weights(whole, run)


def test_a_test_split_that_is_not_there_is_said_before_training(make_run):
    with pytest.raises(DataError, match=r'no split "tset"\. Did you mean "test"'):
        train(make_run(data__test="tset"))
    assert not make_run().output.folder.exists()


def test_metrics_after_the_checkpoint_are_forgotten_on_resuming(make_run):
    run = make_run(train__epochs=2)
    train(run, progress=Interrupt(6))
    folder = RunFolder(run.output.folder)
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 8, "loss": 1.0}) + "\n")
        file.write('{"kind": "train", "st')
    train(run, resume=True)
    steps = [line["step"] for line in lines(run, "train")]
    assert steps == list(range(4, 65, 4))


def test_resuming_without_a_checkpoint_begins_at_the_beginning(make_run, tmp_path, same_weights):
    whole = make_run(train__steps=8, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(train__steps=8)
    train(run, resume=True)
    same_weights(whole, run)


def test_resuming_a_finished_run_changes_nothing_and_more_epochs_extend_it(make_run, tmp_path, same_weights):
    run = make_run()
    first = train(run)
    before = lines(run)
    again = train(run, resume=True)
    assert again.metrics == first.metrics
    assert lines(run) == before

    longer = make_run(train__epochs=2)
    train(longer, resume=True)
    whole = make_run(train__epochs=2, output__folder=str(tmp_path / "whole"))
    train(whole)
    same_weights(whole, longer)


def test_a_run_is_not_resumed_with_other_settings(make_run):
    train(make_run(train__steps=2))
    with pytest.raises(SettingsError, match=r"tables\.dim was 4 and is now 8"):
        train(make_run(train__steps=2, tables__dim=8), resume=True)


def test_a_run_is_not_resumed_on_other_data(make_run, write_log, tmp_path):
    train(make_run(train__steps=2))
    write_log(tmp_path / "other", seed=5)
    with pytest.raises(HotrowError, match="is not the one that"):
        train(make_run(train__steps=2, data__path=str(tmp_path / "other")), resume=True)


def test_a_folder_with_a_run_is_not_written_over_unless_asked(make_run):
    run = make_run(train__steps=2)
    train(run)
    with pytest.raises(SettingsError, match=r"--resume .* --overwrite"):
        train(run)
    keep = run.output.folder / "notes.txt"
    keep.write_text("mine")
    assert train(run, overwrite=True).steps == 2
    assert keep.read_text() == "mine"


def test_early_stopping_ends_the_run_and_keeps_the_best_checkpoint(make_run, monkeypatch):
    values = iter([0.6, 0.7, 0.65, 0.7, 0.69])
    monkeypatch.setattr(trainer, "evaluate", lambda ranker, split: {"auc": next(values)})
    run = make_run(
        train__epochs=5,
        train__evaluate_every=4,
        train__keep=1,
        train__early_stopping={"metric": "auc", "patience": 3},
    )
    result = train(run)
    assert result.stopped == "early"
    assert result.steps == 20
    assert result.best_step == 8
    kept = [p.name for p in Checkpoints(run.output.folder / "checkpoints").all()]
    assert kept == ["step-00000008", "step-00000020"]
    again = train(run, resume=True)
    assert again.stopped == "early"
    assert again.steps == 20


def test_early_stopping_remembers_across_a_resumption(make_run, monkeypatch):
    values = iter([0.6, 0.5, 0.5, 0.5])
    monkeypatch.setattr(trainer, "evaluate", lambda ranker, split: {"auc": next(values)})
    run = make_run(train__epochs=5, train__evaluate_every=4, train__early_stopping={"metric": "auc", "patience": 2})
    assert train(run, progress=Interrupt(9)).stopped == "SIGTERM"
    result = train(run, resume=True)
    assert (result.stopped, result.steps, result.best_step) == ("early", 12, 4)


def test_a_lower_loss_is_better_and_nothing_beats_nan(make_run):
    stopping = make_run(train__evaluate_every=1, train__early_stopping={"metric": "log_loss", "min_delta": 0.1})
    better = stopping.train.early_stopping.better
    assert better(0.5, None, "smaller")
    assert better(0.3, 0.5, "smaller")
    assert not better(0.45, 0.5, "smaller")
    assert not better(math.nan, 0.5, "smaller")


def test_a_checkpoint_can_be_evaluated_and_says_what_training_said(make_run):
    run = make_run(train__steps=10)
    result = train(run)
    for path in (run.output.folder, result.checkpoint):
        checkpoint, split, metrics = evaluate_path(path)
        assert checkpoint == result.checkpoint
        assert split == "test"
        assert metrics == result.metrics
    with pytest.raises(DataError, match=r'no split "tset"\. Did you mean "test"'):
        evaluate_path(run.output.folder, "tset")


def test_an_altered_row_file_is_refused_by_its_name_when_resuming(make_run):
    run = make_run(train__steps=4)
    result = train(run)
    file = next((result.checkpoint / "rows").glob("*.arrow"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=file.name):
        train(make_run(train__steps=8), resume=True)


def test_a_loss_that_is_not_a_number_stops_the_run_with_a_sentence(make_run):
    run = make_run(optimizer={"name": "sgd", "lr": 1e30})
    with pytest.raises(HotrowError, match="Lower the learning rates"):
        train(run)


def test_a_run_without_a_test_split_trains_without_evaluating(make_run):
    run = make_run(train__steps=3, data__test="")
    assert train(run).metrics == {}


def test_a_gpu_that_is_not_there_is_said(make_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match='set it to "cpu"'):
        train(make_run(train__device="cuda"))


def test_no_thread_and_no_setting_of_the_process_is_left_behind(make_run):
    before = threading.active_count(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(make_run(train__steps=3))
    assert (
        threading.active_count(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    ) == before


def test_a_data_set_with_other_columns_is_not_evaluated_on(make_run, data, write_log, tmp_path):
    run = make_run(train__steps=4)
    train(run)
    schema = DataSet.open(data).schema
    turned = schema.model_copy(update={"features": tuple(reversed(schema.features))})
    write_log(tmp_path / "turned", schema=turned)
    with pytest.raises(SettingsError, match=r"turned is another log .*the features differ \(their order\)"):
        evaluate_path(run.output.folder, data=tmp_path / "turned")


@pytest.mark.parametrize(
    "table", [{"admission": {"name": "count", "count": 3}}, {"eviction": {"ttl": 3}}, {"eviction": {"capacity": 150}}]
)
def test_one_worker_with_a_cache_where_rows_come_and_go_repeats(make_run, tmp_path, table):
    results = []
    for name in ("one", "two"):
        run = make_run(train__steps=24, cluster={"cache": {}}, output__folder=str(tmp_path / name), tables__dim=4,
                       **{f"tables__{key}": value for key, value in table.items()})  # fmt: skip
        results.append((run, train(run)))
    assert results[0][1].metrics == results[1][1].metrics
    assert lines(results[0][0], "train") == lines(results[1][0], "train")


def test_nothing_brought_ahead_under_a_bound_is_no_standstill(make_run):
    assert train(make_run(train__steps=4, policy={"name": "bounded", "ahead": 0}, cluster={"cache": {}})).steps == 4


def test_labels_between_0_and_1_are_trained_on_and_evaluated(make_run, write_log, tmp_path):
    def soft(table):
        labels = pa.array(table["click"].to_numpy() * 0.75 + 0.125, pa.float32())
        return table.set_column(table.column_names.index("click"), "click", labels)

    metrics = train(make_run(train__steps=8, data__path=str(write_log(tmp_path / "soft", change=soft)))).metrics
    assert 0 < metrics["auc"] < 1 and metrics["log_loss"] > 0
