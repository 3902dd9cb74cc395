"""The client: who is silent is named, who lost rows is not believed, and what is asked is asked of all at once."""

import threading

import numpy as np
import pytest

from hotrow import Table
from hotrow.errors import ServiceError
from hotrow.service.client import Client
from hotrow.service.protocol import Kind
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
