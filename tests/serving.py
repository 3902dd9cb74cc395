"""Shards in this process, on real sockets, and connections that break: what tests of the service share."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from hotrow import Embeddings, Feature, Table
from hotrow.plan import Plan
from hotrow.service.shard import Shard
from hotrow.tiers.served import ServedTier


@contextlib.contextmanager
def shards(count: int, **settings: Any) -> Iterator[list[str]]:
    """The addresses of so many shards."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Shard("tcp://127.0.0.1:*", **settings)).address for _ in range(count)]


@contextlib.contextmanager
def served(addresses: Sequence[str], tables: Sequence[Table], **settings: Any) -> Iterator[ServedTier]:
    tier = ServedTier(addresses, tables, timeout=20, **settings)
    try:
        yield tier
    finally:
        tier.close()


def embeddings(tier: ServedTier, features: Sequence[Feature], seed: int = 5) -> Embeddings:
    """Embeddings with all rows on a served tier."""
    tables = list(tier.tables.values())
    return Embeddings(tables, features, seed=seed, tiers={"served": tier}, plan=Plan.all_on("served", tables))


class Breaking:
    """A line to an address that breaks again and again, after some number of bytes drawn from `after`."""

    def __init__(self, target: str, seed: int, after: tuple[int, int]) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target, self._after = (host, int(port)), after
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = 0
        self._open: list[socket.socket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._closed:
                near.close()
                return
            far = socket.create_connection(self._target)
            self._open = [near, far]
            left = [self._random.randint(*self._after)]
            pumps = [
                threading.Thread(target=self._pump, args=(*pair, left), daemon=True)
                for pair in ((near, far), (far, near))
            ]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()
            near.close()
            far.close()
            self.broken += 1

    def _pump(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and left[0] > 0:
                left[0] -= len(data)
                sink.sendall(data[: len(data) + min(left[0], 0)])  # the last piece in part
                if left[0] <= 0:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Breaking:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
