"""Keys: beyond this machine a shard needs one, and a client without the right one gets nowhere."""

import json
import stat

import numpy as np
import pytest
import zmq

from hotrow import Table
from hotrow.errors import ServiceError, SettingsError
from hotrow.service.curve import KeyFile, is_local, make_keys
from hotrow.service.protocol import Kind, Message, encode
from hotrow.service.shard import Shard
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Part

TABLES = [Table(name="t", dim=2)]


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_only_loopback_is_local(address, local):
    assert is_local(address) is local
    if not local:
        with pytest.raises(SettingsError, match="so a key is needed. Make keys with: hotrow keys FOLDER"):
            Shard(address)


def test_with_the_right_key_rows_come_and_with_no_other(tmp_path):
    shard_file, trainer_file = make_keys(tmp_path / "ours")
    _, stranger_file = make_keys(tmp_path / "others")
    with Shard("tcp://127.0.0.1:*", key=KeyFile.load(shard_file, "shard")) as shard:
        tier = ServedTier([shard.address], TABLES, key=trainer_file)
        rows = np.zeros(6, np.float32)
        part = [Part("t", 0, np.arange(3), None, 0)]
        tier.fetch(part, rows, 0)
        assert rows.any()

        right = KeyFile.load(trainer_file, "trainer")
        stranger = KeyFile.load(stranger_file, "trainer")
        # It knows the shard's public key, which is no secret, but has another key of its own.
        half_right = tmp_path / "half.key"
        KeyFile("trainer", stranger.public, stranger.secret, right.peer).save(half_right)
        for key in (None, stranger_file, half_right):
            with pytest.raises(ServiceError, match="has not answered for 0.5 s. See that it runs there, with keys"):
                ServedTier([shard.address], TABLES, key=key, timeout=0.5)
        assert shard.counters.of("handshakes_failed") > 0
        assert shard.counters.of("hellos") == 1 and shard.counters.of("refused") == 0

        plain = zmq.Context()
        socket = plain.socket(zmq.DEALER)
        socket.linger, socket.rcvtimeo = 0, 300
        socket.connect(shard.address)
        socket.send_multipart(encode(Message(Kind.PING, epoch=shard.holding.epoch)))
        with pytest.raises(zmq.Again):
            socket.recv_multipart()
        socket.close()
        plain.term()

        tier.fetch(part, rows, 1)
        tier.close()


def test_a_client_does_not_believe_a_shard_with_another_key(tmp_path):
    _, trainer_file = make_keys(tmp_path / "ours")
    wrong_shard, _ = make_keys(tmp_path / "others")
    with (
        Shard("tcp://127.0.0.1:*", key=KeyFile.load(wrong_shard, "shard")) as shard,
        pytest.raises(ServiceError, match="has not answered"),
    ):
        ServedTier([shard.address], TABLES, key=trainer_file, timeout=0.5)


def test_key_files_are_for_their_owner_only_and_never_replaced(tmp_path):
    files = make_keys(tmp_path)
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(SettingsError, match="is already there; keys are not replaced"):
        make_keys(tmp_path)
    with pytest.raises(SettingsError, match="is the key of a shard, but the key of a trainer is needed"):
        KeyFile.load(files[0], "trainer")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "hotrow-key", "role": "shard"}'])
def test_a_key_file_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "k").write_text(text)
    with pytest.raises(SettingsError, match="cannot be read"):
        KeyFile.load(tmp_path / "k", "shard")
    short = {"format": "hotrow-key", "role": "shard", "public": "x", "secret": "y", "peer": "z"}
    (tmp_path / "k").write_text(json.dumps(short))
    with pytest.raises(SettingsError, match="a key has 40 characters"):
        KeyFile.load(tmp_path / "k", "shard")
    for no_z85 in ("~" * 40, "#" * 40, "ö" * 40):
        (tmp_path / "k").write_text(json.dumps({**short, "public": no_z85, "secret": no_z85, "peer": no_z85}))
        with pytest.raises(SettingsError, match="a key has 40 characters of Z85"):
            KeyFile.load(tmp_path / "k", "shard")
    with pytest.raises(SettingsError, match="There is no key file"):
        KeyFile.load(tmp_path / "nowhere", "shard")
