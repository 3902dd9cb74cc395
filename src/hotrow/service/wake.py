"""`Wake`: how other threads wake one that waits for its sockets."""

from __future__ import annotations

import contextlib
import os


class Wake:
    """A pipe, to be polled by its `fd`; waking several times before it is looked at counts once."""

    def __init__(self) -> None:
        self.fd, self._other = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._other, False)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._other, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._other)
