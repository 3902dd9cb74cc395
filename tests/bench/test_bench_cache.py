"""A worker of the benchmark of caches is a rank of a run, here the only one, on a shard of this machine."""

import io
import json

import numpy as np
import pytest

from hotrow.bench.cache_worker import Work, main
from hotrow.bench.drawn import drawn_log
from hotrow.service.local import ShardProcess
from hotrow.tiers.cache_check import Checker

BATCH, WARM, STEPS, KEYS = 16, 3, 8, 50


@pytest.fixture
def work(tmp_path):
    """On a log of which half of the rows are on the shard before anything counts, a fifth of those in the cache."""
    keys = np.random.default_rng(0).integers(0, KEYS, ((WARM + STEPS) * BATCH, 2))
    np.savez(
        tmp_path / "fill.npz",
        **{f"all.c{t}": np.arange(KEYS // 2) for t in range(2)},
        **{f"clocks.c{t}": np.full(KEYS // 2, 1000) for t in range(2)},
        **{f"hot.c{t}": np.arange(KEYS // 10) for t in range(2)},
    )
    with ShardProcess() as shard:
        yield Work(
            shard=shard.address,
            key="",
            batch=BATCH,
            data=str(drawn_log(tmp_path, "log", keys).path),
            data_steps=[],
            model={"name": "wide_deep", "deep": [8]},
            dim=4,
            fill=str(tmp_path / "fill.npz"),
            warm=WARM,
            steps=STEPS,
            cache={"capacity": 40, "policy": "lfu"},
            clock=100,
            checked=str(tmp_path / "checked.npz"),
        )


def said_by(work: Work, monkeypatch, capsys) -> dict:
    monkeypatch.setattr("sys.stdin", io.StringIO("go\ngo\n"))
    main(work)
    warm, said = capsys.readouterr().out.splitlines()
    assert warm == "warm"
    return json.loads(said)


def test_a_worker_trains_through_its_cache_and_its_reads_are_checked(work, tmp_path, monkeypatch, capsys):
    said = said_by(work, monkeypatch, capsys)
    counters = said["counters"]
    assert counters["hits"] > 0, "rows that were filled in are hit"
    assert counters["misses"] > 0 and said["exchange_s"] > 0, "the cache does not hold all"
    with np.load(tmp_path / "checked.npz") as seen:
        assert seen["reads"].shape[1] > 0
    assert Checker.load([tmp_path / "checked.npz"], 100).violations() == 0


def test_without_a_cache_every_row_is_asked_for(work, monkeypatch, capsys):
    plain = Work(**{**vars(work), "cache": None, "fill": "", "checked": ""})
    said = said_by(plain, monkeypatch, capsys)
    assert "hits" not in said["counters"]
    assert said["counters"]["bytes_in"] >= STEPS * 2 * 4 * 4 and said["exchange_s"] > 0


def test_a_cache_is_bounded_by_the_policy_and_none_is_in_step(work, tmp_path):
    assert work.settings(tmp_path)["policy"] == {"name": "bounded", "clock": 100}
    plain = Work(**{**vars(work), "cache": None}).settings(tmp_path)
    assert plain["policy"] == {"name": "sync"} and "cache" not in plain["cluster"]
