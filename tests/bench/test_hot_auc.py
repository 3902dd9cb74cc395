"""The benchmark of AUC with hot rows, made small."""

import json
import re
from pathlib import Path

import pytest
import torch

from executors import Here
from hotrow.bench import BENCHES, hot, hot_auc
from hotrow.bench.hot_auc import Gap, Workload
from hotrow.bench.page import page
from hotrow.bench.real_logs import FOLDER


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(hot_auc, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(hot_auc, "SAMPLES", 225_000)
    monkeypatch.setattr(hot_auc, "JUDGE", 256)


def test_every_log_and_mode_has_a_figure_or_a_reason(small, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    if torch.cuda.is_available():
        pytest.skip("with a GPU the benchmark measures speed")
    report = BENCHES["hot"](True)
    found = {r["id"]: r for r in report["results"]}
    assert list(found) == ["hot.auc_gap.demo.split", "hot.auc_gap.demo.hot_cold", "hot.auc_gap"]
    assert {m["id"] for m in report["missing"]} == {
        "hot.vs_cpu",
        "hot.vs_cpu_gpu",
        "hot.vs_fbgemm_uvm",
        "hot.auc_gap.criteo.split",
        "hot.auc_gap.criteo.hot_cold",
    }
    assert "has no criteo.tsv.zst" in str(report["missing"])
    assert found["hot.auc_gap.demo.split"]["value"] <= 0.0005
    assert 0.2 < found["hot.auc_gap.demo.split"]["ours"]["hot"] < 0.999, "both tiers must have been used"
    assert 0.05 < found["hot.auc_gap.demo.hot_cold"]["ours"]["hot"] < 0.95, "there must have been both kinds"
    assert found["hot.auc_gap"]["value"] == max(r["value"] for r in report["results"])
    assert "hot.auc_gap" in page([json.loads(json.dumps(report))])


def test_a_gap_is_the_mean_of_the_differences_of_seeds():
    gap = Gap([0.70, 0.72], [0.71, 0.72], 0.5)
    assert gap.differences == pytest.approx([0.01, 0.0])
    assert gap.mean == pytest.approx(0.005)
    assert gap.error == pytest.approx(0.005)


def test_the_criteo_sample_trains_to_the_same_auc_split_over_tiers(shared_data: Path, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(shared_data))
    monkeypatch.setattr(hot_auc, "JUDGE", 256)
    criteo = hot_auc.criteo_log(tmp_path, quick=True)
    assert isinstance(criteo, Workload)
    short = criteo._replace(batch_size=4096, seeds={"plain": 1, "split": 1, "hot_cold": 1})
    gaps = hot_auc.gaps_of(short, tmp_path, Here())
    assert abs(gaps["split"].mean) <= 0.0005
    assert abs(gaps["hot_cold"].mean) <= 0.02, "one seed tells little; the benchmark takes the mean of many"
    assert 0.8 < gaps["split"].hot < 1
    assert 0 < gaps["hot_cold"].hot < 1


def test_every_figure_the_page_names_is_one_of_the_benchmarks():
    page_text = (Path(__file__).parents[2] / "docs" / "hot-rows.md").read_text()
    sources = "".join(Path(module.__file__).read_text() for module in (hot, hot_auc))
    figures = re.findall(r"^\| `(hot\.\w+)`", page_text, re.MULTILINE)
    assert len(figures) == 5
    assert [figure for figure in figures if f'"{figure}' not in sources] == []
