"""What tests of pages share: a small data set and run folders over it."""

import pytest

from run_folders import data_set, run_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_set(tmp_path_factory.mktemp("report") / "clicks")


@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    """Two runs: one with a plan and all kinds of metrics, one with the least there can be."""
    folder = tmp_path_factory.mktemp("runs")
    cached = {
        "tier": "cached",
        "hits": 90,
        "misses": 10,
        "bytes_in": 5000,
        "bytes_out": 700,
        "staleness": {"0": 50, "3": 30, "100": 1},
    }
    links = {"within nodes": {"bytes_out": 900}, "across nodes": {"bytes_out": 80}}
    full = run_folder(folder / "full", data, planned=True, tiers=[cached, {"tier": "world", "links": links}])
    return full, run_folder(folder / "bare", data, machine=False, batch=64)
