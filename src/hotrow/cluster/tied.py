"""`python -m hotrow.cluster.tied ...`: the command `hotrow`, as long as whoever started it lives.

Its standard input is a pipe that the starter holds and never writes to. When that process ends, with kill -9 too, the
pipe does, and this one kills itself: no shard is left behind that keeps the address of the one that replaces it.
"""

from __future__ import annotations

import os
import signal
import threading

from hotrow.cli import main


def _end_with_starter() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_starter, name="tied", daemon=True).start()
    main()
