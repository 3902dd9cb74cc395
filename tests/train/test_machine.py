"""Lines about the machine: phases add up, memory is that of this process, tiers are asked for their counts."""

import threading
from types import SimpleNamespace

import pytest
import torch

from hotrow.train import machine
from hotrow.train.logs import RunFolder
from hotrow.train.machine import Machine, memory_bytes
from hotrow.train.phases import Phases
from hotrow.train.trainer import train


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by one second each time it is looked at."""
    now = iter(range(10**6))
    monkeypatch.setattr("hotrow.train.phases.time.perf_counter", lambda: float(next(now)))


def test_phases_add_up_and_begin_anew_when_taken(clock):
    phases = Phases()
    for _ in range(3):
        with phases("model"):
            pass
    with pytest.raises(ValueError), phases("fetch"):
        raise ValueError
    assert phases.take() == {"model": 3.0, "fetch": 1.0}
    assert phases.take() == {}


def test_making_items_is_counted_and_using_them_is_not(clock):
    phases = Phases()
    for _ in phases.each("read", iter("abc")):
        phases.add("model", 10.0)
    assert phases.take() == {"read": 3.0, "model": 30.0}


def test_threads_can_add_at_once():
    phases = Phases()
    threads = [threading.Thread(target=lambda: [phases.add("read", 1.0) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert phases.take() == {"read": 2000.0}


def test_a_line_counts_the_steps_since_the_last_one():
    tiers = {"host": SimpleNamespace(counters=dict), "device": SimpleNamespace(counters=lambda: {"hits": 3})}
    embeddings = SimpleNamespace(
        stats=lambda: {"a": {"rows": 2, "bytes": 30}, "b": {"rows": 1, "bytes": 12}},
        router=SimpleNamespace(tiers=tiers),
    )
    phases = Phases()
    lines = Machine(embeddings, phases, torch.device("cpu"))
    phases.add("model", 99.0)
    lines.begin(10)
    phases.add("model", 1.5)
    (kind, said), tier = lines.lines(14)
    assert kind == "machine" and said["steps"] == 4 and said["seconds_model"] == 1.5
    assert (said["table_rows"], said["table_bytes"]) == (3, 42) and "gpu_bytes" not in said
    assert tier == ("tier", {"tier": "device", "hits": 3})
    assert lines.lines(15)[0][1]["steps"] == 1


def test_memory_is_that_of_this_process(monkeypatch, tmp_path):
    held = memory_bytes()
    assert 10 << 20 < held < 1 << 40
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "nowhere")
    assert memory_bytes() >= held // 2  # the most there ever was


def test_a_run_writes_where_its_time_went(make_run):
    run = make_run(train__steps=8)
    train(run)
    found = [line for line in RunFolder(run.output.folder).lines() if line["kind"] == "machine"]
    assert [line["steps"] for line in found] == [4, 4]
    for phase in ("wait", "fetch", "model", "update", "read", "group"):
        assert sum(line.get(f"seconds_{phase}", 0) for line in found) > 0
    assert found[-1]["table_rows"] >= found[0]["table_rows"] > 0
