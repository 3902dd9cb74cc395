"""Benchmarks: one file a claim, each against a real peer in the same run on the same machine.

`hotrow bench NAME` runs one, prints its table and writes the JSON described in `report.py`. They are part of the
package so that anyone can run them on their own machine with one command.
"""

from collections.abc import Callable
from importlib import import_module

from hotrow.bench.report import Report


def _bench(name: str) -> Callable[[bool], Report]:
    """The benchmark in the module `name`, which is imported only when it runs."""

    def run(quick: bool) -> Report:
        report: Report = import_module(f"hotrow.bench.{name}").run(quick)
        return report

    return run


BENCHES: dict[str, Callable[[bool], Report]] = {
    name: _bench(name)
    for name in ("train", "store", "dedup", "hot", "hot_auc", "kernels", "cache", "cache_auc", "shard", "hybrid")
}
