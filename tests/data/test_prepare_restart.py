"""Killed anywhere, prepare goes on where it was and ends with the same bytes, whoever runs its tasks."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow import locks
from hotrow.data import Column, DataSet, Schema, prepare
from hotrow.data.prepare import TaskLost, engine, plan
from hotrow.data.prepare.cluster import _whole_sessions
from hotrow.data.prepare.plan import Work
from hotrow.data.sources import source
from hotrow.errors import DataError
from hotrow.train.progress import Progress

SCHEMA = Schema(
    label="y",
    dense=("d",),
    features=(Column(name="k"), Column(name="h", kind="keys")),
    session="s",
    time="t",
)
ROWS, PART = 6000, 1500
# Small slices make many tasks; the workers of a real command take them from the work folder.
COMMAND = """
import sys
from hotrow.data import Schema, prepare
from hotrow.data.prepare import engine
from hotrow.data.sources import source
from hotrow.train.progress import Progress

class Said(Progress):
    def step(self, done, samples, loss):
        print("step", flush=True)

source.SLICE_BYTES, engine._SMALL = 1, 0
log, out, schema = sys.argv[1:]
prepare(log, out, schema=schema, part=1500, row_group=500, workers=2, memory="2GiB", progress=Said())
"""


@pytest.fixture
def log(tmp_path):
    """Sessions that overlap, with histories that slide."""
    rng = np.random.default_rng(0)
    session = rng.integers(0, 60, ROWS) + np.arange(ROWS) // 1000 * 1000
    history = [list(range(s, s + 10 + t % 3)) for t, s in enumerate(session.tolist())]
    columns = {"y": rng.integers(0, 2, ROWS), "d": session % 7, "k": session % 50, "h": history, "s": session}
    pq.write_table(pa.table(columns | {"t": np.arange(ROWS)}), tmp_path / "log.parquet", row_group_size=1000)
    (tmp_path / "schema.json").write_text(SCHEMA.to_json())
    return tmp_path / "log.parquet"


@pytest.fixture
def many(monkeypatch):
    """A slice for each row group."""
    monkeypatch.setattr(source, "SLICE_BYTES", 1)


def made(log, out, **options):
    return prepare(log, out, schema=SCHEMA, **{"part": PART, "row_group": 500, **options})


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_killed_at_any_moment_and_run_again_it_ends_with_the_same_files(log, tmp_path, many):
    made(log, tmp_path / "whole", memory="2GiB", workers=2)
    arguments = [sys.executable, "-c", COMMAND, str(log), str(tmp_path / "out"), str(tmp_path / "schema.json")]
    killed = 0
    for lines in (1, 3, 2, 4, 1, 1000):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
            for _ in range(lines):
                if not process.stdout.readline():
                    break
            else:
                process.send_signal(signal.SIGKILL)
                killed += 1
    assert process.returncode == 0
    assert killed >= 4
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.parquet", "out", "schema.json", "whole"]


class Stopped(BaseException):
    """As a signal would stop it."""


def test_stopped_before_or_after_any_note_it_goes_on_and_no_task_is_done_twice(log, tmp_path, many, monkeypatch):
    made(log, tmp_path / "whole")
    note, noted, stops = Work.note, [], 0

    def stopping(self, stage, number, result):
        if stops % 2 == 0:
            raise Stopped
        noted.append((stage, number))
        note(self, stage, number, result)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Work, "note", stopping)
        while not (tmp_path / "out").exists():
            try:
                made(log, tmp_path / "out")
            except Stopped:
                stops += 1
    assert len(noted) == len(set(noted)) == stops // 2 > 10
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_killed_when_all_was_done_but_the_cleaning_it_just_cleans(log, tmp_path, monkeypatch):
    place = Work.place

    def stopping(self, out):
        place(self, out)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Work, "place", stopping)
        with pytest.raises(Stopped):
            made(log, tmp_path / "out")
    assert (tmp_path / ".out.prepare").is_dir()
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    assert made(log, tmp_path / "out").samples("train") > 0
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    assert not (tmp_path / ".out.prepare").exists()


class Says(Progress):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"split": "none"}, "another split"), ({"dedup": False}, "another schema"), ({}, "another log")],
)
def test_another_command_over_a_half_done_folder_starts_anew_and_says_so(
    log, tmp_path, many, monkeypatch, options, what
):
    with monkeypatch.context() as patch:
        patch.setattr(Work, "place", lambda self, out: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            made(log, tmp_path / "out")
    if what == "another log":
        os.utime(log, (1, 1))
    progress = Says()
    made(log, tmp_path / "out", progress=progress, **options)
    assert what in progress.said[0] and "starts anew" in progress.said[0]
    made(log, tmp_path / "fresh", **options)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_the_same_command_says_that_it_goes_on(log, tmp_path, many, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Work, "place", lambda self, out: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            made(log, tmp_path / "out")
    progress = Says()
    made(log, tmp_path / "out", progress=progress)
    assert progress.said[0].startswith("Going on with an unfinished prepare: ")


def test_two_commands_never_work_in_one_folder(log, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_PATIENCE", 0)
    with (
        Work.beside(tmp_path / "out").locked(),
        pytest.raises(DataError, match=r"at work in .*: this process has had it since"),
    ):
        made(log, tmp_path / "out")
    assert made(log, tmp_path / "out").samples("train") > 0


@pytest.mark.parametrize(
    "left", [(), ("plan.json", "lock"), ("done/finish-000000.json", "plan.json", "lock"), ("lock",)]
)
def test_killed_while_it_cleans_or_after_that_the_same_command_gives_its_data_set(log, tmp_path, monkeypatch, left):
    with monkeypatch.context() as patch:
        patch.setattr(Work, "remove", lambda self: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            made(log, tmp_path / "out")
    work = tmp_path / ".out.prepare"
    for path in [path for path in work.rglob("*") if path.is_file() and str(path.relative_to(work)) not in left]:
        path.unlink()
    if not left:
        shutil.rmtree(work)
    before = content(tmp_path / "out")
    assert made(log, tmp_path / "out", memory="3GiB").samples("train") > 0
    assert content(tmp_path / "out") == before and not work.exists()
    for other in ({"split": "none"}, {"bad": "skip"}):
        with pytest.raises(DataError, match="is not empty"):
            made(log, tmp_path / "out", **other)
    (tmp_path / "out" / "train-00000.parquet").unlink()
    with pytest.raises(DataError, match="is not empty"):
        made(log, tmp_path / "out")
    made(log, tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("sizes", [[1], [7, 300, 2], [1000], [40, 1]])
def test_what_is_counted_does_not_depend_on_the_sizes_that_memory_gives(sizes):
    lengths = [1, 30, 3, 200, 5, 64, 64, 1, 90]  # some beyond 16 rows, and beyond four times as many
    session = np.repeat(np.arange(len(lengths)), lengths)
    samples = pa.table({"s": session, "at": np.arange(len(session))})

    def cut(sizes):
        starts = itertools.takewhile(
            lambda at: at < len(samples), itertools.accumulate(itertools.cycle(sizes), initial=0)
        )
        pieces = (samples.slice(at, size) for at, size in zip(starts, itertools.cycle(sizes)))
        return [table.column("at").to_pylist() for table in _whole_sessions(pieces, SCHEMA, 16)]

    found = cut(sizes)
    assert found == cut([len(samples)])
    assert [at for table in found for at in table] == list(range(len(samples)))
    whole = [[at for at in range(len(samples)) if session[at] == s] for s in range(len(lengths)) if lengths[s] <= 64]
    assert all(any(set(rows) <= set(table) for table in found) for rows in whole)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_command_that_waited_for_another_finds_its_data_set(log, tmp_path, monkeypatch, overwrite):
    flock = locks.fcntl.flock

    def after_another(handle, operation):
        monkeypatch.setattr(locks.fcntl, "flock", flock)
        made(log, tmp_path / "out")  # and deletes the folder whose lock is waited for
        flock(handle, operation)

    monkeypatch.setattr(locks.fcntl, "flock", after_another)
    assert made(log, tmp_path / "out", overwrite=overwrite).samples("train") > 0
    assert DataSet.open(tmp_path / "out").samples("train") > 0
    assert not (tmp_path / ".out.prepare").exists()


def test_workers_memory_and_slices_do_not_change_a_byte(log, tmp_path, monkeypatch):
    made(log, tmp_path / "one", memory="1GiB", workers=1)
    monkeypatch.setattr(source, "SLICE_BYTES", 1)
    monkeypatch.setattr(engine, "_SMALL", 0)
    made(log, tmp_path / "two", memory="3GiB", workers=3)
    one, two = (content(tmp_path / name) for name in ("one", "two"))
    assert set(one) == set(two)
    assert [name for name in one if one[name] != two[name]] == []


def test_the_first_fault_is_told_though_slices_are_converted_at_once(log, tmp_path, many, monkeypatch):
    monkeypatch.setattr(engine, "_SMALL", 0)
    table = pq.read_table(log)
    label = table.column("y").to_numpy().astype(float).copy()
    label[[2500, 5900]] = 7
    pq.write_table(table.set_column(0, "y", pa.array(label)), log, row_group_size=1000)
    with pytest.raises(DataError, match=r'row 2501: column "y" holds 7\.0'):
        made(log, tmp_path / "out", workers=2, memory="2GiB")
    assert not (tmp_path / ".out.prepare").exists()


def test_a_worker_that_is_killed_costs_a_sentence_and_no_work(log, tmp_path, many, monkeypatch):
    monkeypatch.setattr(engine, "_SMALL", 0)
    do = engine._Worker.do

    def killed(self, task):
        if task["stage"] == "route":
            self._process.kill()
        yield from do(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(engine._Worker, "do", killed)
        with pytest.raises(TaskLost, match="A worker was killed by signal 9 during route 0. What is done is kept"):
            made(log, tmp_path / "out")
    progress = Says()
    made(log, tmp_path / "out", progress=progress)
    made(log, tmp_path / "fresh")
    assert "Going on" in progress.said[0]
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_what_is_overwritten_stays_until_the_new_data_set_is_whole(log, tmp_path, monkeypatch):
    made(log, tmp_path / "out", split="none")
    with monkeypatch.context() as patch:
        patch.setattr(Work, "place", lambda self, out: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            made(log, tmp_path / "out", overwrite=True)
    assert DataSet.open(tmp_path / "out").samples("test") == 0
    with pytest.raises(DataError, match="is not empty"):
        made(log, tmp_path / "out")
    assert made(log, tmp_path / "out", overwrite=True).samples("test") > 0


def test_ray_runs_the_same_tasks_to_the_same_bytes(log, tmp_path, many):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'hotrow[ray]'")
    made(log, tmp_path / "local", workers=2, memory="2GiB")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        made(log, tmp_path / "ray", workers=2, memory="2GiB", engine="ray")
        bad = pq.read_table(log).to_pydict() | {"y": [5] * ROWS}
        pq.write_table(pa.table(bad), log)
        with pytest.raises(DataError, match=r'row 1: column "y" holds 5'):
            made(log, tmp_path / "refused", engine="ray")
    finally:
        ray.shutdown()
    assert content(tmp_path / "ray") == content(tmp_path / "local")
    assert not list(Path(tmp_path).glob(".*"))
