"""`Shard`: one process's socket and threads around the answers of `answers.py`.

One thread owns the socket and moves messages; a few others answer them, each with the native store on all cores and
without the GIL. Frames are handed on without a copy. Flow control: while every thread has work waiting, nothing more
is read, and TCP makes the clients wait; an answer to a client that does not read its own is dropped, and it asks
again. On `stop` what was received is answered, then the socket closes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import monitor as zmq_monitor

from hotrow.errors import SettingsError
from hotrow.service.answers import Answers
from hotrow.service.counters import Counters
from hotrow.service.curve import Gate, KeyFile, check_address
from hotrow.service.holding import Holding
from hotrow.service.protocol import LARGEST_FRAME, Array, Kind, Message, decode, encode, to_json
from hotrow.service.wake import Wake

_THREADS = 4
_WAITING_A_THREAD = 4
_RECEIVED_AT_ONCE = 64
_UNREAD_ANSWERS = 128
_LINGER_MS = 5000

_FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Shard:
    """Serves the rows of one part of the key space at `address`."""

    def __init__(
        self, bind: str, *, key: KeyFile | None = None, folder: Path | None = None, threads: int = _THREADS
    ) -> None:
        check_address(bind, key)
        self.counters = Counters()
        self.holding = Holding(folder)
        self.answers = Answers(self.holding, self.counters)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if key is None else Gate(self._context, key)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD_ANSWERS)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING_A_THREAD * threads)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
        if key is not None:
            key.use_on(self._socket)
        self._monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._close()
            raise SettingsError(f"A shard cannot listen at {bind}: {_why(error, bind)}.") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._work: queue.SimpleQueue[tuple[bytes, Message] | None] = queue.SimpleQueue()
        self._unanswered = 0  # messages that a thread has or will have; written under the lock
        self._lock = threading.Lock()
        self._out: deque[tuple[bytes, Message]] = deque()
        self._wake = Wake()
        self._stopping = False
        self._most_waiting = _WAITING_A_THREAD * threads
        self._threads = [
            threading.Thread(target=self._answer, name=f"answers-{i}", daemon=True) for i in range(threads)
        ]
        self._loop = threading.Thread(target=self._move, name="shard", daemon=True)

    def start(self) -> Shard:
        """Begins to serve, in threads of its own."""
        for thread in [*self._threads, self._loop]:
            thread.start()
        return self

    def stop(self) -> None:
        """Answers what was received, then closes."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        self._loop.join()
        self._wake.close()

    @property
    def serving(self) -> bool:
        """Whether messages are read and answered."""
        return self._loop.is_alive() and not self._stopping

    def __enter__(self) -> Shard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _move(self) -> None:
        """The loop of the thread that owns the socket."""
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        while True:
            full = self._unanswered >= self._most_waiting
            poller.register(self._socket, 0 if full or self._stopping else zmq.POLLIN)
            ready = dict(poller.poll())
            if self._wake.fd in ready:
                self._wake.clear()
            if self._monitor in ready:
                zmq_monitor.recv_monitor_message(self._monitor)
                self.counters.add("handshakes_failed")
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._socket in ready:
                self._receive()
            self._send()
            if self._stopping and self._unanswered == 0 and not self._out:
                break
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._close()
        self.holding.close()

    def _receive(self) -> None:
        for _ in range(_RECEIVED_AT_ONCE):
            if self._unanswered >= self._most_waiting:
                return
            try:
                frames: Sequence[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            sender = frames[0].bytes
            try:
                message = decode(frames[1:])
            except Exception as error:  # whatever it is, the thread that owns the socket goes on
                self.counters.add("refused")
                self._out.append((sender, Message(Kind.REFUSED, [to_json({"error": str(error)})])))
                continue
            with self._lock:
                self._unanswered += 1
            self._work.put((sender, message))

    def _send(self) -> None:
        while self._out:
            receiver, message = self._out.popleft()
            try:
                self._socket.send_multipart([receiver, *encode(message)], zmq.NOBLOCK, copy=False)
                self.counters.add("bytes_sent", message.bytes)
            except zmq.ZMQError:  # gone, or does not read: it will ask again, or nobody wants it
                self.counters.add("answers_dropped")

    def _answer(self) -> None:
        """The loop of a thread that answers."""
        while (work := self._work.get()) is not None:
            sender, message = work

            def reply(kind: Kind, arrays: Sequence[Array], to: bytes = sender, asked: int = message.request) -> None:
                self._out.append((to, Message(kind, arrays, request=asked, epoch=self.holding.epoch)))

            try:
                self.answers.answer(message, reply)
            except Exception as error:
                self.counters.add("failed")
                reply(Kind.REFUSED, [to_json({"error": f"The shard failed: {error!r}."})])
            with self._lock:
                self._unanswered -= 1
            self._wake.set()
            del work, message, reply  # frames are freed before the next message comes

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(_LINGER_MS)
        if self._gate is not None:
            self._gate.socket.close(0)
        self._context.term()


def _why(error: zmq.ZMQError, bind: str) -> str:
    """Why an address cannot be listened at, and what to do."""
    if error.errno != zmq.EADDRINUSE:
        return f"{error.strerror}. Choose another address"
    port = bind.rpartition(":")[2]
    return f"another process holds port {port} (ss -ltnp shows which). End that one, or choose another address"
