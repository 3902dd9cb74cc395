"""What one shard gives: 40,000 keys of dim 32 pulled and pushed over loopback, beside the bare socket.

The shard is a process of its own, `hotrow shard`; a pull is 40,000 random keys to 5 MB of rows, a push the same keys
and 5 MB of gradients with row-wise Adagrad. The peer is a process that sends and receives the same numbers of bytes
over one TCP connection of the standard library and does nothing with them: what the machine's loopback allows one
connection. The two take turns. A ratio of 1 would mean that hashing, looking up, updating and the protocol cost
nothing.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np

from hotrow import Table
from hotrow.bench.report import Report, add, reading, take_turns
from hotrow.bench.store import arbitrary_keys
from hotrow.service.local import ShardProcess
from hotrow.store.optimizers import RowWiseAdagrad
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Gradients, Part

KEYS, DIM, ROWS = 40_000, 32, 1_000_000
BATCHES = 8
CALLS = 16

_KEY_BYTES, _VALUE_BYTES = 8 * KEYS, 4 * DIM * KEYS
_SIZES = struct.Struct("<QQ")


def measure(report: Report, rounds: int = 6, rows: int = ROWS) -> None:
    """Adds the figures of one shard to a report."""
    with ShardProcess() as shard, _raw_peer() as raw:
        tier = ServedTier([shard.address], [Table(name="t", dim=DIM, optimizer=RowWiseAdagrad())])
        try:
            pull, push = _shard_sides(tier, rows)
            sides = {
                "pull": pull,
                "raw_pull": lambda _: raw(_KEY_BYTES, _VALUE_BYTES),
                "push": push,
                "raw_push": lambda _: raw(_KEY_BYTES + _VALUE_BYTES, 8),
            }
            seconds = take_turns(sides, CALLS, rounds)
        finally:
            tier.close()
    for what in ("pull", "push"):
        ours, bare = reading(seconds[what]), reading(seconds[f"raw_{what}"])
        rate = KEYS / ours["median_ms"] * 1e3
        add(
            report,
            f"shard.{what}",
            rate,
            "keys/s",
            ours={**ours, "keys": KEYS, "dim": DIM, "rows": rows},
            baseline=bare,
        )
        share = bare["median_ms"] / ours["median_ms"]
        add(report, f"shard.{what}_share", share, "of raw loopback", ours=ours, baseline=bare)


def _shard_sides(tier: ServedTier, rows: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """A pull and a push of one of a few batches of distinct keys, all of which have rows."""
    for part in np.array_split(np.arange(rows), max(1, rows // 250_000)):
        keys = arbitrary_keys(0, part)
        tier.fetch([Part("t", 0, keys, None, 0)], np.empty(len(keys) * DIM, np.float32), 0)
    rng = np.random.default_rng(0)
    batches = [[Part("t", 0, arbitrary_keys(0, rng.permutation(rows)[:KEYS]), None, 0)] for _ in range(BATCHES)]
    out = np.empty(KEYS * DIM, np.float32)
    grads = Gradients(rng.normal(size=KEYS * DIM).astype(np.float32))

    def pull(i: int) -> None:
        tier.fetch(batches[i % BATCHES], out, i)

    def push(i: int) -> None:
        tier.update(batches[i % BATCHES], grads, i)

    return pull, push


@contextlib.contextmanager
def _raw_peer() -> Iterator[Callable[[int, int], None]]:
    """A call that sends and receives so many bytes over one connection to another process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"from hotrow.bench.shard_rate import answer_raw; answer_raw({listener.getsockname()[1]})"
        process = subprocess.Popen([sys.executable, "-c", code])
        line, _ = listener.accept()
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(_KEY_BYTES + _VALUE_BYTES)

    def call(sent: int, received: int) -> None:
        line.sendall(_SIZES.pack(sent, received))
        line.sendall(memoryview(buffer)[:sent])
        _receive(line, memoryview(buffer)[:received])

    try:
        with line:
            yield call
    finally:
        process.wait()


def answer_raw(port: int) -> None:
    """The other process: receives and sends what it is told to, until the connection ends."""
    buffer, sizes = bytearray(_KEY_BYTES + _VALUE_BYTES), bytearray(_SIZES.size)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(line, memoryview(sizes)):
            received, sent = _SIZES.unpack(sizes)
            _receive(line, memoryview(buffer)[:received])
            line.sendall(memoryview(buffer)[:sent])


def _receive(line: socket.socket, into: memoryview) -> bool:
    while into:
        count = line.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True
