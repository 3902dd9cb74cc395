"""What docs/objectives.md shows of retrieval, run as it stands there."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data import Column, DataSetWriter, Schema
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.trainer import train

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
SECTION = PAGE[PAGE.index("## Retrieval") :]


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_two_towers_of_the_page_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column(name="user"), Column(name="item"), Column(name="history", kind="keys", table="item"))
    random = np.random.default_rng(0)
    with DataSetWriter(tmp_path / "data", Schema(label="click", features=columns)) as writer:
        for split in ("train", "test"):
            keys = random.integers(0, 9, (2, 40))
            history = pa.array(random.integers(0, 9, (40, 3)).tolist())
            table = {"click": np.ones(40, np.float32), "user": keys[0], "item": keys[1], "history": history}
            writer.write(split, pa.table(table))
    (tmp_path / "towers.py").write_text(block("python"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "towers", raising=False)
    settings = tomllib.loads(block("toml"))
    settings |= {"data": {"path": str(tmp_path / "data"), "batch_size": 8}, "output": {"folder": str(tmp_path / "run")}}
    result = train(parse(Run, settings).trusted(tmp_path))
    assert {"recall@10", "ndcg@50"} <= set(result.metrics)
    sys.modules.pop("towers")
