"""Whatever is sent to a shard, it answers with a refusal or drops it, counts it, and goes on serving others."""

import contextlib
import socket
import struct

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import Table
from hotrow.errors import ServiceError
from hotrow.service.protocol import Kind, Message, Wire, decode, encode, to_json
from hotrow.service.shard import Shard
from hotrow.store.optimizers import SGD
from hotrow.tiers.tier import Gradients, Part
from serving import served

TABLES = [Table(name="a", dim=3, optimizer=SGD(lr=1.0)), Table(name="b", dim=2)]
PART = [Part("a", 0, np.arange(4), None, 0)]


@pytest.fixture
def shard():
    with Shard("tcp://127.0.0.1:*", threads=2) as shard:
        yield shard


@pytest.fixture
def friend(shard):
    with served([shard.address], TABLES) as tier:
        yield tier


class Raw:
    """A client that sends whatever it is told to."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 20_000
        self.socket.connect(address)

    def ask(self, frames: list) -> Message:
        self.socket.send_multipart(frames)
        return decode(self.socket.recv_multipart(copy=False))

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def raw(shard):
    raw = Raw(shard.address)
    yield raw
    raw.close()


def still_serves(friend) -> None:
    rows = np.empty(12, np.float32)
    before = rows.copy()
    friend.read(PART, before, 0)
    friend.fetch(PART, rows, 0)
    friend.update(PART, Gradients(np.ones(12, np.float32)), 0)
    friend.read(PART, rows, 0)
    assert np.array_equal(rows, before - 1)


NUMBERS = st.one_of(st.integers(0, 3), st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1]), st.integers(-5, -1))
ARRAYS = st.one_of(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=3).map(
        lambda rows: np.array(rows, np.int64).reshape(-1, 4)
    ),
    st.binary(max_size=40).map(lambda data: np.frombuffer(data, np.uint8)),
    st.lists(st.floats(width=32), max_size=12).map(lambda v: np.array(v, np.float32)),
    st.lists(st.integers(0, 2**16 - 1), max_size=12).map(lambda v: np.array(v, np.uint16)),
    st.dictionaries(
        st.sampled_from(
            ["table", "tables", "seed", "shard", "shards", "cut", "begun", "chunk", "most", "kept", "name"]
        ),
        st.one_of(NUMBERS, st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2)),
        max_size=8,
    ).map(to_json),
)


def test_messages_of_any_content_are_answered_and_nobody_else_notices(shard, friend, raw):
    epoch = shard.holding.epoch
    asked = [kind for kind in Kind if kind < Kind.ANSWER]

    @settings(max_examples=150)
    @given(st.sampled_from([*asked, Kind.ANSWER]), st.lists(ARRAYS, max_size=5), st.sampled_from(Wire), st.booleans())
    def fuzz(kind, arrays, wire, right_epoch):
        message = Message(kind, arrays, 7, b"x" * 16, 1, epoch if right_epoch else 1, wire=wire)
        answer = raw.ask(encode(message))
        assert answer.request == 7
        assert answer.kind in (Kind.ANSWER, Kind.REFUSED, Kind.STRANGER)

    fuzz()
    assert shard.counters.of("refused") > 20 and shard.counters.of("failed") == 0
    still_serves(friend)


def test_frames_of_any_bytes_are_refused_and_counted(shard, friend, raw):
    good = encode(Message(Kind.FETCH, [np.arange(8).reshape(2, 4)], 3, epoch=shard.holding.epoch))
    header = bytes(good[0])

    @settings(max_examples=80)
    @given(
        st.one_of(
            st.lists(st.binary(max_size=120), min_size=1, max_size=5),
            st.integers(0, len(header) - 1).map(lambda n: [header[:n], *good[1:]]),
            st.just([header]),
            st.just([*good, b"more"]),
            st.just([header + b"more", *good[1:]]),
        )
    )
    def fuzz(frames):
        assert raw.ask(frames).kind == Kind.REFUSED

    fuzz()
    assert shard.counters.of("refused") >= 80
    still_serves(friend)


@pytest.mark.parametrize(
    ("kind", "arrays", "message"),
    [
        (Kind.FETCH, [np.array([[9, 0, 0, 1]]), np.zeros(8, np.uint8)], "no table number 9; there are 2"),
        (Kind.FETCH, [np.array([[-1, 0, 0, 1]]), np.zeros(8, np.uint8)], "no table number -1"),
        (Kind.FETCH, [np.array([[0, 2**40, 0, 1]]), np.zeros(8, np.uint8)], "cannot be unpacked"),
        (Kind.FETCH, [np.array([[0, 1, 0, 9]]), np.zeros(17, np.uint8)], "cannot be unpacked"),
        (Kind.FETCH, [np.array([[0, 0, 0, 1], [0, 0, 0, 1]]), np.zeros(8, np.uint8)], "A table stands twice"),
        (Kind.FETCH, [np.zeros((1, 4), np.int64)], "too few arrays: 1"),
        (Kind.FETCH, [np.zeros(4, np.float32)] * 2, "Array 0 of a message of kind fetch is float32"),
        (Kind.PUSH, [np.array([[0, 1, 0, 1]]), np.zeros(9, np.uint8), np.zeros(2, np.float32)], "need 3 values"),
        (Kind.EXCHANGE, [np.zeros(99, np.uint8)], "cannot be answered"),
        (Kind.IMPORT, [to_json({"table": 0})], "too few arrays"),
        (Kind.READ_CUT, [to_json({"table": 0, "begun": 3, "chunk": 1, "most": 5})], "is not under way"),
        (Kind.HELLO, [to_json({})], "A hello cannot be understood"),
        (
            Kind.HELLO,
            [to_json({"tables": [{"name": "a"}], "seed": 0, "shard": 0, "shards": 1})],
            "tables.dim: this setting is needed",
        ),
    ],
)
def test_what_does_not_fit_the_tables_is_refused_by_name(shard, friend, raw, kind, arrays, message):
    answer = raw.ask(encode(Message(kind, arrays, 1, b"x" * 16, 1, shard.holding.epoch)))
    assert answer.kind == Kind.REFUSED
    assert message in answer.arrays[0].tobytes().decode()
    still_serves(friend)


def test_an_array_of_no_bytes_that_no_memory_could_hold_does_not_end_the_shard(shard, friend, raw):
    header, frame = encode(Message(Kind.PING, [np.empty((0, 0), np.float32)], 1))
    huge = header[:-16] + struct.pack("<QQ", 0, 2**64 - 1)
    assert raw.ask([huge, frame]).kind == Kind.REFUSED
    assert shard.serving and shard.counters.of("refused") == 1
    still_serves(friend)


def test_a_message_that_cannot_be_decoded_for_any_reason_is_refused(shard, friend, raw, monkeypatch):
    def fail(_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("hotrow.service.shard.decode", fail)
        answer = raw.ask(encode(Message(Kind.PING)))
    assert answer.kind == Kind.REFUSED and b"no room" in answer.arrays[0].tobytes()
    still_serves(friend)


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        (Kind.END_CUT, [to_json({"table": 0, "begun": 1, "kept": False})]),
        (Kind.NAME_CUT, [to_json({"table": 9, "name": "x"})]),
        (Kind.IMPORT, [to_json({"table": 0})]),
        (Kind.SETTLE, [to_json({"table": 0, "steps": "many", "name": "x"}), np.zeros(0, np.uint8)]),
        (Kind.EXCHANGE, [np.zeros(99, np.uint8)]),
    ],
)
def test_a_client_that_was_refused_any_number_of_times_may_still_change_rows(tmp_path, kind, arrays):
    with Shard("tcp://127.0.0.1:*", folder=tmp_path) as shard, served([shard.address], TABLES) as friend:
        for _ in range(130):  # more than a journal keeps unfinished
            with pytest.raises(ServiceError, match="refuses"):
                friend.client.change(0, kind, arrays).result()
        assert shard.holding.applied.unfinished == 0
        still_serves(friend)


def test_more_rows_than_a_message_holds_are_refused_before_memory_is_taken(shard, friend, raw):
    with served([shard.address], TABLES):
        pass
    keys = 120_000_000
    packed = np.zeros(keys + 8, np.uint8)
    heads = np.array([[0, keys, 0, 1]])
    answer = raw.ask(encode(Message(Kind.READ, [heads, packed], 1, epoch=shard.holding.epoch)))
    assert answer.kind == Kind.REFUSED and b"Ask for fewer" in answer.arrays[0].tobytes()
    still_serves(friend)


def test_a_connection_that_is_no_zeromq_is_dropped(shard, friend):
    host, port = shard.address.removeprefix("tcp://").split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 40, b"\xff" * 4096, bytes(4096)):
        with socket.create_connection((host, int(port)), timeout=20) as line:
            with contextlib.suppress(OSError):  # the shard may have hung up already
                line.sendall(noise)
                line.shutdown(socket.SHUT_WR)
            still_serves(friend)


def test_a_client_that_never_reads_its_answers_harms_nobody_else(shard, friend):
    raw = Raw(shard.address)
    message = encode(
        Message(Kind.READ, [np.array([[0, 5000, 0, 1]]), np.zeros(5008, np.uint8)], 1, epoch=shard.holding.epoch)
    )
    for _ in range(400):
        raw.socket.send_multipart(message, zmq.NOBLOCK)
    still_serves(friend)
    raw.close()
    still_serves(friend)


@pytest.mark.parametrize(
    ("tables", "settings", "message"),
    [
        ([TABLES[0]], {}, "The shard has tables a, b, this client a"),
        ([TABLES[0], Table(name="b", dim=3)], {}, "Table b has another dim on the shard"),
        (TABLES, {"seed": 4}, "have seed 0, this client's 4"),
    ],
)
def test_a_client_with_other_tables_is_refused(shard, friend, tables, settings, message):
    with pytest.raises(ServiceError, match=message), served([shard.address], tables, **settings):
        pass
    still_serves(friend)


def test_a_client_that_lists_other_shards_is_refused(shard, friend):
    with (
        Shard("tcp://127.0.0.1:*") as other,
        pytest.raises(ServiceError, match="This is shard 0 of 1, and was asked to be shard 0 of 2"),
        served([shard.address, other.address], TABLES),
    ):
        pass
    still_serves(friend)
