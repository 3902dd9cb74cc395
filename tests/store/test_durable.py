"""What a folder of rows promises whoever opens it again, and what it refuses."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import KEYS, array, held, ones

from hotrow import Embeddings, Feature, Table
from hotrow.errors import StoreError
from hotrow.store.optimizers import SGD, Adam
from hotrow.store.snapshot import Snapshot, read_manifest
from hotrow.store.store import Cut, RowStore
from hotrow.table import ByCount, Eviction, Fill, Uniform
from hotrow.tiers import HostTier

TABLE = Table(name="t", dim=3, optimizer=Adam(), init=Uniform())


def reopened(store: RowStore) -> RowStore:
    store.close()
    return RowStore(store.table, store.seed, store.folder)


@settings(max_examples=40)
@given(calls=st.lists(st.tuples(st.sampled_from("fueirc"), KEYS), max_size=12))
def test_a_folder_holds_what_a_store_in_memory_holds_whenever_it_is_opened_again(tmp_path_factory, calls):
    kept = RowStore(TABLE, folder=tmp_path_factory.mktemp("rows"))
    plain = RowStore(TABLE)
    for step, (what, keys) in enumerate(calls):
        for store in (kept, plain):
            if what == "f":
                store.fetch(array(keys), step)
            elif what == "u":
                store.update(array(keys), ones(len(keys), 3), lr=0.1)
            elif what == "e":
                store.erase(array(keys))
            elif what == "i":
                store.write(array(keys), ones(len(keys), 3), step)
            elif what == "c":
                store.clear()
        if what == "r":
            kept = reopened(kept)
            assert kept.recovered == len(plain)
        assert held(kept) == held(plain)
        assert kept.steps == plain.steps
        assert (kept.read(array(keys)) == plain.read(array(keys))).all()
    kept.close()


def test_many_rows_are_found_again_and_grow_on(tmp_path):
    table = Table(name="t", dim=1, optimizer=SGD(), init=Fill())
    store = RowStore(table, folder=tmp_path)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 60_000, dtype=np.int64)
    store.fetch(keys, step=0)
    store.update(keys, np.arange(len(keys), dtype=np.float32)[:, None], lr=-1.0)
    store.erase(keys[:20_000])
    store = reopened(store)
    assert len(store) == store.recovered == 40_000
    assert (store.read(keys[20_000:])[:, 0] == np.arange(20_000, 60_000)).all()
    assert not store.contains(keys[:20_000]).any()
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    store.fetch(keys[:20_000], step=1)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == files, "erased rows leave their place to new ones"
    store.fetch(np.arange(200_000), step=1)
    assert len(reopened(store)) == 260_000


def test_counts_for_admission_are_kept(tmp_path):
    table = Table(name="t", dim=1, admission=ByCount(count=3, bytes=4096))
    store = RowStore(table, folder=tmp_path)
    for _ in range(2):
        store.fetch(array([7]), step=0)
        store = reopened(store)
        assert len(store) == 0
    store.fetch(array([7]), step=0)
    assert store.contains(array([7])).all()


def test_eviction_takes_the_same_rows_after_opening_again(tmp_path):
    table = Table(name="t", dim=1, eviction=Eviction(capacity=200))
    kept, plain = RowStore(table, folder=tmp_path), RowStore(table)
    rng = np.random.default_rng(1)
    for step in range(60):
        keys = np.unique(rng.zipf(1.3, 50) % 1000)
        kept.fetch(keys, step)
        plain.fetch(keys, step)
        if step % 9 == 0:
            kept = reopened(kept)
        assert held(kept) == held(plain)


def test_a_cut_given_up_by_a_dead_process_leaves_no_row_out_of_the_next(tmp_path):
    store = RowStore(TABLE, folder=tmp_path)
    store.fetch(np.arange(5000), step=0)
    for _ in range(3):  # the meaning of a row's "visited" flips with every cut
        before = held(store)
        store.begin_cut(Cut.FULL)
        store.native.read_snapshot(1000)
        store.update(np.arange(100), ones(100, 3), lr=0.0)
        store.update(np.arange(100), ones(100, 3), lr=0.0)
        store = reopened(store)
        assert held(store).keys() == before.keys()


def test_an_incremental_snapshot_after_opening_again_is_a_full_one(tmp_path):
    store = RowStore(TABLE, folder=tmp_path / "rows")
    store.fetch(np.arange(50), step=0)
    Snapshot(tmp_path / "a", [("t", store)], steps=1, seed=0).write()
    store.erase(np.arange(10))
    store = reopened(store)
    Snapshot(tmp_path / "b", [("t", store)], steps=2, seed=0, base=tmp_path / "a").write()
    manifest = read_manifest(tmp_path / "b")
    assert "base" not in manifest
    assert manifest["tables"][0]["rows"]["count"] == 40


def test_a_cut_under_way_still_gives_the_rows_of_before_a_clear(tmp_path):
    store = RowStore(TABLE, folder=tmp_path)
    store.fetch(np.arange(500), step=0)
    cut = store.begin_cut(Cut.PEEK)
    store.clear()
    store.fetch(np.arange(3), step=0)
    assert sorted(cut.read_snapshot(1000)["keys"]) == list(range(500))
    cut.end_snapshot(True)
    del cut
    assert len(reopened(store)) == 3
    assert len(list(tmp_path.glob("rows-*"))) == 1


def test_several_tables_share_a_folder_and_train_on(tmp_path):
    tables = [Table(name="a/b", dim=2), Table(name="lock", dim=4, dtype="bfloat16")]
    features = [Feature(name=t.name) for t in tables]
    tier = HostTier(tables, seed=3, folder=tmp_path)
    Embeddings(tables, features, seed=3, tiers={"host": tier})
    for store in tier.stores().values():
        store.fetch(np.arange(5), step=0)
    tier.close()
    again = HostTier(tables, seed=3, folder=tmp_path)
    assert [len(s) for s in again.stores().values()] == [5, 5]


def test_a_folder_is_opened_by_one_at_a_time(tmp_path):
    store = RowStore(TABLE, folder=tmp_path)
    with pytest.raises(StoreError, match=r"is in use: this process.*stop the other"):
        RowStore(TABLE, folder=tmp_path)
    store.close()
    RowStore(TABLE, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "u"}, "name t, but table u has u"),
        ({"dim": 4}, "dim 3, but table t has 4"),
        ({"dtype": "bfloat16"}, "dtype float32, but"),
        ({"optimizer": SGD()}, "optimizer adam, but table t has sgd"),
        ({"init": Fill(value=1.0)}, "init"),
        ({"admission": ByCount(count=2, bytes=8192)}, "admission"),
    ],
)
def test_a_folder_of_other_settings_is_refused(tmp_path, change, words):
    RowStore(TABLE, folder=tmp_path).close()
    with pytest.raises(StoreError, match=words):
        RowStore(TABLE.model_copy(update=change), folder=tmp_path)
    with pytest.raises(StoreError, match="seed 0, but table t has 1"):
        RowStore(TABLE, seed=1, folder=tmp_path)
    RowStore(TABLE.model_copy(update={"optimizer": Adam(lr=0.5)}), folder=tmp_path)


def truncate(path, to):
    os.truncate(path, to)


def spoil(path, to):
    data = bytearray(path.read_bytes())
    data[to:] = np.random.default_rng(0).integers(0, 256, len(data) - to, np.uint8).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "file", "to"),
    [
        (truncate, "head", 0),
        (truncate, "head", 100),
        (truncate, "head", 5000),
        (spoil, "head", 0),
        (spoil, "head", 72),
        (truncate, "rows-1-0000", 0),
        (truncate, "rows-1-0000", 20_000),
        (spoil, "rows-1-0000", 0),
        (spoil, "rows-1-0000", 16_384),
        (lambda path, _: path.unlink(), "rows-1-0000", 0),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, damage, file, to):
    store = RowStore(TABLE, folder=tmp_path)
    store.fetch(np.arange(1000), step=0)
    store.close()
    damage(tmp_path / file, to)
    with pytest.raises(StoreError, match=file):
        RowStore(TABLE, folder=tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot hold rows"):
        RowStore(TABLE, folder=tmp_path / "file" / "rows")
