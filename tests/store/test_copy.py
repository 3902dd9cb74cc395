"""Read-only copies of snapshots: every key reads as in the store the snapshot was taken of."""

import numpy as np
import pytest
import torch

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import CheckpointError
from hotrow.store.copy import Changes, after, read_only
from hotrow.store.optimizers import SGD, Adagrad, Adam
from hotrow.store.snapshot import chain, read_manifest
from hotrow.table import ByCount, Eviction

KEYS = np.arange(-20, 60, dtype=np.int64)
TABLES = {
    "adam": Table(name="item", dim=3, optimizer=Adam(lr=0.1)),
    "bfloat16": Table(name="item", dim=5, dtype="bfloat16", optimizer=Adagrad(lr=0.1)),
    "bounded": Table(name="item", dim=3, optimizer=SGD(lr=0.1), eviction=Eviction(capacity=10)),
    "admitted": Table(name="item", dim=3, admission=ByCount(count=2, bytes=4096)),
    "forgotten": Table(name="item", dim=3, eviction=Eviction(ttl=2)),
}


def trained(table):
    return Embeddings([table], [Feature(name="item")], seed=3)


def step(embeddings, random):
    batch = Batch.plain({"item": torch.from_numpy(random.choice(KEYS[10:50], 12))})
    embeddings(batch).vectors().square().sum().backward()
    embeddings.step()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_copy_reads_as_the_store_does_snapshot_after_snapshot(table, tmp_path):
    random, embeddings = np.random.default_rng(0), trained(table)
    copy = Embeddings([read_only(table)], [Feature(name="item")], seed=3)
    before = None
    for number in range(6):
        step(embeddings, random)
        folder = tmp_path / str(number)
        embeddings.snapshot(folder, tmp_path / str(number - 1) if number else None).write()
        since = chain(folder) if before is None else after(chain(folder), before)
        assert len(since) == 1
        Changes(since).apply(copy.router)
        copy.steps = embeddings.steps
        before = read_manifest(folder)["id"]
        wanted = embeddings.read("item", torch.from_numpy(KEYS))
        assert torch.equal(copy.read("item", torch.from_numpy(KEYS)), wanted)
        assert copy.stats()["item"]["rows"] == embeddings.stats()["item"]["rows"]


def test_a_snapshot_that_stands_on_others_comes_whole_and_one_off_the_chain_is_told(tmp_path):
    random, embeddings = np.random.default_rng(0), trained(TABLES["adam"])
    for number in range(3):
        step(embeddings, random)
        embeddings.snapshot(tmp_path / str(number), tmp_path / str(number - 1) if number else None).write()
    copy = Embeddings([read_only(TABLES["adam"])], [Feature(name="item")], seed=3)
    Changes(chain(tmp_path / "2")).apply(copy.router)
    keys = torch.from_numpy(KEYS)
    assert torch.equal(copy.read("item", keys), embeddings.read("item", keys))
    assert after(chain(tmp_path / "2"), "another") is None
    assert after(chain(tmp_path / "2"), read_manifest(tmp_path / "2")["id"]) == []


def test_nothing_changes_where_a_file_is_damaged(tmp_path):
    embeddings = trained(TABLES["adam"])
    step(embeddings, np.random.default_rng(0))
    embeddings.snapshot(tmp_path / "a").write()
    (file,) = (tmp_path / "a").glob("*item.arrow")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="altered"):
        Changes([tmp_path / "a"])
