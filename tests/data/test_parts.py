"""Row groups that hold as many samples as repeats leave room for."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.dataset import DataSet, write_manifest
from hotrow.data.flat import arrow_schema
from hotrow.data.parts import Part, PartWriter
from session_logs import SCHEMA, grouped, logs, same


def written(folder: Path, log: pa.Table, schema=None, **settings: int) -> Part:
    writer = PartWriter(folder, "train-00000", schema or grouped(), **settings)
    writer.write(log)
    part = writer.finish()
    assert part is not None
    return part


@given(log=logs(least=1), row_group=st.integers(1, 9), most=st.integers(1, 40))
def test_larger_row_groups_hold_the_same_samples_and_refer_to_themselves_only(
    log, row_group, most, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("parts")
    part = written(folder, log, row_group=row_group, most=most)
    write_manifest(folder, grouped(), {"train": (part,)})
    assert same(pa.concat_tables(DataSet.open(folder).flat("train")), log)  # it refuses numbers beyond a row group
    assert max(part.row_groups) <= max(row_group, most)


def test_samples_that_repeat_share_a_row_group_and_others_do_not(tmp_path):
    rows = [
        {name: [] if pa.types.is_list(kind) else 0 for name, kind in _types()} | {"s": 1, "k": i} for i in range(64)
    ]
    for row in rows:
        row |= {"seen": list(range(6)), "tags": list(range(20))}
    repeat = pa.Table.from_pylist(rows, schema=pa.schema(_types()))
    assert written(tmp_path, repeat, row_group=8).row_groups == (8,) * 8
    assert written(tmp_path, repeat, row_group=8, most=16).row_groups == (16,) * 4
    assert written(tmp_path, repeat, row_group=8, most=64).row_groups == (24, 24, 16), "as far as 8 flat samples reach"
    flat = SCHEMA.model_copy(update={"groups": ()})
    assert written(tmp_path, repeat, flat, row_group=8, most=64).row_groups == (8,) * 8


def _types() -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in arrow_schema(SCHEMA)]
