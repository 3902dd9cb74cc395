"""Hosts of our own on one machine: network namespaces joined by a bridge, with links of a given rate.

Every host has an address, a link to the bridge and its loopback, both shaped by `tc` (token bucket) in both directions.
Bytes come from the kernel's own counters of the link. What runs on a host is a plain process; all hosts share the
cores, the memory and the files of the machine. Needs root and iproute2 (`ip`, `tc`).

    with Hosts(2, link=1e9, inside=10e9) as hosts:
        server = hosts.start(0, [sys.executable, "-m", "hotrow", "shard", "--bind", f"tcp://{hosts.address(0)}:7700"])
        ...
        print(hosts.bytes(0))
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotrow.errors import HotrowError
from hotrow.service.curve import make_keys
from hotrow.service.local import ShardProcess

_BURST = 96 << 10  # bytes a link may send at once, at least: one of the kernel's largest segments
_BURST_S = 200e-6  # of its rate: what the kernel's timers are late by
_QUEUE = 16 << 20  # bytes that wait before any is dropped


class Bytes(NamedTuple):
    """What a host sent to and got from other hosts, as its link counts: a large segment has one header."""

    sent: int
    received: int


def unavailable() -> str | None:
    """Why there can be no hosts here, or None."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"hotrow{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except HotrowError as error:
        return str(error)
    _ip("netns", "del", name)
    return None


class Hosts:
    """`count` hosts; `link` bits a second between any and the bridge, `inside` of each one's loopback."""

    def __init__(
        self,
        count: int,
        *,
        link: float,
        inside: float | None = None,
        delay_ms: float = 0.0,
        queue: int = _QUEUE,
        burst: int = 0,
    ) -> None:
        """`queue`: bytes that wait at a link before any is dropped. `burst`: those it may send at once, at least."""
        if reason := unavailable():
            raise HotrowError(f"No hosts can be made on this machine: {reason}.")
        self._queue, self._burst = queue, burst
        self._net = os.getpid() % 200 + 20
        self._bridge = f"hrb{os.getpid()}"
        self._names = [f"hr{os.getpid()}n{i}" for i in range(count)]
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            self._build(link, inside, delay_ms)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.{self._net}.0.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """A process on a host; it is killed when the hosts are closed."""
        whole = [*self.prefix(host), *command]
        process = subprocess.Popen(whole, env={**os.environ, **(env or {})}, start_new_session=True, **options)
        self._running.append(process)
        return process

    def bytes(self, host: int) -> Bytes:
        """So far, over the link of a host."""
        shown = _ip("-n", self._names[host], "-s", "-j", "link", "show", "eth0")
        (link,) = json.loads(shown)
        return Bytes(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])

    def shape(self, link: float, delay_ms: float = 0.0) -> None:
        """Gives every link between hosts another rate."""
        for i, name in enumerate(self._names):
            _shape([], self._outer(i), link, delay_ms, self._queue, self._burst)
            _shape(["-n", name], "eth0", link, delay_ms, self._queue, self._burst)

    def cut(self, host: int, off: bool = True) -> None:
        """Takes a host off the network, or puts it back."""
        _ip("link", "set", self._outer(host), "down" if off else "up")

    def close(self) -> None:
        """Kills what runs on the hosts and takes everything away."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for i, name in enumerate(self._names):
            with contextlib.suppress(HotrowError):
                _ip("link", "del", self._outer(i))  # by itself it would go some time after its namespace
            with contextlib.suppress(HotrowError):
                _ip("netns", "del", name)
        with contextlib.suppress(HotrowError):
            _ip("link", "del", self._bridge)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _build(self, link: float, inside: float | None, delay_ms: float) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for i, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("link", "add", self._outer(i), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", self._outer(i), "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _shape([], self._outer(i), link, delay_ms, self._queue, self._burst)
            _shape(["-n", name], "eth0", link, delay_ms, self._queue, self._burst)
            if inside is not None:
                _shape(["-n", name], "lo", inside, 0.0, _QUEUE, 0)

    def _outer(self, host: int) -> str:
        """The bridge's end of a host's link."""
        return f"hr{os.getpid()}v{host}"


@contextlib.contextmanager
def shards_on(hosts: Hosts, numbers: Sequence[int], folder: Path) -> Iterator[tuple[list[ShardProcess], Path]]:
    """A shard on each of these hosts, and the key that trainers need; key files are in `folder` meanwhile."""
    with tempfile.TemporaryDirectory(dir=folder) as keys, contextlib.ExitStack() as stack:
        of_shard, of_trainer = make_keys(Path(keys) / "keys")
        shards = []
        for number in numbers:
            bind = f"tcp://{hosts.address(number)}:7700"
            shards.append(stack.enter_context(ShardProcess(bind, prefix=hosts.prefix(number), key=of_shard)))
        yield shards, of_trainer


def hear(processes: Sequence[subprocess.Popen[bytes]]) -> list[bytes]:
    """The next line of each; one that has ended instead is an error."""
    lines = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise HotrowError(f"A process of the benchmark ended with code {process.wait()} before it was done.")
        lines.append(line)
    return lines


def tell(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets each go on that waits for a line."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()


def _shape(where: Sequence[str], device: str, rate: float, delay_ms: float, queue: int, burst: int) -> None:
    root = [*where, "qdisc", "replace", "dev", device, "root", "handle", "1:"]
    burst = max(burst, _BURST, int(rate / 8 * _BURST_S))
    bucket = ["tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(queue)]
    if delay_ms:
        _run("tc", *root, "netem", "delay", f"{delay_ms}ms", "limit", "10000")
        _run("tc", *where, "qdisc", "add", "dev", device, "parent", "1:", "handle", "2:", *bucket)
    else:
        _run("tc", *root, *bucket)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HotrowError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
