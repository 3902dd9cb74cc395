"""Snapshots: one moment, nothing half-written, every alteration noticed, any shape to any shape."""

import errno
import json
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import CheckpointError, StoreError
from hotrow.plan import Plan, Share
from hotrow.store import snapshot as snapshots
from hotrow.store.optimizers import SGD, Adam
from hotrow.table import ByCount, Eviction
from hotrow.tiers import DeviceTier, HostTier
from shapes import cases

TABLES = [Table(name="item", dim=3, optimizer=Adam(lr=0.1)), Table(name="a/b c", dim=2, dtype="bfloat16")]
FEATURES = [Feature(name="item"), Feature(name="other", table="a/b c")]


def step(embeddings: Embeddings, keys: list[int]) -> None:
    batch = Batch.plain({name: torch.tensor(keys) for name in embeddings.features})
    embeddings(batch).vectors().square().sum().backward()
    embeddings.step()


def trained(steps: int = 3) -> Embeddings:
    embeddings = Embeddings(TABLES, FEATURES, seed=3)
    for i in range(steps):
        step(embeddings, [i, i + 1, 2**40 + i, -i])
    return embeddings


def contents(embeddings: Embeddings) -> dict[tuple[str, int], tuple]:
    """Every row with state and clocks, whichever tier it is on."""
    found = {}
    for tier in embeddings.router.tiers.values():
        for name, store in tier.stores().items():
            for c in store.export():
                n = len(c["keys"])
                parts = [c[k].reshape(n, -1) for k in ("values", "state", "clocks", "uses", "last")]
                for i, key in enumerate(c["keys"].tolist()):
                    found[name, key] = tuple(part[i].tobytes() for part in parts)
    return found


@given(cases(), st.sampled_from(["float32", "bfloat16"]))
def test_a_snapshot_restores_every_row_its_state_and_its_clocks(tmp_path_factory, case, dtype):
    folder = tmp_path_factory.mktemp("snapshot")
    tables = [t.model_copy(update={"dtype": dtype}) for t in case.tables]
    ours, other = (Embeddings(tables, case.features, seed=1) for _ in range(2))
    for batch in case.batches[:2]:
        embedded = ours(batch)
        total = [embedded.vector(n).sum() for n in embedded.pooled_features]
        total += [embedded.sequence(n).values.sum() for n in embedded.sequence_features]
        torch.stack(total).sum().backward()
        ours.step()
    ours.snapshot(folder / "rows").write()
    other.restore(folder / "rows")
    assert contents(other) == contents(ours)
    assert other.steps == ours.steps


def test_training_goes_on_while_a_snapshot_is_written(tmp_path):
    ours, expected = trained(), contents(trained())
    cut = ours.snapshot(tmp_path / "rows")
    step(ours, [0, 1, 2, 77])
    thread = threading.Thread(target=cut.write)
    thread.start()
    step(ours, [1, 2, 3, 78])
    thread.join()
    other = Embeddings(TABLES, FEATURES, seed=3)
    other.restore(tmp_path / "rows")
    assert contents(other) == expected


def test_a_run_restored_from_a_snapshot_goes_on_bit_for_bit(tmp_path):
    ours = trained()
    ours.snapshot(tmp_path / "rows").write()
    other = Embeddings(TABLES, FEATURES, seed=3)
    other.restore(tmp_path / "rows")
    for embeddings in (ours, other):
        for i in range(5):
            step(embeddings, [i, 5 - i, 1000])
    assert contents(ours) == contents(other)


def test_incremental_snapshots_replay_changes_and_erased_keys(tmp_path):
    table = Table(name="t", dim=2, optimizer=SGD(lr=1.0), eviction=Eviction(capacity=40))
    ours = Embeddings([table], [Feature(name="t")])
    step(ours, list(range(30)))
    ours.snapshot(tmp_path / "0").write()
    for i in range(1, 6):
        step(ours, list(range(i * 10, i * 10 + 12)))
        ours.snapshot(tmp_path / str(i), base=tmp_path / str(i - 1)).write()
        other = Embeddings([table], [Feature(name="t")])
        other.restore(tmp_path / str(i))
        assert contents(other) == contents(ours)
    counts = [json.loads((tmp_path / str(i) / "manifest.json").read_text())["tables"][0] for i in range(6)]
    assert all(c["rows"]["count"] == 12 for c in counts[1:])
    assert any("erased" in c for c in counts)


def test_admission_counts_survive(tmp_path):
    table = Table(name="t", dim=1, admission=ByCount(count=3))
    ours, other = (Embeddings([table], [Feature(name="t")]) for _ in range(2))
    step(ours, [5])
    step(ours, [5])
    ours.snapshot(tmp_path / "rows").write()
    other.restore(tmp_path / "rows")
    step(other, [5])
    assert other.stats()["t"]["rows"] == 1


def test_rows_of_one_tier_restore_to_two_and_back(tmp_path):
    plan = Plan({t.name: (Share("hot", np.array([0, 1, 2**40])), Share("cold")) for t in TABLES})
    two = Embeddings(
        TABLES,
        FEATURES,
        seed=3,
        tiers={"hot": HostTier(TABLES, 3), "cold": HostTier(TABLES, 3)},
        plan=plan,
    )
    one = trained()
    one.snapshot(tmp_path / "one").write()
    two.restore(tmp_path / "one")
    assert contents(two) == contents(one)
    assert len(two.router.tiers["hot"].stores()["item"]) == 3
    two.snapshot(tmp_path / "two").write()
    again = Embeddings(TABLES, FEATURES, seed=3)
    again.restore(tmp_path / "two")
    assert contents(again) == contents(one)


def test_the_files_are_plain_arrow_that_other_tools_read(tmp_path):
    ours = trained()
    ours.snapshot(tmp_path / "rows").write()
    with pa.ipc.open_file(tmp_path / "rows" / "000-item.arrow") as reader:
        table = reader.read_all()
    assert table.column_names == ["key", "values", "state", "clock", "uses", "last_used"]
    key = table["key"].to_pylist()
    row = np.array(table["values"].to_pylist()[key.index(1)], np.float32)
    np.testing.assert_array_equal(row, ours.read("item", torch.tensor([1]))[0].numpy())


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda f: _truncate(f / "000-item.arrow"),
            "000-item.arrow has .* bytes instead of .*: it is truncated",
        ),
        (lambda f: _flip(f / "000-item.arrow"), "000-item.arrow was altered"),
        (lambda f: (f / "001-a%2Fb%20c.arrow").unlink(), "001-a%2Fb%20c.arrow cannot be read: No such file"),
        (lambda f: (f / "manifest.json").unlink(), "holds no snapshot: there is no manifest.json"),
        (lambda f: _truncate(f / "manifest.json"), "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").write_text("{}"), "is not the manifest of a snapshot"),
        (
            lambda f: (f / "manifest.json").write_text('{"format": "hotrow-rows", "version": 99}'),
            "is of version 99; this release reads versions 1 to 2",
        ),
    ],
)
def test_a_harmed_snapshot_is_refused_by_name_and_changes_nothing(tmp_path, harm, message):
    trained().snapshot(tmp_path / "rows").write()
    harm(tmp_path / "rows")
    other = trained(steps=1)
    before = contents(other)
    with pytest.raises(CheckpointError, match=message):
        other.restore(tmp_path / "rows")
    assert contents(other) == before


@pytest.mark.parametrize(
    ("tables", "seed", "message"),
    [
        (TABLES[:1], 3, "has a table a/b c that this run's settings do not have"),
        ([*TABLES, Table(name="new", dim=1)], 3, "has no table new"),
        (
            [Table(name="item", dim=4), TABLES[1]],
            3,
            "Table item has dim 3 in .*, but 4 in this run's settings",
        ),
        ([Table(name="item", dim=3), TABLES[1]], 3, "has optimizer adam in .*, but rowwise_adagrad"),
        (TABLES, 4, "was made with seed 3, this run has seed 4"),
    ],
)
def test_a_snapshot_of_other_tables_is_refused(tmp_path, tables, seed, message):
    trained().snapshot(tmp_path / "rows").write()
    with pytest.raises(CheckpointError, match=message):
        Embeddings(tables, [], seed=seed).restore(tmp_path / "rows")


def test_a_base_that_was_replaced_is_noticed(tmp_path):
    ours = trained()
    ours.snapshot(tmp_path / "0").write()
    ours.snapshot(tmp_path / "1", base=tmp_path / "0").write()
    for file in (tmp_path / "0").iterdir():
        file.unlink()
    (tmp_path / "0").rmdir()
    trained().snapshot(tmp_path / "0").write()
    with pytest.raises(CheckpointError, match="builds on a snapshot that is no longer at"):
        ours.restore(tmp_path / "1")


def test_a_full_disk_leaves_nothing_behind_and_loses_no_change(tmp_path, monkeypatch):
    ours = trained()
    ours.snapshot(tmp_path / "0").write()
    step(ours, [1, 2])

    def full(self: object, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots._HashedFile, "write", full)
        with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
            ours.snapshot(tmp_path / "1", base=tmp_path / "0").write()
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
    ours.snapshot(tmp_path / "1", base=tmp_path / "0").write()
    other = Embeddings(TABLES, FEATURES, seed=3)
    other.restore(tmp_path / "1")
    assert contents(other) == contents(ours)


def test_an_incremental_snapshot_builds_on_the_last_one_and_no_other(tmp_path):
    ours = trained()
    ours.snapshot(tmp_path / "a").write()
    step(ours, [50])
    ours.snapshot(tmp_path / "b", base=tmp_path / "a").write()
    with pytest.raises(CheckpointError, match="a is not the last snapshot of table item"):
        ours.snapshot(tmp_path / "c", base=tmp_path / "a")
    stranger = trained()  # it knows nothing of the base, so its snapshot stands alone
    stranger.snapshot(tmp_path / "s", base=tmp_path / "b").write()
    assert "base" not in snapshots.read_manifest(tmp_path / "s")
    other = Embeddings(TABLES, FEATURES, seed=3)
    other.restore(tmp_path / "b")
    step(other, [51])
    other.snapshot(tmp_path / "c", base=tmp_path / "b").write()
    again = Embeddings(TABLES, FEATURES, seed=3)
    again.restore(tmp_path / "c")
    assert contents(again) == contents(other)


def test_a_restore_does_not_disturb_a_snapshot_under_way(tmp_path):
    ours, expected = trained(), contents(trained())
    ours.snapshot(tmp_path / "other").write()
    step(ours, [7])
    before = contents(ours)
    cut = ours.snapshot(tmp_path / "rows")
    ours.restore(tmp_path / "other")
    assert contents(ours) == expected
    cut.write()
    other = Embeddings(TABLES, FEATURES, seed=3)
    other.restore(tmp_path / "rows")
    assert contents(other) == before


def test_a_snapshot_that_cannot_begin_leaves_nothing_begun(tmp_path):
    ours = trained()
    export = ours.router.tiers["host"].stores()["a/b c"].export(chunk=1)
    next(export)
    with pytest.raises(StoreError, match="a/b c: a snapshot or export of it is already under way"):
        ours.snapshot(tmp_path / "rows")
    export.close()
    ours.snapshot(tmp_path / "rows").write()


def test_a_changed_admission_is_refused_before_anything_changes(tmp_path):
    counted = Table(name="t", dim=1, admission=ByCount(count=2, bytes=8192))
    ours = Embeddings([counted], [Feature(name="t")])
    step(ours, [1])
    ours.snapshot(tmp_path / "rows").write()
    for admission in (None, ByCount(count=2, bytes=4096)):
        other = Embeddings([counted.model_copy(update={"admission": admission})], [Feature(name="t")])
        step(other, [9])
        before = contents(other)
        with pytest.raises(CheckpointError, match="counts keys for admission differently"):
            other.restore(tmp_path / "rows")
        assert contents(other) == before


def test_admission_counts_of_every_tier_survive(tmp_path):
    table = Table(name="t", dim=1, admission=ByCount(count=2))
    plan = Plan({"t": (Share("hot", np.array([1])), Share("cold"))})

    def split() -> Embeddings:
        return Embeddings(
            [table], [Feature(name="t")], tiers={"hot": HostTier([table]), "cold": HostTier([table])}, plan=plan
        )

    ours, other = split(), split()
    step(ours, [1, 2])
    ours.snapshot(tmp_path / "rows").write()
    other.restore(tmp_path / "rows")
    step(other, [1, 2])
    assert other.stats()["t"]["rows"] == 2


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_eviction_with_a_time_to_live_goes_on_the_same_after_a_restore(tmp_path, policy):
    table = Table(name="t", dim=1, optimizer=SGD(lr=0.1), eviction=Eviction(capacity=100, policy=policy, ttl=12))
    rng = np.random.default_rng(0)
    batches = [rng.zipf(1.3, 40).clip(max=10_000).tolist() for _ in range(60)]

    def run(first: int, last: int, embeddings: Embeddings) -> Embeddings:
        for batch in batches[first:last]:
            step(embeddings, batch)
        return embeddings

    expected = run(0, 60, Embeddings([table], [Feature(name="t")]))
    keys = torch.arange(10_001)
    for cut in (17, 23, 31, 44):
        run(0, cut, Embeddings([table], [Feature(name="t")])).snapshot(tmp_path / str(cut)).write()
        resumed = Embeddings([table], [Feature(name="t")])
        resumed.restore(tmp_path / str(cut))
        run(cut, 60, resumed)
        assert torch.equal(resumed.read("t", keys), expected.read("t", keys))


def test_a_snapshot_given_up_does_not_hide_what_was_erased_before_it(tmp_path):
    tables = [Table(name="a", dim=2, optimizer=SGD(lr=1.0), eviction=Eviction(capacity=100))]
    embeddings = Embeddings(tables, [Feature(name="a")])
    step(embeddings, list(range(100)))
    embeddings.snapshot(tmp_path / "base").write()
    for i in range(1, 60):  # more is erased than a store remembers one by one
        step(embeddings, list(range(i * 100, i * 100 + 100)))
    embeddings.snapshot(tmp_path / "given up", base=tmp_path / "base").abort()
    embeddings.snapshot(tmp_path / "next", base=tmp_path / "base").write()
    restored = Embeddings(tables, [Feature(name="a")])
    restored.restore(tmp_path / "next")
    assert contents(restored) == contents(embeddings)


@pytest.mark.parametrize("order", [("device", "host"), ("host", "device")])
def test_tiers_restore_in_any_order_what_they_counted(tmp_path, order):
    counting = Table(name="a", dim=2, admission=ByCount(count=2, bytes=4096))
    tables = [counting, Table(name="b", dim=2)]
    plan = Plan({"a": (Share("host", None),), "b": (Share("device", np.arange(5)), Share("host", None))})

    def make() -> Embeddings:
        tiers = {"host": HostTier(tables), "device": DeviceTier(tables, plan.keys_on("device"))}
        features = [Feature(name="a"), Feature(name="b", table="b")]
        return Embeddings(tables, features, tiers={name: tiers[name] for name in order}, plan=plan)

    embeddings = make()
    for _ in range(3):
        keys = torch.arange(10)
        embeddings(Batch.plain({"a": keys, "b": keys})).vectors().sum().backward()
        embeddings.step()
    embeddings.snapshot(tmp_path / "cut").write()
    restored = make()
    restored.restore(tmp_path / "cut")
    for table in ("a", "b"):
        assert torch.equal(restored.read(table, keys), embeddings.read(table, keys))
