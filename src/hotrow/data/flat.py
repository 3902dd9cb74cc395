"""The flat form of samples: one row a sample, every column spelled out.

It is what `prepare` converts a log to, what a data set's writers take, and what `DataSet.flat` gives back. On disk it
exists only where nothing repeats; see `dedup` for the form that keeps repeated values once.
"""

from __future__ import annotations

import pyarrow as pa

from hotrow.data.schema import Schema

PREPARED = {b"hotrow": b"prepared samples"}
"""What the schema of an Arrow table says whose texts have been turned into keys."""


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of flat samples, each once."""
    fields: dict[str, pa.DataType] = {name: pa.float32() for name in (*schema.label_names, *schema.dense)}
    for f in schema.features:
        fields[f.column] = pa.int64() if f.kind == "key" else pa.list_(pa.int64())
        if f.weights is not None:
            fields[f.weights] = pa.list_(pa.float32())
    fields |= {name: pa.int64() for name in (schema.session, schema.time, schema.user) if name is not None}
    if schema.weight is not None:
        fields[schema.weight] = pa.float32()
    return pa.schema(list(fields.items()))
