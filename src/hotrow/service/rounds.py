"""Rounds: the pushes of one step that W ranks send, held until all are there and then applied as one update.

For each row the gradients of all ranks are summed in rank order, so that the same bits come out whoever came first. A
round is named by the ranks' group (16 bytes that are new whenever the ranks are started) and the number of the push,
which is the same for all of them. A push that comes again, after a lost connection, takes the place of the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotrow.errors import HotrowError
from hotrow.service.protocol import Array, Kind, Message

Reply = Callable[[Kind, Sequence[Array]], None]

_MOST_ROUNDS = 64


class RoundError(HotrowError):
    """Pushes that cannot be of one step."""


@dataclass
class Held:
    """A rank's push, and how to answer it."""

    message: Message
    reply: Reply


@dataclass
class _Round:
    step: int
    workers: int
    of_rank: dict[int, Held] = field(default_factory=dict)


class Rounds:
    """All rounds that are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[tuple[bytes, int], _Round] = {}

    def __len__(self) -> int:
        return sum(len(r.of_rank) for r in self._rounds.copy().values())

    def add(self, message: Message, reply: Reply) -> list[Held] | None:
        """The pushes of all ranks, in rank order, if this was the last one; it is under way no more."""
        name = (message.client, message.sequence)
        with self._lock:
            group = [key for key in self._rounds if key[0] == message.client]
            if name not in self._rounds and len(group) >= _MOST_ROUNDS:
                raise RoundError(f"{_MOST_ROUNDS} steps of these ranks are waiting already: one of them is missing.")
            found = self._rounds.setdefault(name, _Round(message.step, message.workers))
            if (found.step, found.workers) != (message.step, message.workers):
                raise RoundError(
                    f"Rank {message.rank} pushes step {message.step} among {message.workers}, while other ranks push "
                    f"step {found.step} among {found.workers}: the ranks are out of step. Start them all anew."
                )
            found.of_rank[message.rank] = Held(message, reply)
            if len(found.of_rank) < found.workers:
                return None
            del self._rounds[name]
            return [found.of_rank[rank] for rank in sorted(found.of_rank)]

    def put_back(self, round: list[Held]) -> None:
        """Holds a complete round again, for whoever takes it."""
        first = round[0].message
        with self._lock:
            found = _Round(first.step, first.workers, {push.message.rank: push for push in round})
            self._rounds[first.client, first.sequence] = found

    def take(self, group: bytes, sequence: int) -> list[Held]:
        """What is held for a round: repeats, once it was applied, to be answered as the first were."""
        with self._lock:
            found = self._rounds.pop((group, sequence), None)
            return [] if found is None else list(found.of_rank.values())

    def forget_others(self, group: bytes) -> None:
        """Drops what groups of an earlier start left: their ranks are gone, and nothing of it was acknowledged."""
        with self._lock:
            self._rounds = {name: found for name, found in self._rounds.items() if name[0] == group}
