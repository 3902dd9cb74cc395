"""`Client`: talks to all shards at once from one background thread; any thread may ask, and several at a time.

A request is sent again if no answer comes (after `retry` seconds, then twice as many, ...), with the same sequence
number, so that what it changes is changed once, and at once if a broken line is there again. A push that waits for
other ranks is not sent again while the line holds: the shard says that it has it. A shard that was started anew is
greeted again and, if its rows outlived it, asked again; if not, that is an error. One that says nothing at all for
`timeout` seconds is an error too, which names it; until it is heard of again, more requests fail at once. `waited`
counts the seconds that somebody waited for a silent shard, and `on_wait` is told about each.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from hotrow.errors import ServiceError, SettingsError
from hotrow.service.curve import KeyFile, check_address
from hotrow.service.once import WINDOW
from hotrow.service.protocol import (
    LARGEST_FRAME,
    Array,
    Kind,
    Message,
    decode,
    encode,
    from_json,
    to_json,
)
from hotrow.service.wake import Wake
from hotrow.table import Table

_TICK_MS = 50
_HELD_S = 30.0
"""A push that waits for other ranks is sent again after so long, should its answer be lost on a line that holds."""
_SILENT_S = 2.0
"""A shard that is waited for and silent for so long is pinged, and the wait is counted."""

OnWait = Callable[[str, float], None]
Answer = list[Array]


@dataclass
class _Request:
    message: Message
    patience: float
    answer: Future[Answer] = field(default_factory=Future)
    sent: float = 0.0
    held: bool = False


@dataclass
class _Line:
    """What a client knows of one shard."""

    number: int
    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connected: bool = False
    epoch: int = 0
    durable: bool = False
    heard: float = field(default_factory=time.monotonic)
    pinged: float = 0.0
    greeting: bool = False
    given_up: str = ""  # why, until it is heard of again
    outstanding: dict[int, _Request] = field(default_factory=dict)
    next_sequence: int = 1
    unacknowledged: set[int] = field(default_factory=set)


class Client:
    """A client of shards that hold `tables` together."""

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Sequence[Table],
        *,
        seed: int = 0,
        key: KeyFile | None = None,
        group: bytes = b"",
        timeout: float = 60.0,
        retry: float = 1.0,
        on_wait: OnWait | None = None,
        id: bytes | None = None,
        changes: int = 0,
    ) -> None:
        """With the `id` of an earlier client, and the number of `changes` that were acknowledged to it, it goes on."""
        for address in addresses:
            check_address(address, key)
        self.id = id or secrets.token_bytes(16)
        self.waited = 0.0
        self.retries = 0
        self.sent_bytes = self.received_bytes = 0
        self._tables = [table.model_dump(mode="json") for table in tables]
        self._seed, self._group = seed, group
        self._timeout, self._retry, self._on_wait = timeout, retry, on_wait
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lines = [_Line(i, address, *self._connect(address, key)) for i, address in enumerate(addresses)]
        for line in self._lines:
            line.next_sequence += changes
        self._inbox: deque[tuple[_Line, _Request]] = deque()
        self._numbers = 0
        self._lock = threading.Lock()
        self._acknowledged = threading.Condition(self._lock)
        self._wake, self._closed = Wake(), False
        self._ended = ""  # why nothing is asked any more
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)
        self._thread.start()
        try:
            for greeted in [self._submit(line, self._hello(line)) for line in self._lines]:
                greeted.result()
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        return len(self._lines)

    @property
    def addresses(self) -> list[str]:
        return [line.address for line in self._lines]

    def ask(self, shard: int, kind: Kind, arrays: Sequence[Array] = (), **header: Any) -> Future[Answer]:
        """Asks one shard; arrays must not be changed until it has answered."""
        return self._submit(self._lines[shard], Message(kind, arrays, **{"client": self.id, **header}))

    def change(self, shard: int, kind: Kind, arrays: Sequence[Array] = (), **header: Any) -> Future[Answer]:
        """As `ask`, for what changes something: it gets the next sequence number, and waits if 64 are on their way."""
        line = self._lines[shard]
        with self._acknowledged:
            sequence = line.next_sequence
            line.next_sequence += 1
            line.unacknowledged.add(sequence)
            self._acknowledged.wait_for(lambda: sequence - min(line.unacknowledged) < WINDOW)
        try:
            answer = self.ask(shard, kind, arrays, sequence=sequence, **header)
        except BaseException:
            self._acknowledge(line, sequence)
            raise
        answer.add_done_callback(lambda _: self._acknowledge(line, sequence))
        return answer

    def ask_all(self, kind: Kind, arrays: Sequence[Array] = (), **header: Any) -> list[Answer]:
        """The answers of all shards to the same question."""
        return [answer.result() for answer in [self.ask(s, kind, arrays, **header) for s in range(self.shards)]]

    def change_all(self, kind: Kind, arrays: Sequence[Array] = (), **header: Any) -> list[Answer]:
        """The answers of all shards to the same change."""
        return [answer.result() for answer in [self.change(s, kind, arrays, **header) for s in range(self.shards)]]

    def stats(self) -> list[dict[str, Any]]:
        """For each shard its tables' rows and bytes, and what it has counted."""
        return [from_json(arrays[0]) for arrays in self.ask_all(Kind.STATS)]

    def close(self) -> None:
        """Ends the connections; what is still asked for fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ended = self._ended or "This client of the shards was closed."
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _connect(self, address: str, key: KeyFile | None) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the window of sequence numbers and by who waits for answers
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
        if key is not None:
            key.use_on(socket)
        monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise SettingsError(
                f"A shard at {address} cannot be asked: {error.strerror}. Name its own address."
            ) from None
        return socket, monitor

    def _hello(self, line: _Line) -> Message:
        said = {
            "tables": self._tables,
            "seed": self._seed,
            "shard": line.number,
            "shards": len(self._lines),
            "group": self._group.hex(),
        }
        return Message(Kind.HELLO, [to_json(said)], client=self.id)

    def _submit(self, line: _Line, message: Message) -> Future[Answer]:
        request = _Request(message, self._retry)
        with self._lock:
            self._numbers += 1
            message.request = self._numbers
            if self._ended:
                raise ServiceError(self._ended)
            self._inbox.append((line, request))
            self._wake.set()
        return request.answer

    def _acknowledge(self, line: _Line, sequence: int) -> None:
        with self._acknowledged:
            line.unacknowledged.discard(sequence)
            self._acknowledged.notify_all()

    def _run(self) -> None:
        """The thread that owns the sockets. Whatever ends it, nobody is left to wait."""
        try:
            self._move()
        except Exception as error:
            with self._lock:
                self._ended = f"This client of the shards failed: {error!r}."
        for line in self._lines:
            self._fail(line, self._ended)
            line.socket.disable_monitor()
            line.monitor.close(0)
            line.socket.close()
        for line, request in self._inbox:
            _fail(request, f"Shard {line.address} was not asked. {self._ended}")
        self._context.term()

    def _move(self) -> None:
        """Sends, receives and looks who is silent, until the client is closed."""
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        for line in self._lines:
            poller.register(line.socket, zmq.POLLIN)
            poller.register(line.monitor, zmq.POLLIN)
        while not self._closed:
            waiting = any(line.outstanding for line in self._lines)
            ready = dict(poller.poll(_TICK_MS if waiting else None))
            if self._wake.fd in ready:
                self._wake.clear()
            while self._inbox:
                line, request = self._inbox.popleft()
                if line.given_up:
                    _fail(request, line.given_up)
                    continue
                if not line.outstanding:
                    line.heard = time.monotonic()  # silence counts from when somebody listens
                line.outstanding[request.message.request] = request
                self._send(line, request)
            for line in self._lines:
                if line.socket in ready:
                    self._receive(line)
                if line.monitor in ready:
                    self._connected(line)
            if waiting:
                self._tick(time.monotonic())

    def _send(self, line: _Line, request: _Request) -> None:
        request.sent, request.held = time.monotonic(), False
        request.message.epoch = line.epoch
        try:
            line.socket.send_multipart(encode(request.message), zmq.NOBLOCK, copy=False)
        except zmq.Again:  # nobody is there, as when keys do not fit: sent again by and by
            return
        self.sent_bytes += request.message.bytes

    def _connected(self, line: _Line) -> None:
        """The line is there; if it was before, what was on its way may be lost."""
        line.monitor.recv_multipart()
        line.given_up = ""
        if line.connected:
            for request in list(line.outstanding.values()):
                self.retries += 1
                self._send(line, request)
        line.connected = True

    def _receive(self, line: _Line) -> None:
        while True:
            try:
                frames: Sequence[Any] = line.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            line.heard, line.given_up = time.monotonic(), ""
            self.received_bytes += sum(len(frame) for frame in frames)
            try:
                self._answered(line, decode(frames))
            except Exception as error:  # it sends what no shard does
                self._fail(line, f"Shard {line.address} does not answer as a shard does: {error}")

    def _answered(self, line: _Line, message: Message) -> None:
        request = line.outstanding.get(message.request)
        if message.kind == Kind.STRANGER:
            self._greet(line)
        elif request is None and message.kind == Kind.REFUSED and message.request == 0:
            self._fail(line, f"Shard {line.address} does not understand this client: {_reason(message)}")
        elif request is None:
            return  # a second answer to something sent twice
        elif message.kind == Kind.HELD:
            request.held = True
        elif message.kind == Kind.REFUSED:
            why = f"Shard {line.address} refuses: {_reason(message)}"
            del line.outstanding[message.request]
            _fail(request, why)
        else:
            greeted = _greeting(message) if request.message.kind == Kind.HELLO else None
            del line.outstanding[message.request]
            if greeted is not None:
                self._greeted(line, *greeted)
            request.answer.set_result(list(message.arrays))

    def _greet(self, line: _Line) -> None:
        """Says hello to a shard that was started anew."""
        if line.greeting:
            return
        line.greeting = True
        hello = _Request(replace(self._hello(line), request=0), self._retry)
        hello.answer.add_done_callback(
            lambda answer: self._fail(line, str(answer.exception())) if answer.exception() else None
        )
        line.outstanding[0] = hello
        self._send(line, hello)

    def _greeted(self, line: _Line, epoch: int, durable: bool) -> None:
        anew = line.epoch not in (0, epoch)
        line.epoch, line.durable, line.greeting = epoch, durable, False
        if anew and not line.durable:
            self._fail(
                line,
                f"Shard {line.address} was started anew and has lost its rows. Start again from a checkpoint; with "
                f"--folder its rows outlive it.",
            )
        elif anew:
            for request in list(line.outstanding.values()):
                self._send(line, request)

    def _tick(self, now: float) -> None:
        """Sends again what was not answered, and sees who is silent."""
        for line in self._lines:
            if not line.outstanding:
                continue
            silent = now - line.heard
            if silent > self._timeout:
                line.given_up = (
                    f"Shard {line.address} has not answered for {self._timeout:g} s. See that it runs there, with keys "
                    f"that fit this side's."
                )
                self._fail(line, line.given_up)
                continue
            if silent > _SILENT_S:
                self._silent(line, now, silent)
            for request in list(line.outstanding.values()):
                patience = _HELD_S if request.held else request.patience
                if now - request.sent > patience and (request.message.request == 0 or not line.greeting):
                    request.patience *= 2
                    self.retries += 1
                    self._send(line, request)

    def _silent(self, line: _Line, now: float, silent: float) -> None:
        since = max(line.pinged, line.heard)
        if now - since < _SILENT_S:
            return
        self.waited += now - since
        line.pinged = now
        line.socket.send_multipart(encode(Message(Kind.PING, client=self.id, epoch=line.epoch)))
        if self._on_wait is not None:
            self._on_wait(line.address, silent)

    def _fail(self, line: _Line, why: str) -> None:
        failed, line.outstanding = list(line.outstanding.values()), {}
        line.greeting = False
        for request in failed:
            _fail(request, why)


def _greeting(message: Message) -> tuple[int, bool]:
    said = from_json(message.arrays[0])
    return int(said["epoch"]), bool(said["durable"])


def _reason(message: Message) -> str:
    return str(from_json(message.arrays[0]).get("error")) if message.arrays else "it gives no reason"


def _fail(request: _Request, why: str) -> None:
    if not request.answer.done():
        request.answer.set_exception(ServiceError(why))
