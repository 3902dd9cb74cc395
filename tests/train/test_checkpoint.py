"""Checkpoints: complete or not there, checked when read, pruned without breaking a chain."""

import contextlib
import errno
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import CheckpointError, MissedError
from hotrow.plan import Plan
from hotrow.sealed import to_text
from hotrow.service.shard import Shard
from hotrow.train.checkpoint import Checkpoint, Checkpoints, chain_of
from serving import served


class Rows:
    """Stands in for `Embeddings`: a snapshot is a file and a manifest, and can be held up or fail."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.error = None
        self.bases = []
        self.aborted = 0

    def snapshot(self, folder: Path, base: Path | None = None):
        self.bases.append(base)
        return _Snapshot(self, folder)


class _Snapshot:
    def __init__(self, rows, folder):
        self.rows, self.folder = rows, folder

    def write(self):
        assert self.rows.go.wait(30)
        self.folder.mkdir()
        (self.folder / "item.arrow").write_bytes(b"rows")
        if self.rows.error is not None:
            raise self.rows.error
        (self.folder / "manifest.json").write_text("{}")

    def abort(self):
        self.rows.aborted += 1


ARRAYS = {"model/weight": torch.arange(6.0).reshape(2, 3), "optimizer/weight/step": torch.tensor(4.0)}
STATE = {"step": 4, "best": None, "metrics": {"auc": 0.5}}


def save(checkpoints, step, rows=None, **kwargs):
    checkpoints.save(step, ARRAYS, STATE, rows or Rows(), **kwargs)
    checkpoints.wait()


def names(checkpoints):
    return [p.name for p in checkpoints.all()]


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    checkpoint = Checkpoint(checkpoints.latest())
    assert checkpoint.step == 4
    assert checkpoint.state == STATE
    arrays = checkpoint.arrays()
    assert arrays.keys() == ARRAYS.keys()
    assert all(torch.equal(arrays[name], ARRAYS[name]) for name in ARRAYS)


def test_no_checkpoint_is_seen_before_it_is_complete(tmp_path):
    checkpoints, rows = Checkpoints(tmp_path), Rows()
    rows.go.clear()
    checkpoints.save(4, ARRAYS, STATE, rows)
    assert checkpoints.busy
    assert checkpoints.latest() is None
    rows.go.set()
    checkpoints.wait()
    assert names(checkpoints) == ["step-00000004"]


def test_what_a_killed_process_left_is_not_a_checkpoint_and_is_cleaned_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    shutil.copytree(checkpoints.latest(), tmp_path / ".step-00000006")
    half_removed = tmp_path / "step-00000002"
    shutil.copytree(checkpoints.latest(), half_removed)
    (half_removed / "manifest.json").unlink()
    assert checkpoints.latest().name == "step-00000004"
    checkpoints.clean()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004"]


@pytest.mark.parametrize("name", ["dense.npz", "trainer.json", "rows/manifest.json"])
@pytest.mark.parametrize("harm", ["truncate", "alter", "remove"])
def test_a_harmed_file_is_refused_by_its_name(tmp_path, name, harm):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    path = checkpoints.latest() / name
    content = bytearray(path.read_bytes())
    if harm == "truncate":
        path.write_bytes(content[:-1])
    elif harm == "alter":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(checkpoints.latest())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "hotrow-checkpoint", "version": 1}'])
def test_a_harmed_manifest_is_refused(tmp_path, text):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    (checkpoints.latest() / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json (was altered or truncated|cannot be read)"):
        Checkpoint(checkpoints.latest())


def test_a_checkpoint_of_version_1_is_read_and_an_altered_step_is_refused(tmp_path):
    """Version 1 had no checksum of the manifest."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    path = checkpoints.latest() / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "step": 5}))
    with pytest.raises(CheckpointError, match="was altered or truncated"):
        Checkpoint(checkpoints.latest())
    del manifest["checksum"]
    path.write_text(json.dumps({**manifest, "version": 1}))
    assert Checkpoint(checkpoints.latest()).step == 4


def test_checkpoints_that_build_on_each_other_are_refused(tmp_path):
    for step, base in ((1, 2), (2, 1)):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        files = {name: {"bytes": 0, "sha256": ""} for name in ("dense.npz", "trainer.json", "rows/manifest.json")}
        manifest = {"format": "hotrow-checkpoint", "version": 2, "step": step, "base": f"step-{base}", "files": files}
        (folder / "manifest.json").write_text(to_text(manifest))
    with pytest.raises(CheckpointError, match="builds on a checkpoint, .*, that builds on it"):
        chain_of(tmp_path / "step-1")


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    path = checkpoints.latest() / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        Checkpoint(checkpoints.latest())


def test_arrays_that_would_need_unpickling_are_refused(tmp_path):
    import numpy as np

    from hotrow.train import checkpoint as module

    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4)
    folder = checkpoints.latest()
    np.savez(folder / "dense.npz", harmful=np.array([{"a": 1}], dtype=object))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["dense.npz"] = module._described(folder / "dense.npz")
    del manifest["checksum"]
    (folder / "manifest.json").write_text(to_text(manifest))
    with pytest.raises(CheckpointError, match=r"dense\.npz"):
        Checkpoint(folder).arrays()


def test_the_newest_are_kept_and_the_protected_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        save(checkpoints, step, protect=2 if step > 1 else None)
    assert names(checkpoints) == ["step-00000002", "step-00000005", "step-00000006"]


def test_the_base_of_a_kept_incremental_checkpoint_is_kept(tmp_path):
    checkpoints, rows = Checkpoints(tmp_path, keep=1, incremental=2), Rows()
    for step in range(1, 6):
        save(checkpoints, step, rows)
    assert [base and base.parent.name for base in rows.bases] == [
        None,
        "step-00000001",
        "step-00000002",
        None,
        "step-00000004",
    ]
    assert names(checkpoints) == ["step-00000004", "step-00000005"]
    assert [p.name for p in chain_of(checkpoints.latest())] == ["step-00000004"]


def test_a_full_disk_leaves_nothing_behind_and_is_said_in_a_sentence(tmp_path):
    checkpoints, rows = Checkpoints(tmp_path), Rows()
    save(checkpoints, 2, rows)
    rows.error = OSError(errno.ENOSPC, "No space left on device")
    checkpoints.save(4, ARRAYS, STATE, rows)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.wait()
    assert "step 4" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert "step-00000002" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002"]
    assert rows.aborted == 1
    rows.error = None
    save(checkpoints, 4, rows)
    assert names(checkpoints) == ["step-00000002", "step-00000004"]


def test_a_checkpoint_that_was_missed_can_be_taken_again(tmp_path):
    checkpoints, rows = Checkpoints(tmp_path), Rows()
    rows.error = MissedError("a shard was started anew")
    save(checkpoints, 4, rows)
    assert checkpoints.missed == "a shard was started anew"
    assert list(tmp_path.iterdir()) == []
    rows.error = None
    save(checkpoints, 5, rows)
    assert checkpoints.missed == ""
    assert names(checkpoints) == ["step-00000005"]


def test_a_shard_that_was_started_anew_while_it_gave_its_rows_costs_the_snapshot_and_not_the_next(tmp_path):
    tables = [Table(name="item", dim=2), Table(name="user", dim=2)]
    first = contextlib.ExitStack()
    shard = first.enter_context(Shard("tcp://127.0.0.1:*", folder=tmp_path / "rows"))
    with first, served([shard.address], tables) as tier:
        ours = Embeddings(
            tables,
            [Feature(name="item"), Feature(name="user")],
            tiers={"served": tier},
            plan=Plan.all_on("served", tables),
        )
        batch = Batch.plain({"item": torch.arange(9), "user": torch.arange(9)})
        ours(batch).vectors().sum().backward()
        ours.step()
        begun = ours.snapshot(tmp_path / "first")
        first.close()
        with Shard(shard.address, folder=tmp_path / "rows"):
            with pytest.raises(MissedError, match="Nothing of it is left"):
                begun.write()
            ours.snapshot(tmp_path / "second").write()
            alone = Embeddings(tables, list(ours.features.values()))
            alone.restore(tmp_path / "second")
            assert torch.equal(alone.read("item", torch.arange(9)), ours.read("item", torch.arange(9)))
    assert not (tmp_path / "first").exists()


def test_an_unexpected_error_in_the_background_is_not_swallowed(tmp_path):
    checkpoints, rows = Checkpoints(tmp_path), Rows()
    rows.error = ZeroDivisionError("a bug")
    checkpoints.save(4, ARRAYS, STATE, rows)
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_cannot_be_started_is_what_is_said(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def fail(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpoints.save(4, ARRAYS, STATE, Rows())
    checkpoints.wait()
    save(checkpoints, 4)
    assert names(checkpoints) == ["step-00000004"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        Checkpoint(tmp_path)
