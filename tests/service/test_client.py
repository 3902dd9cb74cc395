"""The client: who is silent is named, who lost rows is not believed, and what is asked is asked of all at once."""

import contextlib
import struct
import threading
import time

import numpy as np
import pytest
import zmq

from hotrow import Table
from hotrow.errors import ServiceError, SettingsError
from hotrow.service.client import Client
from hotrow.service.protocol import Kind, Message, decode, encode, to_json
from hotrow.service.shard import Shard
from hotrow.store.optimizers import SGD
from hotrow.table import Fill
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Gradients, Part
from serving import served, shards

TABLES = [Table(name="t", dim=2, optimizer=SGD(lr=1.0), init=Fill(value=0.0))]
PART = [Part("t", 0, np.arange(5), None, 0)]


def test_a_shard_that_is_not_there_is_named():
    with shards(1) as (gone,):
        pass
    with pytest.raises(ServiceError, match=f"Shard {gone} has not answered for 0.3 s"):
        ServedTier([gone], TABLES, timeout=0.3)


def test_the_wait_for_a_silent_shard_is_visible(monkeypatch):
    monkeypatch.setattr("hotrow.service.client._SILENT_S", 0.1)
    waits = []
    with shards(1) as (gone,):
        pass
    with pytest.raises(ServiceError):
        Client([gone], TABLES, timeout=1.0, on_wait=lambda address, seconds: waits.append((address, seconds)))
    assert len(waits) >= 2
    assert {address for address, _ in waits} == {gone}
    assert [s for _, s in waits] == sorted(s for _, s in waits)


def test_a_shard_that_was_started_anew_without_its_rows_is_not_believed():
    with served_shard() as (shard, tier):
        tier.fetch(PART, np.empty(10, np.float32), 0)
        shard.stop()
        with Shard(shard.address), pytest.raises(ServiceError, match="was started anew and has lost its rows"):
            tier.fetch(PART, np.empty(10, np.float32), 1)


class served_shard:
    def __enter__(self):
        self.shard = Shard("tcp://127.0.0.1:*").start()
        self.tier = ServedTier([self.shard.address], TABLES, timeout=20, retry=0.05)
        return self.shard, self.tier

    def __exit__(self, *_):
        self.tier.close()


@contextlib.contextmanager
def false_shard(*answers):
    """An address where each request gets the next answer, the frames that `answer(request)` gives."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer() -> None:
        for give in answers:
            sender, *frames = router.recv_multipart(copy=False)
            router.send_multipart([sender.bytes, *give(decode(frames))])

    thread = threading.Thread(target=answer)
    thread.start()
    yield address
    thread.join()
    router.close()
    context.term()


def welcome(asked):
    return encode(Message(Kind.ANSWER, [to_json({"epoch": 1, "durable": False})], asked.request))


def huge(asked):
    header, frame = encode(Message(Kind.ANSWER, [np.empty((0, 0), np.float32)], asked.request))
    return [header[:-16] + struct.pack("<QQ", 0, 2**64 - 1), frame]


@pytest.mark.parametrize(
    "give",
    [
        huge,
        lambda asked: encode(Message(Kind.ANSWER, request=asked.request)),
        lambda asked: encode(Message(Kind.ANSWER, [to_json({})], asked.request)),
        lambda asked: encode(Message(Kind.REFUSED, [np.zeros(3, np.uint8)], asked.request)),
    ],
)
def test_who_answers_as_no_shard_does_fails_what_it_was_asked(give):
    with (
        false_shard(give) as address,
        pytest.raises(ServiceError, match=f"Shard {address} does not answer as a shard does"),
    ):
        Client([address], TABLES, timeout=20)


def test_a_client_lives_on_after_an_answer_that_is_none():
    with false_shard(welcome, huge, lambda asked: encode(Message(Kind.ANSWER, request=asked.request))) as address:
        client = Client([address], TABLES, timeout=20)
        with pytest.raises(ServiceError, match="does not answer as a shard does"):
            client.ask(0, Kind.PING).result(20)
        assert client.ask(0, Kind.PING).result(20) == []
        client.close()


def test_when_the_thread_of_a_client_fails_nobody_is_left_waiting():
    with shards(1) as addresses:
        client = Client(addresses, TABLES)
        no_dtype_of_the_protocol = [np.zeros(3, np.complex64)]
        with pytest.raises(ServiceError, match=r"This client of the shards failed: KeyError.*complex64"):
            client.change(0, Kind.PUSH, no_dtype_of_the_protocol).result(20)
        for _ in range(100):  # more than may be on their way
            with pytest.raises(ServiceError, match="This client of the shards failed"):
                client.change(0, Kind.CLEAR)
        client.close()


def test_an_address_that_nobody_can_have_is_refused():
    with pytest.raises(SettingsError, match=r"A shard at tcp://127.0.0.1:\* cannot be asked: Invalid argument"):
        Client(["tcp://127.0.0.1:*"], TABLES)
    for address in ("tcp://[::1", "tcp://127.0.0.1:65536", "tcp://:7700"):
        with pytest.raises(SettingsError, match="is no address of a shard"):
            Client([address], TABLES)


def test_a_shard_that_was_given_up_costs_one_timeout_until_it_is_heard_of_again(tmp_path):
    shard = Shard("tcp://127.0.0.1:*", folder=tmp_path).start()
    client = Client([shard.address], TABLES, timeout=1.0, retry=0.05)
    shard.stop()
    begun = time.monotonic()
    for _ in range(20):
        with pytest.raises(ServiceError, match="has not answered for 1 s"):
            client.change(0, Kind.CLEAR, [to_json({"table": 0})]).result()
    assert time.monotonic() - begun < 3
    with Shard(shard.address, folder=tmp_path):
        while client._lines[0].given_up and time.monotonic() - begun < 20:
            time.sleep(0.01)
        assert client.stats()[0]["tables"]["t"]["rows"] == 0
        client.close()


def test_many_threads_may_ask_at_once():
    with shards(2) as addresses, served(addresses, TABLES) as tier:
        tier.fetch(PART, np.empty(10, np.float32), 0)

        def push() -> None:
            for step in range(40):
                tier.update(PART, Gradients(np.ones(10, np.float32)), step)

        threads = [threading.Thread(target=push) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = np.empty(10, np.float32)
        tier.read(PART, rows, 0)
        assert (rows == -320).all()


def test_more_pushes_than_a_window_on_their_way_are_all_applied_once():
    with shards(1) as addresses, served(addresses, TABLES) as tier:
        tier.fetch(PART, np.empty(10, np.float32), 0)
        ones = np.ones(10, np.float32)
        pushed = [answer for step in range(300) for answer in tier.push(PART, ones, step)]
        for answer in pushed:
            answer.result()
        rows = np.empty(10, np.float32)
        tier.read(PART, rows, 0)
        assert (rows == -300).all()


def test_what_is_asked_of_a_closed_client_fails():
    with shards(1) as addresses:
        client = Client(addresses, TABLES)
        client.close()
        client.close()
        with pytest.raises(ServiceError, match="was closed"):
            client.ask(0, Kind.STATS)


def test_what_a_shard_refuses_is_told_with_its_address():
    with shards(1) as addresses:
        client = Client(addresses, TABLES)
        with pytest.raises(ServiceError, match=f"Shard {addresses[0]} refuses: .*too few arrays"):
            client.ask(0, Kind.FETCH).result()
        client.close()
