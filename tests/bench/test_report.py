"""The form of a benchmark's result, and the page made of it."""

import pytest

from hotrow.bench.page import page
from hotrow.bench.report import add, figure, missing, new_report, reading, take_turns


def test_a_figure_is_met_from_its_must_on_and_in_its_own_direction():
    report = new_report("x", {})
    add(report, "a", 1.3, "x", must=1.3)
    add(report, "b", 1.29, "x", must=1.3)
    add(report, "c", 33, "bytes", must=32, better="lower")
    add(report, "d", 5, "x")
    assert [r["met"] for r in report["results"]] == [True, False, False, None]


def test_shares_are_told_to_the_fourth_place():
    assert [figure(v, u) for v, u in ((0.8942, "of bytes"), (21.0712, "x"), (0.00012, "AUC"))] == [
        "0.8942 of bytes",
        "21.07 x",
        "0.0001 AUC",
    ]


def test_a_reading_has_median_and_spread():
    found = reading([i / 1000 for i in range(1, 12)])
    assert found == {"median_ms": 6.0, "p10_ms": 2.0, "p90_ms": 10.0, "count": 11}


def test_sides_take_turns_with_the_same_calls(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    calls: list[tuple[str, int]] = []
    seconds = take_turns({"a": lambda i: calls.append(("a", i)), "b": lambda i: calls.append(("b", i))}, 3, 2)
    turn = [0, 1, 0, 1, 2]  # two to wake up, then those that count
    assert calls == [(side, i) for _ in range(2) for side in "ab" for i in turn]
    assert {name: len(s) for name, s in seconds.items()} == {"a": 6, "b": 6}


def test_the_page_says_what_was_not_reached_and_what_is_missing():
    report = new_report("store", {"tables": 26})
    add(report, "store.vs_torch", 5.0, "x", must=6, aim=10, ours=reading([0.001]), baseline=reading([0.005]))
    missing(report, "store.growth", "left out by --quick")
    text = page([report])
    assert "| store.vs_torch | 5.00 x | 6 | 10 | **no** | 1.00 ms (1.00 to 1.00) | 5.00 ms (5.00 to 5.00) |" in text
    assert "Not taken: store.growth (left out by --quick)." in text


@pytest.mark.filterwarnings("ignore")  # the peers' own, on import
@pytest.mark.parametrize("peer", ["fbgemm", "torch"])
def test_the_peers_of_the_store_benchmark_run(peer, monkeypatch):
    """One tiny step of each side, so that a change of a peer's interface is noticed here."""
    if peer == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed")
    import torch

    from hotrow.bench import store

    monkeypatch.setattr(store, "BATCH", 8)
    numbers = store.zipf_batches(50)[:1]
    make = {"fbgemm": store._fbgemm, "torch": store._embedding_bags}[peer]
    grad = torch.randn(8, store.TABLES * store.DIM)
    make(50, numbers, grad)(0)
    store._ours(50, numbers, grad)(0)


def test_arbitrary_keys_are_distinct_over_tables():
    import numpy as np

    from hotrow.bench.store import arbitrary_keys

    keys = np.concatenate([arbitrary_keys(t, np.arange(1000)) for t in range(5)])
    assert len(np.unique(keys)) == 5000
    assert (keys < 0).any()
    assert (keys > 2**32).any()
