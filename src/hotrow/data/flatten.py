"""`flatten`: the way back from a data set to one flat Parquet file, one row a sample, every column spelled out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.dataset import DataSet
from hotrow.data.dedup import SAMPLES
from hotrow.data.flat import arrow_schema
from hotrow.data.parts import Encodings
from hotrow.errors import DataError
from hotrow.files import flush


def flatten(
    dataset: DataSet,
    out: Path,
    *,
    splits: Sequence[str] = (),
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes the samples of `splits` (all of them if none is named), one split after the other, to the file `out`.

    Exactly the samples that were prepared, in the data set's order, with the columns and the codec that a data set
    without groups has. Gives what was written; `progress` gets samples done and in all.
    """
    splits = tuple(splits) or dataset.splits
    total = sum(dataset.samples(split) for split in splits)
    if out.exists() and not (overwrite and out.is_file()):
        raise DataError(f"{out} is already there. Name another file, or overwrite it with --overwrite.")
    beside = out.with_name(f".{out.name}.{uuid4().hex[:12]}.partial")
    plain = dataset.schema.model_copy(update={"groups": ()})
    tables = (table for split in splits for table in dataset.flat(split))
    first = next(tables, arrow_schema(plain).empty_table())
    done = 0
    try:
        with pa.OSFile(str(beside), "wb") as sink:
            writer = pq.ParquetWriter(sink, first.schema, **Encodings(plain).of(SAMPLES, first))
            try:
                for table in itertools.chain([first], tables):
                    writer.write_table(table, row_group_size=max(1, len(table)))
                    done += len(table)
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                writer.is_open = False  # no footer: the file is about to be deleted, and the disk may be full
                raise
            writer.close()
        flush(beside)
        beside.replace(out)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{out} could not be written: {error}. Nothing of it was left behind.") from error
    finally:
        with suppress(OSError):
            beside.unlink()
    return {
        "path": str(out),
        "splits": list(splits),
        "samples": done,
        "bytes": out.stat().st_size,
        "data_set_bytes": sum(part.bytes for split in splits for part in dataset.parts(split)),
    }
