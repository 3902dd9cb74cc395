"""Real processes: killed by SIGKILL in the middle of anything, stopped by SIGINT, out of disk."""

import resource
import signal
import subprocess
import sys

import pytest

from hotrow.train.trainer import train

# Runs `hotrow train --resume` and kills itself at the n-th change to the file system below a folder.
KILLED = """
import os, signal, sys
run_file, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
count = 0
def count_changes(event, args):
    global count
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and folder in str(args[0]):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count_changes)
sys.argv = ["hotrow", "train", run_file, "--resume"]
from hotrow.cli import main
main()
"""


def start(arguments, **kwargs):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, **kwargs)


def test_a_run_killed_again_and_again_ends_as_one_never_killed(make_run, tmp_path, same_weights):
    settings = {"train__epochs": 2, "train__evaluate_every": 10, "train__incremental": 1}
    whole = make_run(**settings, output__folder=str(tmp_path / "whole"))
    train(whole)

    run = make_run(**settings, train__checkpoint_every=2)
    run_file = tmp_path / "run.toml"
    run_file.write_text(run.to_toml())
    seen = []
    for changes in (25, 44, 63):
        killed = start(["-c", KILLED, run_file, run.output.folder, changes])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        seen.append(sorted(p.name for p in (run.output.folder / "checkpoints").iterdir()))
    assert any(name.startswith(".step-") for names in seen for name in names), "no kill hit a half-written one"
    result = train(run, resume=True)
    assert result.stopped == "end"
    same_weights(whole, run)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands in for a full disk")
def test_a_disk_that_is_full_stops_the_run_with_a_sentence_and_leaves_no_half_checkpoint(make_run, tmp_path):
    run = make_run(tables__dim=64, train__checkpoint_every=4)
    run_file = tmp_path / "run.toml"
    run_file.write_text(run.to_toml())
    small_files = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    done = start(["-c", "from hotrow.cli import main; main()", "train", run_file], preexec_fn=small_files)
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((run.output.folder / "checkpoints").iterdir()) == []
