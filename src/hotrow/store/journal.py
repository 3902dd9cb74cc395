"""`Journal`: which pushes were applied, in a mapped file, so that each is applied once whatever is killed.

A push is named by its client (16 bytes) and the client's sequence number, of which at most 64 may be under way. Begin
it, update the rows with its `push`, say `done`, then acknowledge it. A client that saw no acknowledgement sends the
same push again, also to a new process with the same folder: what was done is acknowledged only, what had begun goes on
at the very row where it stopped. Nothing of a push is copied, so it costs about a microsecond.

128 pushes may be unfinished at once. If that many were left behind, the oldest that nobody sent again is given up, and
its client is refused when it does come back. Of 1024 clients the pushes are known; the 1025th takes the place of the
one that was silent longest, of which the name is kept: it is refused when it comes back, for nobody knows what of its
pushes was applied. When 65,536 names are kept as well, a new client is refused. So no push is applied twice.
"""

from __future__ import annotations

from pathlib import Path

from hotrow import _native
from hotrow.errors import StoreError
from hotrow.store.folder import lock_rows

UnderWay = _native.UnderWay  # the push is being applied at this moment: its answer comes from there


class Journal:
    """What a folder's tables have applied. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._lock = lock_rows(folder)
        self._native = _native.Journal(str(folder / "journal"))

    def begin(self, client: bytes, sequence: int) -> Ticket | None:
        """The right to apply a push, or None if it was applied before; raises `UnderWay` if it is being applied."""
        try:
            push = self._native.begin(client, sequence)
        except ValueError as error:
            raise StoreError(f"The push cannot be applied: {error}.") from None
        return None if push is None else Ticket(self._native, push)

    def was_applied(self, client: bytes, sequence: int) -> bool:
        """Whether a push is done."""
        return self._native.was_applied(client, sequence)

    @property
    def unfinished(self) -> int:
        """Pushes that were begun and are not done."""
        return self._native.unfinished()

    def close(self) -> None:
        """Lets go of the folder, so that it can be opened again."""
        del self._native
        self._lock.release()


class Ticket:
    """The right to apply one push. `push` goes to the update of its rows."""

    def __init__(self, journal: _native.Journal, push: _native.Push) -> None:
        self._journal, self.push = journal, push

    def done(self) -> None:
        """It was applied in full: a repeat is not applied again."""
        self._journal.done(self.push)

    def failed(self) -> None:
        """It was not applied in full: it goes on when it is sent again."""
        self._journal.release(self.push)

    def refused(self) -> None:
        """Nothing of it was applied, and nobody waits for it to go on: its place is free."""
        self._journal.drop(self.push)
