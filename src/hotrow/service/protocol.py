"""Messages between clients and shards: a header of fixed form, then arrays, each a frame of its own.

    header   magic 4 | version 2 | kind 1 | wire 1 | request 8 | client 16 | sequence 8 | epoch 8 | step 8
             | rank 2 | workers 2 | arrays 4, then for each array: dtype 1 | dimensions 1 | zero 6 | shape 8 + 8
    arrays   their bytes, little-endian, C order

Frames go out of and come into NumPy arrays without a copy. `decode` checks everything that can be checked without
knowing tables: magic, version, kind, number of frames and the length of each; nothing is unpickled. What a kind's
arrays are is said beside the code that answers it (`answers.py`); facts that are not on the data path are JSON.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from hotrow.errors import HotrowError

Array = npt.NDArray[Any]

MAGIC = b"HROW"
VERSION = 1
MOST_ARRAYS = 4096
LARGEST_FRAME = 1 << 30
"""Bytes; a longer frame ends the connection it came from, and an answer that would be longer is refused."""

_HEADER = struct.Struct("<4sHBBQ16sQQqHHI")
_ARRAY = struct.Struct("<BB6xQQ")
_DTYPES = tuple(np.dtype(name) for name in ("u1", "<i8", "<f4", "<u2", "i1", "<u4", "<u8", "<i4", "?"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """What a message asks for, or what kind of answer it is."""

    HELLO = 1
    PING = 2
    FETCH = 3
    READ = 4
    PUSH = 5
    EXCHANGE = 6
    BEGIN_CUT = 7
    READ_CUT = 8
    END_CUT = 9
    NAME_CUT = 10
    IMPORT = 11
    ROWS = 12
    ERASE = 13
    SETTLE = 14
    CLEAR = 15
    STATS = 16
    OWN = 17

    ANSWER = 64
    REFUSED = 65
    HELD = 66
    """A push that waits for those of other ranks: it is safe with the shard and need not be sent again."""
    STRANGER = 67
    """The epoch is not this shard's: it was started anew. Say hello first."""


class Wire(IntEnum):
    """How values travel: float16 has an exponent of two for each row."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


_KINDS = frozenset(int(kind) for kind in Kind)
_WIRES = frozenset(int(wire) for wire in Wire)


class ProtocolError(HotrowError):
    """A message that is not as the protocol has it."""


@dataclass
class Message:
    """One request or answer. Requests that change something have a sequence number, counted by their client from 1."""

    kind: Kind
    arrays: Sequence[Array] = ()
    request: int = 0
    client: bytes = bytes(16)
    sequence: int = 0
    epoch: int = 0
    step: int = 0
    rank: int = 0
    workers: int = 1
    wire: Wire = Wire.FLOAT32
    frames: Sequence[Any] = field(default=(), repr=False)
    """What the arrays of a received message lie in."""

    @property
    def bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)


def encode(message: Message) -> list[Any]:
    """The frames of a message; arrays are sent from where they are, so they must not change until they are gone."""
    said = [
        _HEADER.pack(
            MAGIC,
            VERSION,
            message.kind,
            message.wire,
            message.request,
            message.client,
            message.sequence,
            message.epoch,
            message.step,
            message.rank,
            message.workers,
            len(message.arrays),
        )
    ]
    frames: list[Any] = [b""]
    for array in message.arrays:
        shape = (*array.shape, 0, 0)
        said.append(_ARRAY.pack(_CODES[array.dtype], array.ndim, shape[0], shape[1]))
        frames.append(np.ascontiguousarray(array) if array.nbytes else b"")
    frames[0] = b"".join(said)
    return frames


def decode(frames: Sequence[zmq.Frame]) -> Message:
    """The message of some frames, whose arrays are views of them; raises `ProtocolError`, and touches nothing else."""
    header = frames[0].bytes if frames else b""
    if len(header) < _HEADER.size:
        raise ProtocolError(f"A message begins with a header of at least {_HEADER.size} bytes; this has {len(header)}.")
    magic, version, kind, wire, request, client, sequence, epoch, step, rank, workers, count = _HEADER.unpack_from(
        header
    )
    if magic != MAGIC:
        raise ProtocolError("This is no message of Hotrow: its first bytes are wrong.")
    if version != VERSION:
        raise ProtocolError(f"The message is of protocol version {version}; this side speaks {VERSION}. Update Hotrow.")
    if kind not in _KINDS or wire not in _WIRES:
        raise ProtocolError(f"There is no message of kind {kind} in wire format {wire}.")
    if count > MOST_ARRAYS or count != len(frames) - 1 or len(header) != _HEADER.size + count * _ARRAY.size:
        raise ProtocolError(f"The message says it has {count} arrays, but comes in {len(frames)} frames.")
    if step < 0 or step >= 2**32 or workers < 1 or rank >= workers:
        raise ProtocolError(f"There is no step {step} of rank {rank} among {workers}.")
    arrays = [
        _array(frame, *_ARRAY.unpack_from(header, _HEADER.size + i * _ARRAY.size)) for i, frame in enumerate(frames[1:])
    ]
    return Message(Kind(kind), arrays, request, client, sequence, epoch, step, rank, workers, Wire(wire), frames)


def _array(frame: zmq.Frame, code: int, dimensions: int, *sizes: int) -> Array:
    if code >= len(_DTYPES) or not 1 <= dimensions <= 2:
        raise ProtocolError(f"There is no array of type {code} with {dimensions} dimensions.")
    dtype, shape = _DTYPES[code], sizes[:dimensions]
    if max(shape) > LARGEST_FRAME:
        raise ProtocolError(f"An array says it has {max(shape)} rows or columns; a frame has no room for so many.")
    said = math.prod(shape) * dtype.itemsize
    if said != len(frame):
        raise ProtocolError(f"An array that says it is of {said} bytes comes in a frame of {len(frame)}.")
    if said == 0:
        return np.empty(shape, dtype)
    array = np.frombuffer(frame.buffer, dtype)
    if not array.flags.aligned:  # a small frame may lie anywhere in a buffer that it shares with others
        array = array.copy()
    return array.reshape(shape)


def to_json(facts: Mapping[str, Any]) -> Array:
    """Facts as an array of bytes."""
    return np.frombuffer(json.dumps(facts, allow_nan=False).encode(), np.uint8)


def from_json(array: Array) -> dict[str, Any]:
    """Facts as `to_json` wrote them; raises `ProtocolError` for anything else."""
    try:
        facts = json.loads(array.tobytes())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"The facts of a message are not JSON: {error}.") from None
    if not isinstance(facts, dict):
        raise ProtocolError("The facts of a message are not a JSON object.")
    return facts
