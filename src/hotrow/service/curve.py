"""CURVE keys: who may talk to a shard beyond this machine.

`hotrow keys FOLDER` makes one file for the shards and one for the trainers. Each holds its own key pair and the
public key of the other side, so one file is all that a host needs; a shard answers nobody else, and a trainer
believes nobody else. On loopback no keys are needed. Anywhere else a shard refuses to start without them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from hotrow.errors import SettingsError

SHARD_FILE, TRAINER_FILE = "shard.key", "trainer.key"
_FORMAT = "hotrow-key"


@dataclass(frozen=True)
class KeyFile:
    """One side's key pair and the public key of the other side, as text (Z85)."""

    role: str
    public: str
    secret: str
    peer: str

    @staticmethod
    def load(path: Path | str, role: str) -> KeyFile:
        """A key file of one role, "shard" or "trainer"."""
        try:
            said = json.loads(Path(path).read_text())
            if said.pop("format") != _FORMAT:
                raise ValueError("its format is another")
            key = KeyFile(**{name: str(said[name]) for name in ("role", "public", "secret", "peer")})
            if not all(_is_key(part) for part in (key.public, key.secret, key.peer)):
                raise ValueError("a key has 40 characters of Z85")
        except FileNotFoundError:
            raise SettingsError(f"There is no key file {path}. Make one with: hotrow keys FOLDER") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"The key file {path} cannot be read: {error}.") from None
        if key.role != role:
            raise SettingsError(f"{path} is the key of a {key.role}, but the key of a {role} is needed here.")
        return key

    def save(self, path: Path) -> None:
        """Writes a file that only its owner can read; refuses to replace one."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump({"format": _FORMAT, **asdict(self)}, file, indent=1)

    def use_on(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket prove who it is, and believe only the other side's key."""
        socket.curve_secretkey = self.secret.encode()
        socket.curve_publickey = self.public.encode()
        if self.role == "shard":
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.peer.encode()


def _is_key(text: str) -> bool:
    try:
        return len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, struct.error):
        return False


def make_keys(folder: Path) -> tuple[Path, Path]:
    """New keys for the shards and for the trainers, in two files."""
    files = folder / SHARD_FILE, folder / TRAINER_FILE
    there = [file for file in files if file.exists()]
    if there:
        raise SettingsError(f"{there[0]} is already there; keys are not replaced. Name another folder.")
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, role, (public, secret), (peer, _) in zip(
            files, ("shard", "trainer"), pairs, pairs[::-1], strict=True
        ):
            KeyFile(role, public, secret, peer).save(file)
    except OSError as error:
        raise SettingsError(f"Keys could not be written to {folder}: {error.strerror or error}.") from None
    return files


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    split = urlsplit(address)
    if split.scheme in ("ipc", "inproc"):
        return True
    host = split.hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str, key: KeyFile | None) -> None:
    """Refuses what is no address, and one that other machines can reach unless there are keys."""
    if not _is_address(address):
        raise SettingsError(f'"{address}" is no address of a shard; one looks like tcp://127.0.0.1:7700.')
    if key is None and not is_local(address):
        raise SettingsError(
            f"{address} can be reached from other machines, so a key is needed. Make keys with: hotrow keys FOLDER"
        )


def _is_address(address: str) -> bool:
    try:
        split = urlsplit(address)
    except ValueError:
        return False
    host, _, port = split.netloc.rpartition(":")
    has_port = host != "" and (port == "*" or (port.isdecimal() and int(port) <= 65535))
    return split.scheme == "ipc" or (split.scheme == "tcp" and has_port)


class Gate:
    """Lets in only clients that have the trainers' key: answers libzmq's questions (ZAP) in the loop of the shard."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: KeyFile) -> None:
        self._allowed = z85.decode(key.peer.encode())
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answers one question."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        if not allowed:
            self.refused += 1
        status = [b"200", b"OK"] if allowed else [b"400", b"This key is not known here"]
        self.socket.send_multipart([version, request, *status, b"trainer" if allowed else b"", b""])
