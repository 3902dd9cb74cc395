"""A log in the layout of Criteo's display-ad logs, with something in it to learn: for trying Hotrow without a download.

    python examples/criteo_dlrm/make_log.py day.tsv --lines 200000

Tab-separated: label, 13 integers, 26 categories as eight hexadecimal digits, empty where missing. Categories follow
Zipf's law over vocabularies of 10 to 100,000 values, and each value has an effect of its own on the label.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

VOCABULARIES = [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000] * 3
CHUNK = 100_000


def chunk(random: np.random.Generator, effects: list[np.ndarray], lines: int) -> pa.Table:
    """So many lines, as columns of text."""
    logit = np.full(lines, -1.2)
    columns: dict[str, pa.Array] = {}
    for i in range(1, 14):
        values = np.floor(random.lognormal(1.5, 1.2, lines)).astype(np.int64)
        logit += 0.15 * (np.log1p(values) - 1.5) * (-1) ** i
        missing = random.random(lines) < 0.1
        columns[f"I{i}"] = pa.array(values, mask=missing).cast(pa.string())
    for i, effect in enumerate(effects, start=1):
        at = np.minimum(random.zipf(1.2, lines) - 1, len(effect) - 1)
        logit += effect[at]
        used, inverse = np.unique(at, return_inverse=True)
        texts = pa.array([f"{(int(value) * 2654435761 + i * 40503) % 2**32:08x}" for value in used])
        missing = pa.array(random.random(lines) < 0.03)
        columns[f"C{i}"] = pa.compute.if_else(missing, pa.scalar(None, pa.string()), texts.take(pa.array(inverse)))
    label = (random.random(lines) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    return pa.table({"label": pa.array(label).cast(pa.string()), **columns})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    random = np.random.default_rng(wanted.seed)
    effects = [random.normal(0, 0.25, size) for size in VOCABULARIES[:26]]
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with wanted.file.open("wb") as file:
        for begin in range(0, wanted.lines, CHUNK):
            csv.write_csv(chunk(random, effects, min(CHUNK, wanted.lines - begin)), file, options)
    print(f"{wanted.lines:,} lines in {wanted.file}")


if __name__ == "__main__":
    main()
