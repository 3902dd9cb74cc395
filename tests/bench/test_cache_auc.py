"""`hotrow bench cache_auc` on a log of a few thousand samples: what it says, and what drift does."""

import pytest
import torch

from executors import Here
from hotrow.bench import BENCHES, cache_auc
from hotrow.data import DataSet, prepare
from hotrow.data.synth import SynthSettings, write_log


@pytest.fixture
def small(tmp_path, monkeypatch) -> DataSet:
    write_log(SynthSettings(samples=6000, users=100, items=100, history_length=2, seed=1), tmp_path / "log")
    data = prepare(tmp_path / "log", tmp_path / "data", workers=1)
    monkeypatch.setattr(cache_auc, "_made_log", lambda *_: data)
    monkeypatch.setattr(cache_auc, "criteo_log", lambda *_: "it is not here")
    monkeypatch.setattr(cache_auc, "ProcessPoolExecutor", Here)
    return data


def test_it_tells_every_model_with_and_without_drift_and_the_gap(small):
    report = BENCHES["cache_auc"](True)
    found = {result["id"]: result for result in report["results"]}
    models = [f"cache.auc.{name}" for name in cache_auc.MODELS]
    assert set(found) == {
        *(f"{model}.{what}" for model in models for what in ("s0", "s100", "s100.drift0")),
        "cache.auc_gap",
        "cache.by_size.lfu.10%",
    }
    gap = found["cache.auc_gap"]
    assert gap["value"] == pytest.approx(max(abs(one) for (one,) in gap["ours"].values()), abs=1e-4)
    assert "bounds broken: 0" in found["cache.auc.dcnv2.s100"]["note"]


def test_drift_takes_a_short_run_nearer_to_s_0_and_costs_bytes(small):
    torch.set_num_threads(1)
    model, capacity = cache_auc.MODELS["dcnv2"], 40
    exact, near, far = (
        cache_auc.train(small.path, model, 0, clock, capacity, 32, drift=drift)
        for clock, drift in ((0, 0.0), (100, 0.02), (100, 0.0))
    )
    assert abs(near.auc - exact.auc) < abs(far.auc - exact.auc)
    assert exact.saved < near.saved < far.saved
    assert near.violations == far.violations == 0
