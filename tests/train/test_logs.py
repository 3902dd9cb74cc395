"""The run folder: metrics line by line, TensorBoard events where they can be written, progress for people."""

import builtins
import json
import sys

import pytest

from hotrow.errors import CheckpointError
from hotrow.train.logs import Log, RunFolder
from hotrow.train.progress import Bar, Lines, duration
from hotrow.train.trainer import train


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_each_line_is_an_object_and_there_at_once(folder):
    log = Log(folder, tensorboard=False)
    log.write("train", 4, {"loss": 0.5, "split": "test", "auc": float("nan")})
    assert json.loads(folder.metrics.read_text()) == {
        "kind": "train",
        "step": 4,
        "loss": 0.5,
        "split": "test",
        "auc": None,
    }
    log.close()


def test_cutting_back_forgets_later_steps_and_a_torn_line(folder):
    log = Log(folder, tensorboard=False)
    for step in range(1, 6):
        log.write("train", step, {"loss": 1 / step})
    log.close()
    with folder.metrics.open("a") as file:
        file.write('{"kind": "tra')
    folder.cut_back(3)
    assert [line["step"] for line in folder.lines()] == [1, 2, 3]
    assert folder.metrics.read_text().endswith("\n")


def test_tensorboard_events_say_what_the_metrics_say(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(folder, tensorboard=True)
    assert log.note == ""
    log.write("train", 4, {"loss": 0.5, "split": "test", "auc": float("nan")})
    log.close()
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(4, 0.5)]


def test_without_tensorboard_the_run_goes_on_and_says_so(folder, monkeypatch):
    real = builtins.__import__

    def no_tensorboard(name, *args, **kwargs):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_tensorboard)
    log = Log(folder, tensorboard=True)
    assert "tensorboard is not installed" in log.note
    log.write("train", 1, {"loss": 0.5})
    log.close()
    assert len(list(folder.lines())) == 1


def test_plain_lines_end_with_the_last_step(make_run, capsys):
    train(make_run(train__steps=5), progress=Lines())
    last = capsys.readouterr().err.splitlines()
    assert any(line.startswith("Training step 5 of 5, loss ") and "samples/s" in line for line in last)
    assert any(line.startswith("Step 5, test: AUC ") for line in last)


def test_a_bar_can_be_watched(make_run, capsys):
    train(make_run(train__steps=5), progress=Bar())
    assert "Step 5, test: AUC " in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "said"), [(7.4, "7s"), (200, "3m 20s"), (7500, "2h 05m")])
def test_durations_are_said_as_people_do(seconds, said):
    assert duration(seconds) == said


def test_a_damaged_line_of_metrics_is_passed_over_and_damaged_settings_are_named(make_run):
    run = make_run(train__steps=4)
    train(run)
    folder = RunFolder(run.output.folder)
    good = list(folder.lines())
    folder.metrics.write_bytes(b'{"kind": "train", "ste\n\xff\xfe\n[]\n' + folder.metrics.read_bytes())
    assert list(folder.lines()) == good
    for damage in (b"garbage [[[", b"\xff\xfe"):
        folder.settings.write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"settings\.toml cannot be read"):
            folder.run()
