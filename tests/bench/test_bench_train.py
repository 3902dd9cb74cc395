"""The benchmark of whole runs on two cores, made small and run in this process."""

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from hotrow.bench import BENCHES, train, train_sides, train_torch
from hotrow.bench.claims import kind_of
from hotrow.bench.page import page
from hotrow.bench.rate import Measured, rate_of
from hotrow.data import DataSet
from hotrow.embedded import Embedded, PooledGroup
from hotrow.models import DLRMSettings, ModelInputs
from hotrow.run import load_run
from hotrow.table import Feature

SAMPLES = 12_000


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return train.ready(tmp_path_factory.mktemp("train"), SAMPLES)


@pytest.fixture
def one_process(monkeypatch, run_file):
    """Sides run here, on a log that is there already."""

    def one(side: str, file: Path, warm: int) -> Measured:
        before = torch.get_num_threads()
        try:
            return train_sides.SIDES[side](file, warm)
        finally:
            torch.set_num_threads(before)

    monkeypatch.setattr(train, "one", one)
    monkeypatch.setattr(train, "ready", lambda folder, samples: run_file)
    monkeypatch.setattr(train, "QUICK", train.QUICK._replace(warm=3))


def test_both_figures_are_taken_of_the_same_samples_on_every_side(one_process, run_file, monkeypatch):
    seen, add = {}, train._add
    monkeypatch.setattr(train, "_add", lambda report, found: (seen.update(found), add(report, found)))
    report = BENCHES["train"](True)
    assert [r["id"] for r in report["results"]] == ["train.cpu.vs_torch", "train.own_loop"]
    assert all(kind_of(r["id"]) == "product" and r["value"] > 0 for r in report["results"])
    twice = 2 * DataSet.open(load_run(run_file).data.path).samples("train")
    assert {m.samples for measured in seen.values() for m in measured} == {twice - 3 * 1024}
    assert "train.cpu.vs_torch" in page([json.loads(json.dumps(report))])


def test_two_cores_are_held_and_given_back():
    os = pytest.importorskip("os")
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not hold a process to some of its cores")
    before = os.sched_getaffinity(0)
    with train.two_cores():
        assert os.sched_getaffinity(0) == set(sorted(before)[:2])
    assert os.sched_getaffinity(0) == before


def test_the_peer_is_given_every_sample_of_the_split_with_its_keys_numbered(run_file):
    dataset = DataSet.open(load_run(run_file).data.path)
    features = train_torch.tables(dataset)
    log = train_torch.PlainLog.load(run_file.with_name(train_sides.PLAIN), features)
    bags, dense, labels = log.batch(0, len(log.labels))
    flat = pa.concat_tables(dataset.flat("train"))
    lengths = torch.diff(bags["history"][1], append=torch.tensor([len(bags["history"][0])]))
    ours = zip(lengths.tolist(), labels.tolist(), dense[:, 0].tolist(), strict=True)
    theirs = zip(*(flat.column(n).to_pylist() for n in ("history", "label", "dense_0")), strict=True)
    assert sorted(ours) == sorted((len(h), label, np.float32(d)) for h, label, d in theirs)
    users = np.unique(flat.column("user").to_numpy())
    assert log.rows["user"] == len(users) and set(bags["user"][0].tolist()) == set(range(len(users)))
    last = log.batch(len(labels) - 5, len(labels))
    assert torch.equal(last[0]["history"][0][last[0]["history"][1][-1] :], bags["history"][0][bags["history"][1][-1] :])


def test_the_peers_model_is_dlrm():
    names, settings = ("a", "b", "c"), DLRMSettings(bottom=(5,), top=(6, 4))
    ours = settings.build(ModelInputs([Feature(name=n) for n in names], dict.fromkeys(names, 4), 2))
    theirs = train_torch.Interactions(3, 4, 2, settings)
    with torch.no_grad():
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            a.copy_(b)
    rows, dense = torch.randn(7, 12), torch.randn(7, 2)
    embedded = Embedded([PooledGroup(names, (4, 4, 4), rows, None)], {})
    assert torch.allclose(theirs(rows, dense), ours(embedded, dense), atol=1e-6)


def test_steps_that_warm_up_do_not_count():
    measured = rate_of(iter([10, 10, 7]), warm=1)
    assert measured.samples == 17 and measured.seconds > 0
    assert Measured(0, 0.0).rate == 0


def test_a_side_that_takes_too_long_is_measured_so_far():
    assert rate_of(itertools.repeat(10), warm=1, limit_s=0).samples == 10
