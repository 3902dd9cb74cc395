"""A worker of `prepare`: tasks come as lines on standard input, what is said of them goes to standard output.

When the input ends, the command that gave the tasks is gone, and so is the worker, in the middle of a task or not.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from hotrow.data.prepare.duck import Share
from hotrow.data.prepare.engine import told
from hotrow.data.prepare.tasks import run_task


def main() -> None:
    """Works until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not for the command to read
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()

    def say(**said: Any) -> None:
        out.write(json.dumps(said).encode() + b"\n")
        out.flush()

    while True:
        task = json.loads(tasks.get())
        try:
            run_task(
                Path(task["path"]),
                task["stage"],
                task["number"],
                Share.model_validate(task["share"]),
                lambda samples, units: say(samples=samples, units=units),
            )
            say(done=True)
        except BaseException as error:
            say(**told(error))


def _listen(tasks: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
