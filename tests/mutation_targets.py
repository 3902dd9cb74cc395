"""What `mutations` damages: one line in `TARGETS` for each kind of folder or file that Hotrow reads back."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.data import DataSet, DataSetWriter, Reader
from hotrow.data.flat import arrow_schema
from hotrow.data.graph import Graph
from hotrow.plan import Plan, Share
from hotrow.profile import Profile
from hotrow.service.holding import Holding
from hotrow.store.optimizers import Adam
from hotrow.store.store import RowStore
from hotrow.table import ByCount
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from mutations import Target
from old_formats import data_set_of_version_2, graph_of_version_1, profile_of_version_1
from session_logs import SCHEMA, grouped

TABLES = [
    Table(name="item", dim=3, optimizer=Adam(lr=0.1)),
    Table(name="user", dim=2, dtype="bfloat16", admission=ByCount(count=2, bytes=4096)),
]
FEATURES = [Feature(name="item"), Feature(name="user")]


def flat_log(samples: int = 60) -> pa.Table:
    """Sessions of five with histories that slide, lists that stay and values that change."""
    at = np.arange(samples)
    session, place = at // 5, at % 5
    history = [list(range(s * 3, s * 3 + p)) for s, p in zip(session.tolist(), place.tolist(), strict=True)]
    tags = [[s, s + 1] for s in session.tolist()]
    weights = [[0.5 * len(bag)] * len(bag) for bag in history]
    columns: dict[str, Any] = dict.fromkeys(arrow_schema(SCHEMA).names, at)
    columns |= {"y": at % 2, "s": session, "user": session * 10**12, "city": session % 3, "age": session / 2}
    columns |= {"seen": history, "rated": history, "rated_weights": weights, "tags": tags, "marks": tags}
    columns |= {"marks_weights": [[1.0, 2.0]] * samples, "price": at / 4, "w": at + 1.0}
    return pa.table({f.name: pa.array(columns[f.name]).cast(f.type) for f in arrow_schema(SCHEMA)})


def make_data_set(folder: Path) -> None:
    with DataSetWriter(folder, grouped(), row_group=16, part=32) as writer:
        writer.write("train", flat_log())
        writer.write("test", flat_log(7))
        writer.facts["best_auc"] = 0.8


def read_data_set(folder: Path) -> str:
    digest, dataset = sha256(), DataSet.open(folder)
    digest.update(dataset.schema.to_json().encode() + json.dumps(dict(dataset.facts)).encode())
    for split in dataset.splits:
        digest.update(f"{split} {dataset.samples(split)}".encode())
        for table in dataset.flat(split):
            digest.update(repr(table.to_pydict()).encode())
        for batch in Reader(dataset, split, 8, window=2, threads=0):
            for group in batch.groups:
                digest.update(
                    repr(
                        [t if t is None else t.tolist() for t in (group.weights, group.inverse, group.begins)]
                    ).encode()
                )
                digest.update(group.values.numpy().tobytes() + group.offsets.numpy().tobytes())
            digest.update(batch.labels.numpy().tobytes())
    return digest.hexdigest()


def make_old_data_set(folder: Path) -> None:
    make_data_set(folder)
    data_set_of_version_2(folder)


def make_profile(folder: Path) -> None:
    Profile.of(flat_log(), grouped(), limit=40).save(folder, "fingerprint")


def read_profile(folder: Path) -> str:
    profile = Profile.load(folder, "fingerprint")
    found = profile.repetition
    digest = sha256(repr((found.samples, found.session_lengths, found.columns, found.groups)).encode())
    digest.update(found.changes.hashes.tobytes() + found.changes.bits.tobytes() + bytes([found.changes.halvings]))
    digest.update(repr(profile.table_of).encode())
    for name, counts in profile.keys.items():
        digest.update(name.encode() + b"".join(array.tobytes() for array in counts.arrays().values()))
    for name in profile.tables:
        digest.update(repr(profile.table(name).distinct).encode())
    return digest.hexdigest()


def make_old_profile(folder: Path) -> None:
    make_profile(folder)
    profile_of_version_1(folder)


def make_plan(folder: Path) -> None:
    hot = np.arange(100) * 7**9
    shares = {"item": (Share("device", hot), Share("middle", np.arange(5)), Share("host")), "user": (Share("host"),)}
    Plan(shares, {"item": 84, "user": 36}, {"memory": 512, "fingerprint": "f"}).save(folder / "a.plan")


def read_plan(folder: Path) -> str:
    plan = Plan.load(folder / "a.plan")
    keys = [
        (name, [(s.tier, s.keys is not None and s.keys.tolist()) for s in shares])
        for name, shares in plan.shares.items()
    ]
    return repr((keys, plan.row_bytes, plan.facts))


def make_graph(folder: Path) -> None:
    at = np.arange(120)
    Graph.of_pairs(("user", "item"), at % 40 * 7**9, at * at % 30).save(folder / "a.graph")


def read_graph(folder: Path) -> str:
    graph = Graph.load(folder / "a.graph")
    return repr((graph.between, [array.tolist() for side in graph.sides for array in side]))


def make_old_graph(folder: Path) -> None:
    make_graph(folder)
    graph_of_version_1(folder / "a.graph")


def make_checkpoint(folder: Path) -> None:
    embeddings, checkpoints = Embeddings(TABLES, FEATURES, seed=3), Checkpoints(folder, incremental=1)
    for step in (1, 2):
        for first in (0, 0, 1):
            keys = torch.arange(8) + first * step
            embeddings(Batch.plain({"item": keys, "user": keys})).vectors().square().sum().backward()
            embeddings.step()
        checkpoints.save(step, {"model/weight": torch.arange(6.0)}, {"step": step, "best": {"auc": 0.5}}, embeddings)
    checkpoints.wait()


def read_checkpoint(folder: Path) -> str:
    checkpoint = Checkpoint(folder / "step-00000002")
    digest = sha256(repr((checkpoint.step, checkpoint.state)).encode())
    for name, array in checkpoint.arrays().items():
        digest.update(name.encode() + array.numpy().tobytes())
    embeddings = Embeddings(TABLES, FEATURES, seed=3)
    embeddings.restore(checkpoint.rows)
    for tier in embeddings.router.tiers.values():
        for name, store in tier.stores().items():
            digest.update(repr((name, rows_in(store))).encode())
    return digest.hexdigest()


def rows_in(store: RowStore) -> list[tuple[Any, ...]]:
    """All that is known of each row, in the order of keys."""
    rows = []
    for c in store.export():
        columns = [c[k].reshape(len(c["keys"]), -1) for k in ("values", "state", "clocks", "uses", "last")]
        rows += [(key, *(k[i].tobytes() for k in columns)) for i, key in enumerate(c["keys"].tolist())]
    return sorted(rows)


CLIENT = b"c" * 16


def used_shard(folder: Path) -> Holding:
    """A shard's rows, updated by pushes of which one was not finished."""
    holding = opened_shard(folder)
    for step in (1, 2):
        for table, store in zip(TABLES, holding.stores, strict=True):
            store.fetch(np.arange(40) * step, step)
            ticket = holding.applied.begin(CLIENT, 2 * step + TABLES.index(table))
            assert ticket is not None
            store.update(np.arange(20), np.full((20, table.dim), 0.5, np.float32), lr=0.1, push=ticket.push)
            if table is TABLES[0] or step == 1:
                ticket.done()
        holding.stores[0].erase(np.arange(4))
    return holding


def opened_shard(folder: Path) -> Holding:
    holding = Holding(folder)
    holding.open([table.model_dump(mode="json") for table in TABLES], seed=3, shard=1, shards=2)
    return holding


def make_shard(folder: Path) -> None:
    used_shard(folder).close()


def make_killed_shard(folder: Path) -> None:
    """As a kill leaves it, after a snapshot."""
    beside = folder.with_name(f"{folder.name}-used")
    holding = used_shard(beside)
    for store in holding.stores:
        list(store.export())
    shutil.copytree(beside, folder)
    holding.close()


def read_shard(folder: Path) -> str:
    holding = opened_shard(folder)
    digest = sha256(repr([holding.applied.was_applied(CLIENT, n) for n in range(8)]).encode())
    for store in holding.stores:
        digest.update(f"{store.steps} {rows_in(store)}".encode())
    holding.close()
    return digest.hexdigest()


TARGETS = {
    "data set": Target(make_data_set, read_data_set),
    "data set of version 2": Target(make_old_data_set, read_data_set, checked=False),
    "profile": Target(make_profile, read_profile),
    "profile of version 1": Target(make_old_profile, read_profile, checked=False),
    "plan": Target(make_plan, read_plan),
    "graph": Target(make_graph, read_graph),
    "graph of version 1": Target(make_old_graph, read_graph, checked=False),
    "checkpoint": Target(make_checkpoint, read_checkpoint),
    "shard": Target(make_shard, read_shard),
    "shard that was killed": Target(make_killed_shard, read_shard),
}
