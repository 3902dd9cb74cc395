"""Run folders with metrics of every kind, made without training."""

import json

import numpy as np
import pyarrow as pa

from hotrow.data import Column, DataSetWriter, Schema
from hotrow.plan import Plan, Share
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.logs import RunFolder

SCHEMA = Schema(
    label="click",
    features=(Column(name="user"), Column(name="item"), Column(name="past", kind="keys", table="item")),
    session="user",
)


def data_set(path):
    """A small clustered log in which the user repeats; item 1 takes a third of the accesses."""
    random = np.random.default_rng(0)
    user = np.sort(random.integers(0, 50, 600))
    past = [random.integers(1, 40, 3) for _ in user]
    rows = {"click": random.integers(0, 2, 600).astype(np.float32), "user": user, "item": random.zipf(1.5, 600) % 90}
    with DataSetWriter(path, SCHEMA, row_group=128) as writer:
        writer.write("train", pa.table({**rows, "past": pa.array(past, pa.list_(pa.int64()))}))
        writer.facts["best_auc"] = 0.81
    return path


def run_folder(path, data, *, planned=False, machine=True, tiers=(), steps=40, batch=32, rate=1000.0):
    """A run of `steps` steps with a line every 4; `tiers` are lines of kind "tier" without their step."""
    settings = {
        "data": {"path": str(data), "batch_size": batch},
        "model": {"name": "dlrm"},
        "plan": {"memory": "4KiB"} if planned else None,
        "output": {"folder": str(path)},
    }
    folder = RunFolder(path)
    folder.begin(parse(Run, {k: v for k, v in settings.items() if v}), resume=False, overwrite=True)
    if planned:
        keys = np.arange(1, 11)
        Plan({"user": (Share("host"),), "item": (Share("device", keys), Share("host"))}).save(folder.plan)
    lines = [line for step in range(4, steps + 1, 4) for line in _lines(step, batch, rate, planned, machine, tiers)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _lines(step, batch, rate, planned, machine, tiers):
    samples = step * batch
    train = {"kind": "train", "step": step, "loss": 1 / step, "samples": samples, "seconds": samples / rate}
    yield {**train, **({"hit_share": 0.4, "device_bytes": 4000} if planned else {})}
    if machine:
        seconds = {f"seconds_{p}": 0.001 * step for p in ("wait", "fetch", "model", "update", "read", "group")}
        held = {"memory_bytes": 2**29, "table_rows": 10 * step, "table_bytes": 900 * step}
        yield {"kind": "machine", "step": step, "steps": 4, **seconds, **held}
    for tier in tiers:
        yield {"kind": "tier", "step": step, **{k: v * step if isinstance(v, int) else v for k, v in tier.items()}}
    if tiers:
        yield {"kind": "staleness", "step": step, "rows": [30, 10], "batches": [1]}
    if step % 20 == 0:
        yield {"kind": "evaluate", "step": step, "split": "test", "auc": 0.6 + step / 1000, "log_loss": 0.5,
               "normalized_entropy": None, "samples": 60}  # fmt: skip
