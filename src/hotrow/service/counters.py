"""What a shard counts, for `/metrics` and `stats`: requests by kind, with time and bytes, and what went wrong."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Numbers that only grow; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counts[what] += count

    def took(self, kind: str, seconds: float, received: int) -> None:
        """One request of a kind, handled."""
        with self._lock:
            self._requests[kind] += 1
            self._seconds[kind] += seconds  # type: ignore[assignment]  # a Counter adds up any numbers
            self._bytes[kind] += received

    def of(self, what: str) -> int:
        with self._lock:
            return self._counts[what]

    def all(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def by_kind(self) -> dict[str, tuple[int, float, int]]:
        """For each kind requests, seconds and bytes received."""
        with self._lock:
            return {kind: (n, self._seconds[kind], self._bytes[kind]) for kind, n in self._requests.items()}
