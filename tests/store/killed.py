"""Processes to kill: one that has everything imported forks a child for each job, so that a kill costs milliseconds.

A job is a function below and its arguments. It says through a pipe what it has done; `Child.kill` stops it with SIGKILL
at whatever instruction it is, and returns when the kernel has let go of its files.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hotrow import Table
from hotrow.errors import StoreError
from hotrow.store.exchange import Exchange
from hotrow.store.journal import Journal
from hotrow.store.optimizers import SGD
from hotrow.store.store import RowStore
from hotrow.table import Eviction, Fill

COUNTED = Table(name="counted", dim=64, optimizer=SGD(lr=1.0), init=Fill(value=0.0))
KEYS = 4000


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def client(number: int) -> bytes:
    return bytes([number]) * 16


def pushed_keys(number: int, sequence: int) -> np.ndarray[Any, Any]:
    """Three quarters of all keys, in another order for every push."""
    return np.random.default_rng([number, sequence]).permutation(KEYS)[: KEYS * 3 // 4]


def push(store: RowStore, journal: Journal, number: int, sequence: int) -> None:
    """One unit gradient for each key of a push, unless it was applied before."""
    keys = pushed_keys(number, sequence)
    if (ticket := journal.begin(client(number), sequence)) is not None:
        store.update(keys, np.ones((len(keys), COUNTED.dim), np.float32), lr=1.0, push=ticket.push)
        ticket.done()


def push_for_ever(folder: str, first: dict[str, int]) -> None:
    store, journal = RowStore(COUNTED, folder=Path(folder) / "rows"), Journal(Path(folder))
    store.fetch(np.arange(KEYS), step=0)

    def work(number: int, sequence: int) -> None:
        while True:
            push(store, journal, number, sequence)
            say(number, sequence)
            sequence += 1

    for number, sequence in first.items():
        threading.Thread(target=work, args=(int(number), sequence)).start()


def come_and_go(folder: str, capacity: int | None) -> None:
    """Keys get rows and lose them again: it says which are there for good, and which are gone."""
    eviction = None if capacity is None else Eviction(capacity=capacity)
    store = RowStore(COUNTED.model_copy(update={"eviction": eviction}), folder=Path(folder))
    for step in range(1 << 30):
        keys = np.arange(step * 200, step * 200 + 200)
        store.fetch(keys, step)
        store.erase(keys[::2])
        say(step)


def push_once(folder: str, table: dict[str, Any], n: int) -> None:
    """One push to a table that is there already, to be killed by HOTROW_DIE_AFTER."""
    os.environ["HOTROW_DIE_AFTER"] = str(n)
    store, journal = RowStore(Table(**table), folder=Path(folder) / "rows"), Journal(Path(folder))
    ticket = journal.begin(client(1), 1)
    assert ticket is not None
    keys, grads = one_push(store.table.dim)
    store.update(keys, grads, lr=0.1, push=ticket.push)
    ticket.done()
    say("done")


def one_push(dim: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    keys = np.array([5, 2, 999, 8, 1, 7, 3], np.int64)  # 999 has no row
    return keys, np.random.default_rng(1).standard_normal((len(keys), dim)).astype(np.float32)


def change_once(folder: str, n: int) -> None:
    """Rows come and go in a table that is there already, to be killed by HOTROW_DIE_AFTER."""
    os.environ["HOTROW_DIE_AFTER"] = str(n)
    store = RowStore(COUNTED, folder=Path(folder))
    store.fetch(np.arange(4, 8), step=1)
    store.erase(np.arange(2))
    say("done")


def answer_once(folder: str, table: dict[str, Any], n: int) -> None:
    """One request of a cache, that stands in a file, to be killed by HOTROW_DIE_AFTER."""
    os.environ["HOTROW_DIE_AFTER"] = str(n)
    store, journal = RowStore(Table(**table), folder=Path(folder) / "rows"), Journal(Path(folder))
    ticket = journal.begin(client(1), 1)
    assert ticket is not None
    Exchange([store]).answer(np.fromfile(Path(folder) / "request", np.uint8), push=ticket.push)
    ticket.done()
    say("done")


def fill_up(folder: str, most: int) -> None:
    """Fetches new rows until the file system has no more: here, until files may not grow past `most` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    store = RowStore(COUNTED, folder=Path(folder))
    try:
        for step in range(1 << 20):
            store.fetch(np.arange(step * 1000, step * 1000 + 1000), step)
    except StoreError as error:
        held = sum(len(c["keys"]) for c in store.export())
        say(held, len(store), str(error).replace("\n", " "))


class Child:
    def __init__(self, zygote: subprocess.Popen[bytes]) -> None:
        assert zygote.stdout is not None
        self._said = zygote.stdout
        self.pid = int(self._said.readline())

    def says(self) -> list[str]:
        """The next thing it says; nothing when it is gone."""
        words = self._said.readline().decode().split()
        return [] if words == ["gone"] else words

    def rest(self) -> list[list[str]]:
        """What it says until it is gone."""
        return list(iter(self.says, []))

    def kill(self) -> list[list[str]]:
        """What it had said and nobody had heard."""
        os.kill(self.pid, signal.SIGKILL)
        return self.rest()


@contextmanager
def zygote() -> Iterator[Any]:
    """Gives start(job, *arguments) -> Child. A child is to be heard or killed to its end before the next."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None

    def start(job: str, *arguments: Any) -> Child:
        process.stdin.write(json.dumps([job, arguments]).encode() + b"\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return Child(process)

    try:
        yield start
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    for line in sys.stdin:
        job, arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            say(os.getpid())
            globals()[job](*arguments)
            for thread in threading.enumerate():
                if thread is not threading.current_thread():
                    thread.join()
            os._exit(0)
        os.waitpid(pid, 0)
        say("gone")
