"""Locks: one process at a time in a folder, whoever is refused is told who is there, and no kill leaves one behind."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from hotrow import locks
from hotrow.errors import SettingsError, StoreError
from hotrow.locks import Lock
from hotrow.store.journal import Journal
from hotrow.store.store import RowStore
from hotrow.table import Table
from hotrow.train.logs import RunFolder
from hotrow.train.progress import Progress
from hotrow.train.trainer import train
from train.conftest import data, make_run, write_log  # noqa: F401

HOLDS = """
import sys
from pathlib import Path
from hotrow.locks import Lock
sys.argv = ["/somewhere/hotrow/__main__.py", "train", "my run.toml"]
lock = Lock(Path(sys.stdin.readline().strip()), "a run", "")
print("has it", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holds():
    """Has another process take the lock of a folder."""
    processes = []

    def take(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "has it\n"
        return process

    yield take
    for process in processes:
        process.kill()
        process.communicate()


def test_whoever_is_refused_is_told_process_host_command_and_since_when(tmp_path, holds):
    process = holds(tmp_path / "run")
    told = (
        rf"run is in use: process {process.pid} on {socket.gethostname()} has had it since 20\d\d-\d\d-\d\d [\d:]+ "
        r"\(hotrow train 'my run.toml'\)\. Stop it\."
    )
    with pytest.raises(StoreError, match=told):
        Lock(tmp_path / "run", "a run", "Stop it.")


def test_a_process_that_is_killed_holds_nothing(tmp_path, holds):
    process = holds(tmp_path / "run")
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Lock(tmp_path / "run", "a run", "") as lock:
        assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == os.getpid()
        assert lock.shared
    assert not (tmp_path / "run" / "lock").exists()


def test_a_lock_leaves_no_folder_behind_that_it_made_and_none_away_that_holds_something(tmp_path):
    with Lock(tmp_path / "a" / "run", "a run", ""):
        pass
    assert list((tmp_path / "a").iterdir()) == []
    with Lock(tmp_path / "b", "a run", ""):
        (tmp_path / "b" / "settings.toml").write_text("")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["settings.toml"]


def test_processes_that_belong_to_one_run_share_its_lock(tmp_path, holds, monkeypatch):
    holds(tmp_path)
    token = json.loads((tmp_path / "lock").read_text())["token"]
    monkeypatch.setenv("HOTROW_LOCK", token)
    with Lock(tmp_path, "a run", "") as lock:
        assert lock.shared == {}  # it has the lock of the other one, which it does not release
    monkeypatch.setenv("HOTROW_LOCK", token[::-1])
    with pytest.raises(StoreError, match="is in use"):
        Lock(tmp_path, "a run", "")


def test_a_lock_that_was_removed_while_it_was_waited_for_is_no_lock(tmp_path, monkeypatch):
    first, flock = Lock(tmp_path, "a run", ""), locks.fcntl.flock

    def after_its_release(handle, operation):
        monkeypatch.setattr(locks.fcntl, "flock", flock)
        first.release()
        flock(handle, operation)

    monkeypatch.setattr(locks.fcntl, "flock", after_its_release)
    with Lock(tmp_path, "a run", ""), pytest.raises(StoreError, match="is in use: this process"):
        Lock(tmp_path, "a run", "")


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path):
    with Lock(tmp_path, "a run", "") as lock:
        lock._of = 1  # as in a child, whose own number differs
        lock.release()
        assert (tmp_path / "lock").exists()


def test_a_file_system_without_locks_is_refused_for_rows_and_said_for_runs(tmp_path, monkeypatch):
    def without(handle, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", without)
    with pytest.raises(StoreError, match="cannot be locked: Function not implemented. Give one on a file system"):
        RowStore(Table(name="t", dim=2), 1, tmp_path / "rows")
    assert "Take care that no other command uses it" in RunFolder(tmp_path / "run").lock().note


@pytest.mark.parametrize("opened", [Journal, lambda folder: RowStore(Table(name="t", dim=2), 1, folder)])
def test_rows_that_another_process_has_open_are_refused_with_who_has_them(tmp_path, holds, opened):
    process = holds(tmp_path)
    with pytest.raises(StoreError, match=rf"process {process.pid} on .* Two may not write the same rows"):
        opened(tmp_path)


class Second(Progress):
    """Starts the same run again from within its first step."""

    def __init__(self, run, **how):
        self.run, self.how, self.said = run, how, []

    def step(self, step, samples, loss):
        if not self.said:
            with pytest.raises(SettingsError) as refused:
                train(self.run, **self.how)
            self.said.append(str(refused.value))


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}, {}])
def test_a_second_train_on_a_run_folder_is_refused_and_the_first_goes_on(make_run, how):  # noqa: F811
    run = make_run(train__steps=6, train__checkpoint_every=2)
    second = Second(run, **how)
    assert train(run, progress=second).steps == 6
    (said,) = second.said
    assert said.startswith(f"{run.output.folder} is in use: this process has had it since ")
    assert not (run.output.folder / "lock").exists()
    assert train(run, resume=True).steps == 6  # and nothing is held after it


def test_a_run_that_another_process_trains_is_left_alone(make_run, holds):  # noqa: F811
    run = make_run(train__steps=4)
    train(run)
    before = sorted(run.output.folder.rglob("*"))
    process = holds(run.output.folder)
    for how in ("resume", "overwrite"):
        with pytest.raises(SettingsError, match=rf"process {process.pid} on .*or give another output.folder"):
            train(run, **{how: True})
    assert sorted(run.output.folder.rglob("*")) == sorted([*before, run.output.folder / "lock"])
