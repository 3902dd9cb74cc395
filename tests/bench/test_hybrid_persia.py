"""Without Persia the figure is missing for a reason that helps, and Hotrow's own side takes its turns."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from hotrow.bench import hybrid_persia
from hotrow.bench.hybrid_persia import TABLES, VARIABLE, Work
from hotrow.bench.persia_side import DENSE
from hotrow.bench.report import Report, new_report
from hotrow.service.local import ShardProcess


def taken() -> Report:
    report = new_report("hybrid", {})
    hybrid_persia.measure(report, quick=True)
    return report


def reason(report: Report) -> str:
    assert report["results"] == []
    ((id, why),) = ((one["id"], one["reason"]) for one in report["missing"])
    assert id == "hybrid.vs_persia"
    return str(why)


def test_without_the_variable_the_reason_says_how_to_make_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    why = reason(taken())
    assert VARIABLE in why
    assert "pip install persia==0.1.dev251" in why


def test_an_interpreter_without_persia_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    why = reason(taken())
    assert sys.executable in why
    assert "No module named 'persia'" in why


def test_an_interpreter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    assert "cannot be run" in reason(taken())


@pytest.mark.parametrize("served", [False, True])
def test_our_side_takes_turns_until_its_input_ends(tmp_path: Path, served: bool) -> None:
    draw, shape = np.random.default_rng(0), (3, 8)
    arrays = {
        "keys": draw.integers(0, 5, (*shape, TABLES)),
        "dense": draw.random((*shape, DENSE), np.float32),
        "labels": np.ones(shape, np.float32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = [str(tmp_path / f"{name}.npy") for name in arrays]
    work = json.dumps(asdict(Work(*files, warm=2, steps=4, batch=8)))
    with ShardProcess() as shard:
        command = [sys.executable, "-m", "hotrow.bench.hybrid_persia", shard.address if served else "", work]
        done = subprocess.run(command, input="1\n2\n", capture_output=True, text=True, check=True, timeout=120)
    ready, *turns = done.stdout.splitlines()
    assert ready == "ready"
    assert len(turns) == 2
    for said in map(json.loads, turns):
        assert said["samples_a_second"] > 0
        assert math.isfinite(said["loss"])
        assert said["staleness"]["batches_most"] <= 9
