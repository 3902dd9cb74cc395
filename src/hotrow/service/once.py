"""Pushes are applied once: what was applied is remembered by client and number, so a repeat is only acknowledged.

A client counts its requests from 1 and never sends number n before n - 64 was acknowledged, so 64 numbers a client
are enough to know them all; they cost some hundred bytes. Of 65,536 clients that is kept, of earlier ones the name:
they are refused. What was applied is forgotten with the process; beside rows in a folder `store/journal.py` keeps it
in files.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol

from hotrow import _native
from hotrow.errors import StoreError
from hotrow.store.journal import Ticket, UnderWay

__all__ = ["WINDOW", "Applied", "Begun", "Once", "Ticket", "UnderWay"]

WINDOW = 64
_MOST_CLIENTS = 1 << 16


class Applied(Protocol):
    """Who remembers what was applied."""

    def begin(self, client: bytes, sequence: int) -> Begun | Ticket | None:
        """The right to apply a request, or None if it was applied before; raises `UnderWay`."""
        ...

    def was_applied(self, client: bytes, sequence: int) -> bool:
        """Whether a request was applied."""
        ...


class Once:
    """Remembers in this process's memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._forgotten: set[bytes] = set()

    def begin(self, client: bytes, sequence: int) -> Begun | None:
        with self._lock:
            self._refuse_forgotten(client)
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            if len(self._clients) > _MOST_CLIENTS:
                self._forgotten.add(self._clients.popitem(last=False)[0])
            if sequence in known.under_way:
                raise UnderWay
            if known.has(sequence):
                return None
            known.under_way.add(sequence)
            return Begun(self, client, sequence)

    def was_applied(self, client: bytes, sequence: int) -> bool:
        with self._lock:
            self._refuse_forgotten(client)
            known = self._clients.get(client)
            return known is not None and known.has(sequence)

    def _refuse_forgotten(self, client: bytes) -> None:
        """Nobody knows what of its requests was applied: none is applied again."""
        if client in self._forgotten:
            raise StoreError(
                "A push comes from a client that was silent for long and whose pushes were forgotten to make room. "
                "Start it anew from the last checkpoint."
            )

    def end(self, client: bytes, sequence: int, applied: bool) -> None:
        """What a ticket says of its request."""
        with self._lock:
            known = self._clients.get(client)
            if known is None:  # forgotten meanwhile
                return
            known.under_way.discard(sequence)
            if applied:
                known.applied.add(sequence)
                known.newest = max(known.newest, sequence)
                known.applied = {s for s in known.applied if s > known.newest - WINDOW}


class _Client:
    __slots__ = ("applied", "newest", "under_way")

    def __init__(self) -> None:
        self.newest = 0
        self.applied: set[int] = set()
        self.under_way: set[int] = set()

    def has(self, sequence: int) -> bool:
        return sequence <= self.newest - WINDOW or sequence in self.applied


class Begun:
    """The right to apply one request, as a journal's ticket gives it; there is nothing to go on with."""

    push: _native.Push | None = None

    def __init__(self, once: Once, client: bytes, sequence: int) -> None:
        self._once, self._client, self._sequence = once, client, sequence

    def done(self) -> None:
        """It was applied: a repeat is not applied again."""
        self._once.end(self._client, self._sequence, applied=True)

    def failed(self) -> None:
        """It was not applied: it may be sent again."""
        self._once.end(self._client, self._sequence, applied=False)

    refused = failed
