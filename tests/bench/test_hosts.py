"""Hosts are apart, their links have the rate they were given, and their bytes are counted."""

import subprocess
import sys

import pytest

from hotrow.bench.hosts import Hosts, unavailable
from hotrow.errors import HotrowError

reason = unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(1 << 20):
        total += len(data)
    connection.sendall(str(total).encode())
"""
CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as connection:
    start = time.perf_counter()
    connection.sendall(bytes(8_000_000))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(100) == b"8000000"
    print(8_000_000 * 8 / (time.perf_counter() - start))
"""


def test_a_link_carries_no_more_than_its_rate_and_every_byte_is_counted() -> None:
    with Hosts(2, link=1e8) as hosts:
        server = hosts.start(1, [sys.executable, "-c", SERVER, hosts.address(1)], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        client = hosts.start(0, [sys.executable, "-c", CLIENT, hosts.address(1)], stdout=subprocess.PIPE)
        rate = float(client.communicate(timeout=60)[0])
        sent, received = hosts.bytes(0).sent, hosts.bytes(1).received
    assert rate < 1.3e8  # a burst goes through at once
    assert 8_000_000 < sent < 9_000_000
    assert abs(sent - received) < 10_000  # hosts also greet each other


SENDER = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(100):
    sender.sendto(bytes(1000), (sys.argv[1], 9))
"""


def test_a_host_that_is_cut_off_hears_nothing_until_it_is_back() -> None:
    with Hosts(2, link=1e9) as hosts:

        def heard() -> int:
            before = hosts.bytes(1).received
            hosts.start(0, [sys.executable, "-c", SENDER, hosts.address(1)]).wait(timeout=60)
            return hosts.bytes(1).received - before

        assert heard() > 50_000
        hosts.cut(1)
        assert heard() < 10_000  # a greeting may have been on its way
        hosts.cut(1, off=False)
        assert heard() > 50_000


def test_nothing_of_the_hosts_stays_behind() -> None:
    with Hosts(2, link=1e9) as hosts:
        names = [hosts._outer(0), hosts._bridge]
        process = hosts.start(0, ["sleep", "600"])
    assert process.returncode is not None
    shown = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in shown]


def test_a_command_that_fails_is_a_sentence() -> None:
    from hotrow.bench.hosts import _ip

    with pytest.raises(HotrowError, match="failed"):
        _ip("netns", "del", "there-is-no-such-host")
