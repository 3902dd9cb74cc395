"""The benchmark of rows over ranks, made small: what it times and counts is what it says."""

import json

import numpy as np
import pytest

from hotrow.bench import BENCHES, shard
from hotrow.bench.hosts import unavailable
from hotrow.bench.shard import Size, exchange_seconds
from hotrow.bench.shard_work import LightModel, Work
from hotrow.plan import Link, Topology

WORK = Work(tables=2, rows=500, dim=8, batch=16, length=10, zipf=1.05)
LARGER = Work(tables=2, rows=2000, dim=32, batch=128, length=40, zipf=1.05)
SMALL = Size(
    LARGER, turns=(1, 2), training=(1, 1), log_samples=0, log_batch=0, copies=(10, 50), seconds=100
)  # fmt: skip


def test_batches_are_fresh_and_the_same_for_whoever_draws_them_again():
    first, again, other, next_one = WORK.drawn(0, 0), WORK.drawn(0, 0), WORK.drawn(1, 0), WORK.drawn(0, 1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, next_one, strict=True))
    batch = WORK.batch_of(first)
    assert batch.size == 16 and batch.features == ("t0", "t1")


def test_the_law_says_what_batches_look_up():
    topology = Topology(nodes=2, ranks=2, memory=1 << 30, between=Link(bandwidth=1e8), within=Link(bandwidth=1e9))
    (used, _) = WORK.used(topology)
    drawn = [len(np.unique(WORK.drawn(0, number)[0])) for number in range(200)]
    assert used.lookups == pytest.approx(160)
    assert (used.keys * used.use.rank).sum() == pytest.approx(np.mean(drawn), rel=0.02)
    counts = np.bincount(np.concatenate([WORK.drawn(0, number)[0] for number in range(200)]), minlength=500)
    assert used.hot[0] == counts.argmax()


def test_the_model_weighs_every_row_of_a_history():
    import torch

    rows = [torch.randn(4, 10, 8, requires_grad=True) for _ in range(2)]
    LightModel(2, 8)(rows).sum().backward()
    assert all((r.grad.abs().sum(-1) > 0).all() for r in rows)


def test_an_exchange_is_timed_from_when_the_last_rank_has_come():
    early, late = [(0.0, 5.0), (6.0, 7.0)], [(4.0, 5.5), (6.0, 6.5)]
    assert exchange_seconds([early, late]) == pytest.approx(1.5 + 1.0)


def test_a_host_without_namespaces_names_what_it_cannot_show(monkeypatch):
    monkeypatch.setattr(shard, "unavailable", lambda: "network namespaces need root")
    report = BENCHES["shard"](True)
    lacking = {m["id"]: m["reason"] for m in report["missing"]}
    assert lacking["shard.bytes_saved"] == "network namespaces need root"
    assert {r["id"] for r in report["results"]} == {
        "shard.16x8.bytes_saved",
        "shard.16x8.bytes_saved_dedup",
        "shard.16x8.comm",
    }


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_hosts_exchange_what_was_predicted(monkeypatch):
    monkeypatch.setattr(shard, "QUICK", SMALL)
    monkeypatch.setattr(shard, "find_spec", lambda name: None)
    report = shard.run(quick=True)
    results = {r["id"]: r for r in report["results"]}
    assert 0 < results["shard.bytes_saved"]["value"] < 1
    assert results["shard.memory_same"]["value"] == 0 and results["shard.memory"]["met"]
    wanted = results["shard.bytes_error"]["ours"]["predicted / measured - 1"]
    assert set(wanted) == {
        f"zipf, {s}" for s in ("row-wise", "rank dedup", "same memory", "ours", "ours, bfloat16", "copies")
    }
    assert abs(wanted["zipf, row-wise"]) < 0.1
    assert {"id": "shard.vs_torchrec", "reason": "torchrec is not installed (make peers installs it)"} in report[
        "missing"
    ]
    json.dumps(report)


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_rank_that_fails_is_told_with_its_last_words(tmp_path):
    from hotrow.errors import HotrowError

    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(HotrowError, match=r"Rank \d ended with 1; it said: TypeError: .*work"):
        shard.on_hosts(tmp_path, 60)
