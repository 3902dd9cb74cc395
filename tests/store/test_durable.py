"""What a folder of rows promises whoever opens it again, and what it refuses."""

import os
import random
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import KEYS, array, held, ones

from hotrow import Embeddings, Feature, Table
from hotrow.errors import StoreError
from hotrow.store.journal import Journal
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


def test_rows_without_their_head_are_refused_and_not_emptied(tmp_path):
    store = RowStore(TABLE, folder=tmp_path)
    store.fetch(np.arange(1000), step=0)
    before = held(store)
    store.close()
    (tmp_path / "head").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"lacks its file head.*Put it back"):
        RowStore(TABLE, folder=tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "head")
    assert held(RowStore(TABLE, folder=tmp_path)) == before


COUNTED = Table(name="c", dim=4, optimizer=Adam(), admission=ByCount(count=2, bytes=4096))
RECORD = 20 + 4 + 2 * 4 * 4 + 4 * 4  # bytes of head, sum, state and values


def used(folder):
    """A folder of a table with rows that were updated, of a push and outside any, and erased; and what it holds."""
    store = RowStore(COUNTED, folder=folder / "rows")
    for step in range(2):
        store.fetch(np.arange(900), step)
    store.fetch(np.arange(900, 1000), step=2)
    store.update(np.arange(300), ones(300, 4), lr=0.1, push=Journal(folder).begin(b"a" * 16, 1).push)
    store.update(np.arange(300), ones(300, 4), lr=0.1)
    store.erase(np.arange(290, 300))
    return store


def contents(store):
    rows = {
        int(key): tuple(np.asarray(c[name]).reshape(len(c["keys"]), -1)[i].tobytes() for name in c)
        for c in store.export()
        for i, key in enumerate(c["keys"])
    }
    store.fetch(np.arange(1100), step=9)  # who gets a row goes by the counts for admission
    return rows, store.steps, store.contains(np.arange(1100)).tobytes()


def record_at(data, key, clock):
    """Where the record of a key is in a file of rows of COUNTED."""
    return next(at for at in range(16_384, len(data), RECORD) if data[at : at + 12] == struct.pack("<qI", key, clock))


def alter(data, chance):
    """One of the ways in which bytes at rest come to be others."""
    at, n = chance.randrange(len(data)), chance.randrange(1, 300)
    other = chance.randrange(len(data) - n)
    match chance.randrange(7):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + n]
        case 2:
            data[at : at + n] = data[other : other + n]
        case 3:
            data[at:at] = data[at : at + n]
        case 4:
            data[at : at + n] = bytes(len(data[at : at + n]))
        case _:
            data[at] ^= 1 << chance.randrange(8)
    return data


@pytest.mark.parametrize("tries", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_folder_altered_at_rest_is_refused_or_holds_what_it_held(tmp_path, tries):
    used(tmp_path / "a").close()
    shutil.copytree(tmp_path / "a", tmp_path / "plain")
    whole = contents(RowStore(COUNTED, folder=tmp_path / "plain" / "rows"))
    refused = 0
    for k in range(tries):
        chance = random.Random(k)
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "a" / "rows", tmp_path / "b")
        path = tmp_path / "b" / ("head" if k % 3 == 0 else "rows-1-0000")
        path.write_bytes(alter(bytearray(path.read_bytes()), chance))
        try:
            store = RowStore(COUNTED, folder=tmp_path / "b")
        except StoreError:
            refused += 1
            continue
        assert contents(store) == whole, k
        store.close()
    assert refused > tries / 2


@pytest.mark.parametrize("snapshot", [False, True])
def test_after_a_kill_rows_unused_since_the_last_snapshot_and_the_head_are_known_to_be_whole(tmp_path, snapshot):
    used(tmp_path).close()
    store = RowStore(COUNTED, folder=tmp_path / "rows")
    store.update(np.arange(100), ones(100, 4), lr=0.1)
    if snapshot:
        list(store.export())
    shutil.copytree(tmp_path / "rows", tmp_path / "killed")  # what a kill at this moment would leave
    rows, head = (tmp_path / "killed" / "rows-1-0000"), (tmp_path / "killed" / "head")
    whole_rows, whole_head = rows.read_bytes(), head.read_bytes()

    def is_refused(file, at):
        rows.write_bytes(whole_rows)
        head.write_bytes(whole_head)
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)
        try:
            RowStore(COUNTED, folder=tmp_path / "killed").close()
        except StoreError as error:
            return file.name in str(error)
        return False

    refused = [is_refused(rows, record_at(whole_rows, key, 3 if key < 100 else 2) + 40) for key in range(0, 290, 10)]
    assert refused == [snapshot] * 10 + [True] * 19
    words = whole_head.index(b'{"name": "c"') - (9 + 4 * 128) * 8  # where those with a sum begin
    assert all(is_refused(head, at) for at in (8, *range(words, words + 9 * 8 + 4 * 8, 8)))


def test_a_row_that_is_zeros_is_missed_also_after_a_kill(tmp_path):
    store = used(tmp_path)
    shutil.copytree(tmp_path / "rows", tmp_path / "killed")
    path = tmp_path / "killed" / "rows-1-0000"
    data = bytearray(path.read_bytes())
    at = record_at(data, 7, 2)
    data[at : at + RECORD] = bytes(RECORD)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="rows-1-0000 is truncated or altered"):
        RowStore(COUNTED, folder=tmp_path / "killed")
    store.close()


FULL_DISK = """
import os, sys
from pathlib import Path
import numpy as np
from hotrow import Table
from hotrow.errors import StoreError
from hotrow.store.store import RowStore
folder, table = Path(sys.argv[1]), Table(name="t", dim=64)
store = RowStore(table, folder=folder / "rows")
store.fetch(np.arange(1000), step=0)
store.close()
path = folder / "rows" / "rows-1-0000"
os.truncate(path, path.stat().st_size + (1 << 20))  # grown, and killed before it had space
left = os.statvfs(folder)
with (folder / "others").open("wb") as file:
    file.write(bytes(left.f_bavail * left.f_frsize - (64 << 10)))  # what is left is less than the file lacks
for whole in (False, True):
    try:
        store = RowStore(table, folder=folder / "rows")
        store.fetch(np.arange(4000), step=1)
        print(len(store))
    except StoreError as error:
        print(error)
    (folder / "others").unlink(missing_ok=True)
"""


def test_a_file_that_grew_and_got_no_space_is_a_sentence_on_a_full_disk(tmp_path):
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=3m none "$1" && shift && exec "$@"'
    try:
        subprocess.run([*mounted, mount, "sh", tmp_path / "disk", "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here, so there is no disk to fill")
    command = [*mounted, mount, "sh", tmp_path / "disk", sys.executable, "-c", FULL_DISK, tmp_path / "disk"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "rows-1-0000 lacks space" in said[0] and "Make room" in said[0]
    assert said[1] == "4000"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot hold rows"):
        RowStore(TABLE, folder=tmp_path / "file" / "rows")
