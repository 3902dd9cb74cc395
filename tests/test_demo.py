"""The demo goes the whole way, can be repeated, and says the truth about how far it came."""

import json
from pathlib import Path

import pytest

from hotrow.data import DataSet
from hotrow.data.synth import SynthSettings
from hotrow.demo import demo
from hotrow.train.evaluate import evaluate_path


def test_the_demo_learns_and_leaves_what_it_says_it_left(tmp_path):
    small = SynthSettings(samples=40_000, users=200, items=100, vocabulary=20)
    said = demo(tmp_path, synth=small)
    assert 0.65 < said["auc"] <= said["best_auc"]
    assert said["log_loss"] >= said["best_log_loss"]
    assert DataSet.open(said["data"]).facts["best_auc"] == said["best_auc"]
    assert evaluate_path(Path(said["run"]))[2]["auc"] == said["auc"]
    assert json.loads(json.dumps(said)) == said

    again = demo(tmp_path, synth=small)
    timed = {"seconds", "samples_per_second"}
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in said.items() if k not in timed}


def test_the_demo_does_not_write_over_what_it_did_not_write(tmp_path):
    from hotrow.errors import DataError

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="not overwritten"):
        demo(tmp_path, synth=SynthSettings(samples=500, users=20, items=10))
    assert (tmp_path / "data" / "thesis.txt").read_text() == "mine"
