"""`ahead`: a generator run by a thread that stays a bounded number of items ahead of whoever takes them.

An error of the generator is raised where the item would have been taken. Closing stops the thread and closes
the generator, wherever either of them waits; nobody polls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")


class _Channel:
    """Items on their way from one thread to another, `room` at most."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._items: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: object) -> bool:
        """Waits for room; False if nobody takes items any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._room)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def take(self) -> object:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class _End:
    """The last item: the generator is done, or failed with `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def ahead(items: Generator[T], room: int) -> Generator[T]:
    """The same items, made by a thread up to `room` of them before they are asked for."""
    channel = _Channel(room)
    thread = threading.Thread(target=_run, args=(items, channel), name="hotrow-ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := channel.take(), _End):
            yield item  # type: ignore[misc]
        if item.error is not None:
            raise item.error
    finally:
        channel.close()
        thread.join()


def _run(items: Generator[T], channel: _Channel) -> None:
    try:
        with closing(items):
            for item in items:
                if not channel.put(item):
                    return
    except BaseException as error:
        channel.put(_End(error))
    else:
        channel.put(_End())
