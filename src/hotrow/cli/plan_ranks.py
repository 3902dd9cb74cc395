"""The part of `hotrow plan` that plans for a topology, and how it is told in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from hotrow.errors import SettingsError, nearest

if TYPE_CHECKING:
    from hotrow.data.dataset import DataSet
    from hotrow.plan import Plan
    from hotrow.plan.budget import Counted
    from hotrow.plan.traffic import Wire
    from hotrow.run import Run
    from hotrow.table import Table

BATCH = 4096
"""Samples a rank takes in a step, unless a run or an option says otherwise."""


def wire_of(text: str) -> Wire:
    """The format of rows on the wire that an option names."""
    from hotrow.plan.traffic import Wire

    if text not in get_args(Wire):
        raise SettingsError(f'--wire: there is no format "{text}".{nearest(text, get_args(Wire))}')
    return cast("Wire", text)


def plan_ranks(
    dataset: DataSet,
    counted: Counted,
    run: Run | None,
    tables: Sequence[Table],
    cluster: Path,
    *,
    extra: str,
    batch_size: int | None,
    wire: str,
    compare: bool,
    since: Path | None,
    split: str = "train",
) -> tuple[Plan, dict[str, Any]]:
    """The plan for the ranks of a cluster file, and what is to be told of it."""
    from hotrow.plan import Plan
    from hotrow.plan.budget import said_of
    from hotrow.plan.cluster import plan_for_topology, used_tables
    from hotrow.plan.replan import moved_bytes, moves
    from hotrow.plan.topology import load_topology
    from hotrow.profile import fingerprint
    from hotrow.sizes import parse_size

    topology = load_topology(cluster)
    batch = batch_size or (run.data.batch_size if run is not None else BATCH)
    steps = run.data.steps if run is not None else ()
    features = dataset.schema.feature_settings()
    if run is not None:
        features = run.features_of(features)
    used = used_tables(dataset, tables, counted, topology, batch, split=split, steps=steps, features=features)
    made, shown = plan_for_topology(
        used,
        counted.counts,
        topology,
        extra=parse_size(extra, "a size of memory") if extra else None,
        wire=wire_of(wire),
        compare=compare,
        facts={
            "data": str(dataset.path),
            "split": split,
            "fingerprint": fingerprint(dataset.parts(split)),
            "steps": said_of(steps),
            "batch_size": batch,
        },
    )
    if since is not None:
        found = moves(Plan.load(since), made)
        within, between = moved_bytes(found, topology, tables)
        shown["moves"] = {
            "since": str(since),
            "within": within,
            "between": between,
            "rows": [{"table": m.table, "from": m.source, "to": m.target, "rows": len(m.keys)} for m in found],
        }
    return made, shown


def show_ranks(data: Mapping[str, Any]) -> None:
    """A plan for a topology: what it costs, each table's cuts and why, each exchange, and what others would take."""
    from hotrow.cli.show import _console, _pairs, _table
    from hotrow.plan.topology import time_text
    from hotrow.sizes import size_text

    topology, memory, traffic = data["topology"], data["memory"], data["traffic"]
    _pairs(
        "Plan",
        [
            ("data", f"{data['data']}, split {data['split']}, {data['batch_size']:,} samples a rank and step"),
            ("ranks", _ranks(topology)),
            ("memory of a rank", f"{size_text(memory['plan'])}; row-wise takes {size_text(memory['row_wise'])}"),
            ("distinct keys", f"of a {data['dedup']}, before they go to the row's owner; rows as {data['wire']}"),
            ("a step", told_step(traffic)),
            ("plan", data["plan"]),
            *([("picture", data["picture"])] if "picture" in data else []),
        ],
    )
    _table(
        "",
        ("table", "rows", "on every rank", "on every node", "on one rank", "lookups to copies"),
        [
            (
                name,
                f"{t['rows']:,}",
                *(f"{t['tiers'][tier]['rows']:,}" for tier in ("replicated", "node", "world")),
                f"{1 - t['tiers']['world']['share']:.1%}",
            )
            for name, t in data["tables"].items()
        ],
    )
    _console().print()
    for name, table in data["tables"].items():
        _console().print(f"{name}: {table['why']}", highlight=False, markup=False, soft_wrap=True)
    _table(
        "",
        ("exchange", "between nodes", "within nodes", "time"),
        [
            (f"{e['tier']}: {e['name']}", size_text(e["between"]), size_text(e["within"]), time_text(e["seconds"]))
            for e in data["exchanges"]
        ],
    )
    show_compared(data.get("compare", ()))
    _show_moves(data)


def show_compared(rows: Sequence[Mapping[str, Any]]) -> None:
    """Plans beside each other."""
    from hotrow.cli.show import _table
    from hotrow.plan.topology import time_text
    from hotrow.sizes import size_text

    _table(
        "",
        ("a step", "between", "saved", "within", "time", "faster", "memory", "busiest"),
        [
            (
                r["name"],
                size_text(r["between"]),
                f"{r['saved']:.1%}",
                size_text(r["within"]),
                time_text(r["seconds"]),
                f"{r['faster']:.2f}x",
                size_text(r["memory"]),
                f"{r['imbalance']:.2f}x",
            )
            for r in rows
        ],
    )


def told_step(traffic: Mapping[str, float]) -> str:
    from hotrow.plan.topology import time_text
    from hotrow.sizes import size_text

    return (
        f"{size_text(traffic['between'])} between nodes, {size_text(traffic['within'])} within, "
        f"{time_text(traffic['seconds'])}; the busiest has {traffic['imbalance']:.2f} times the mean"
    )


def _ranks(topology: Mapping[str, Any]) -> str:
    from hotrow.plan.topology import LINKS, rate_text, time_text

    told = [f"{topology['nodes']} x {topology['ranks']}"]
    for name in LINKS:
        if topology[name] is not None:
            told.append(f"{name} {rate_text(topology[name]['bandwidth'])}, {time_text(topology[name]['latency'])}")
    return "; ".join(told)


def _show_moves(data: Mapping[str, Any]) -> None:
    from hotrow.cli.show import _console, _table
    from hotrow.sizes import size_text

    if "moves" not in data:
        return
    moved = data["moves"]
    rows = [(m["table"], f"{m['from']} to {m['to']}", f"{m['rows']:,}") for m in moved["rows"]]
    _table(f"Moves since {moved['since']}", ("table", "from and to", "rows"), rows)
    _console().print(
        f"\nMoving sends {size_text(moved['between'])} between nodes and {size_text(moved['within'])} within.",
        highlight=False,
    )
