"""`Peers`: what ranks tell each other beside rows, and who of them is gone.

Every rank counts up a number in torch.distributed's store, twice a second. When an exchange breaks (Gloo says that a
connection was closed, but not whose) each rank says so and looks whose number stands still: `RankError` names that
rank, its host and its process. That takes up to three seconds, once. A rank that stops because another one did says so
first, so that it is not blamed.

Small texts travel through the same store (`tell`, `hear`, `agree`): what a checkpoint of several ranks needs, in any
thread. The store is asked, never waited on: a waiting connection would hold up the heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hotrow.errors import RankError
from hotrow.world import World

_BROKEN = re.compile("gloo|nccl|connection|timed out|timeout|broken pipe", re.IGNORECASE)  # Gloo has no class for it
_BEAT = 0.5  # seconds
_SILENCE = 2.5  # seconds without a beat after which a rank counts as gone
_PATIENCE = 1800.0  # seconds that a text may take to come, from ranks that are there


class Peers:
    """The other ranks of a world, as one of them sees them; one object a process (`Peers.of`)."""

    _of: Peers | None = None  # one a process group: what was told stays in the store, and is numbered
    _making = threading.Lock()

    @staticmethod
    def of(world: World) -> Peers:
        """This process's peers, as long as its process group is the same."""
        group = dist.group.WORLD if world.size > 1 and dist.is_initialized() else None
        with Peers._making:
            peers = Peers._of
            if peers is None or peers._group is not group or peers.world.size != world.size:
                if peers is not None:
                    peers.close()
                peers = Peers._of = Peers(world)
                peers._group = group
            return peers

    def __init__(self, world: World) -> None:
        self.world = world
        self._agreed, self._topic = 0, ""
        self._ended = threading.Event()
        self._store: Any = None
        self._group: Any = None
        if world.size == 1:
            return
        if not dist.is_initialized():
            raise RankError(
                f"There are {world.size} ranks, but torch.distributed is not started in this process. Start the run "
                f"with torchrun or hotrow up, or call torch.distributed.init_process_group first."
            )
        if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
            raise RankError(
                f"torch.distributed says that this is rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but it was to be rank {world.rank} of {world.size}."
            )
        default: Any = dist.distributed_c10d._get_default_store()
        store = default.clone()  # a connection of its own
        store.set_timeout(timedelta(seconds=30))
        self._store = dist.distributed_c10d.PrefixStore("hotrow", store)
        self._store.set(f"who/{world.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._store.set(f"beat/{world.rank}", "0")
        threading.Thread(target=self._beat, name="hotrow-heartbeat", daemon=True).start()

    def close(self) -> None:
        """Ends the heartbeat."""
        self._ended.set()

    def tell(self, topic: str, text: str) -> None:
        """Leaves a text for the others under a topic that was not used before."""
        if self._store is not None:
            with self._lost_store():
                self._store.set(f"{topic}/{self.world.rank}", text)

    def hear(self, topic: str, ranks: Sequence[int]) -> list[str]:
        """What these ranks told under `topic`, as soon as all have; `RankError` if one of them is gone."""
        if self._store is None:
            return []
        keys = [f"{topic}/{rank}" for rank in ranks]
        self._until(lambda: bool(self._store.check(keys)), f"waiting for {topic}")
        with self._lost_store():
            return [self._store.get(key).decode() for key in keys]

    def agree(self, topic: str, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. All ranks must call it, equally often and in one thread."""
        if self._store is None:
            return [text]
        self._agreed += 1
        last, self._topic = self._topic, f"{topic}/{self._agreed}"
        self.tell(self._topic, text)
        heard = self.hear(self._topic, range(self.world.size))
        if last:  # everyone has come here, so everyone has heard the one before
            self.forget(last)
        return heard

    def forget(self, topic: str) -> None:
        """Takes back what this rank told under `topic`, once all who want it have heard it."""
        if self._store is not None:
            with self._lost_store():
                self._store.delete_key(f"{topic}/{self.world.rank}")

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turns what a broken collective raises into a sentence that names the rank that is gone."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and _BROKEN.search(str(error)) is None:
                raise
            raise self.explained(error) from error

    def explained(self, error: BaseException) -> RankError:
        """Finds out who is gone. Everyone who calls it is about to stop, and the others know."""
        if self._store is None:
            return RankError(f"An exchange between ranks failed: {error}.")
        try:
            self._store.set(f"stopped/{self.world.rank}", "1")
            gone = self._gone()
            found = self._sentence(gone, error)
            self._store.set(f"named/{self.world.rank}", "1")
            if gone and self.world.rank == 0:  # may be who keeps the store: the others want to ask it too
                self._wait_for_readers(gone)
            return found
        except RuntimeError:
            return self._without_store(error)

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(max(_BEAT, self.world.size / 400)):
            beats += 1
            try:
                self._store.set(f"beat/{self.world.rank}", str(beats))
            except RuntimeError:  # nobody is left to ask
                return

    def _gone(self) -> list[int]:
        """The ranks that do not beat and did not say that they stop, as soon as that is sure."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        first = {rank: self._beats(rank) for rank in others}
        deadline = time.monotonic() + max(_SILENCE, self.world.size / 80)
        silent = others
        while silent and time.monotonic() < deadline:
            if self._store.check(["gone"]):
                return [int(rank) for rank in self._store.get("gone").decode().split()]
            silent = [r for r in silent if self._beats(r) == first[r] and not self._store.check([f"stopped/{r}"])]
            time.sleep(0.05)
        if silent:
            self._store.set("gone", " ".join(map(str, silent)))
        return silent

    def _beats(self, rank: int) -> bytes | None:
        key = f"beat/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _sentence(self, gone: Sequence[int], error: BaseException) -> RankError:
        if not gone:
            return RankError(
                f"An exchange between ranks failed on rank {self.world.rank}, though every rank is there: "
                f"{_short(error)}. All ranks must fetch and update the same number of batches in the same order, and "
                f"none may be later than the tiers' timeout."
            )
        who = []
        for rank in gone:
            key = f"who/{rank}"
            where = self._store.get(key).decode() if self._store.check([key]) else "never started"
            who.append(f"rank {rank} ({where})")
        names = " and ".join(who)
        verb = "is" if len(gone) == 1 else "are"
        return RankError(
            f"{names[0].upper()}{names[1:]} {verb} gone, so rank {self.world.rank} stops too. Look for the reason in "
            f"what {'it' if len(gone) == 1 else 'they'} printed; the run goes on from its last checkpoint when it is "
            f"started again."
        )

    def _without_store(self, error: BaseException) -> RankError:
        return RankError(
            f"An exchange failed ({_short(error)}) and the store of torch.distributed, which rank 0 or torchrun keeps, "
            f"does not answer: that process is gone, so rank {self.world.rank} stops too. The run goes on from its "
            f"last checkpoint when it is started again."
        )

    def _wait_for_readers(self, gone: Sequence[int]) -> None:
        keys = [f"named/{rank}" for rank in range(self.world.size) if rank not in gone]
        deadline = time.monotonic() + 2 * _SILENCE
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _until(self, true: Callable[[], bool], doing: str) -> None:
        """Waits, and looks from time to time whether those waited for are still there."""
        begun = looked = time.monotonic()
        pause = 0.001
        with self._lost_store():
            while not true():
                time.sleep(pause)
                pause = min(0.05, pause * 1.5)
                now = time.monotonic()
                if now - begun > _PATIENCE or self._store.check(["gone"]):
                    raise self.explained(RuntimeError(f"stopped {doing}"))
                if now - looked > 2 * _SILENCE:
                    looked = now
                    if self._gone():
                        raise self.explained(RuntimeError(f"stopped {doing}"))

    @contextlib.contextmanager
    def _lost_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._without_store(error) from error


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
