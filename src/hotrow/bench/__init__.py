"""Benchmarks: one file a claim, each against a real peer in the same run on the same machine.

`hotrow bench NAME` runs one, prints its table and writes the JSON described in `report.py`. They are part of the
package so that anyone can run them on their own machine with one command.
"""

from collections.abc import Callable

from hotrow.bench.report import Report


def _store(quick: bool) -> Report:
    from hotrow.bench.store import run

    return run(quick)


BENCHES: dict[str, Callable[[bool], Report]] = {"store": _store}
