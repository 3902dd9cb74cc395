"""A rank that is killed: the others say whose fault it is, and torchrun's restart ends as if nothing had happened."""

import json
import os
import re
import subprocess
import sys

import pytest

from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train

# Trains as `hotrow train RUN.toml --resume`; the first time rank 1 kills itself in the middle of a step.
WORKER = """
import os, signal, sys
from hotrow.train.feed import Feed
update = Feed.update
def dies(self, batch):
    if self.step == 9:
        print(f"killed: process {os.getpid()}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    update(self, batch)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Feed.update = dies
sys.argv = ["hotrow", "train", sys.argv[1], "--resume", "--json"]
from hotrow.cli import main
main()
"""


def torchrun(tmp_path, run):
    """Two ranks that torchrun starts, and starts again once."""
    run_file, worker = run.output.folder.with_suffix(".toml"), tmp_path / "worker.py"
    run_file.write_text(run.to_toml())
    worker.write_text(WORKER)
    command = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, str(worker), str(run_file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def losses(run):
    return {line["step"]: line["loss"] for line in RunFolder(run.output.folder).lines() if line["kind"] == "train"}


def test_the_others_name_a_rank_that_dies_and_torchruns_restart_resumes(make_run, tmp_path):
    settings = {"model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}, "train__epochs": 1}
    whole = make_run(**settings, data__batch_size=128, output__folder=str(tmp_path / "whole"))
    expected = train(whole)
    run = make_run(
        **settings,
        data__batch_size=64,
        cluster={"rows": "sharded"},
        train__checkpoint_every=4,
        output__folder=str(tmp_path / "killed"),
    )
    done = torchrun(tmp_path, run)
    assert done.returncode == 0, done.stderr
    victim = re.search(r"killed: process (\d+)", done.stderr)
    assert victim is not None, done.stderr
    named = rf"Rank 1 \([^)]*process {victim[1]}\) is gone, so rank 0 stops too"
    assert re.search(named, " ".join(done.stderr.split())), done.stderr
    result, _ = json.JSONDecoder().raw_decode(done.stdout)  # each rank tells it
    assert (result["steps"], result["stopped"]) == (expected.steps, "end")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3)
    assert result["metrics"]["auc"] == pytest.approx(expected.metrics["auc"], abs=1e-3)
