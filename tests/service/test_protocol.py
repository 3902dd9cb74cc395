"""Messages come back as they were sent, and whatever else comes is refused before anything is touched."""

import json
import struct

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotrow.service.protocol import Kind, Message, ProtocolError, Wire, decode, encode, from_json, to_json

ARRAYS = st.lists(
    hnp.arrays(
        st.sampled_from(["u1", "<i8", "<f4", "<u2", "i1", "<u4"]), hnp.array_shapes(min_dims=1, max_dims=2, min_side=0)
    ),
    max_size=5,
)


def frames_of(parts: list) -> list[zmq.Frame]:
    return [zmq.Frame(bytes(part)) for part in parts]


@given(ARRAYS, st.sampled_from(Kind), st.sampled_from(Wire), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_a_message_comes_as_it_was_sent(arrays, kind, wire, number, step):
    sent = Message(kind, arrays, number, b"c" * 16, number, number, step, 3, 7, wire)
    got = decode(frames_of(encode(sent)))
    assert (got.kind, got.request, got.client, got.sequence, got.epoch) == (kind, number, b"c" * 16, number, number)
    assert (got.step, got.rank, got.workers, got.wire) == (step, 3, 7, wire)
    for one, other in zip(got.arrays, arrays, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_refused(parts):
    with pytest.raises(ProtocolError):
        decode(frames_of(parts))


@given(ARRAYS, st.data())
def test_a_message_with_a_changed_byte_or_frame_is_refused_or_still_fits_itself(arrays, data):
    parts = [bytearray(part) for part in encode(Message(Kind.FETCH, arrays, 1, bytes(16), 2, 3, 4))]
    harm = data.draw(st.sampled_from(["byte", "cut", "longer", "frame", "no frame"]))
    which = data.draw(st.integers(0, len(parts) - 1))
    if harm == "byte":
        at = data.draw(st.integers(0, len(parts[0]) - 1))
        parts[0][at] ^= data.draw(st.integers(1, 255))
    elif harm == "cut" and parts[which]:
        del parts[which][data.draw(st.integers(0, len(parts[which]) - 1)) :]
    elif harm in ("cut", "longer"):
        parts[which] += b"x"
    elif harm == "frame":
        parts.append(bytearray(b"x"))
    else:
        parts.pop()
    try:
        got = decode(frames_of(parts))
    except ProtocolError:
        return
    assert harm == "byte", "lengths that do not fit are always refused"
    assert [array.nbytes for array in got.arrays] == [len(part) for part in parts[1:]]


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"HTTP", "is no message of Hotrow"),
        (4, struct.pack("<H", 2), "protocol version 2; this side speaks 1"),
        (6, b"\xc8", "no message of kind 200"),
        (7, b"\x09", "wire format 9"),
        (60, struct.pack("<I", 2**32 - 1), "says it has 4294967295 arrays"),
        (48, struct.pack("<q", -1), "no step -1"),
        (58, struct.pack("<H", 0), "among 0"),
    ],
)
def test_a_wrong_header_is_refused_by_name(offset, value, message):
    header = bytearray(encode(Message(Kind.FETCH))[0])
    header[offset : offset + len(value)] = value
    with pytest.raises(ProtocolError, match=message):
        decode(frames_of([header]))


@pytest.mark.parametrize("shape", [(0, 2**64 - 1), (2**63, 0), (2**31, 0)])
def test_an_array_of_no_bytes_with_a_side_beyond_all_bounds_is_refused(shape):
    header = bytearray(encode(Message(Kind.FETCH, [np.empty((0, 0), np.float32)]))[0])
    header[-16:] = struct.pack("<QQ", *shape)
    with pytest.raises(ProtocolError, match="a frame has no room for so many"):
        decode(frames_of([header, b""]))


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_facts_that_are_no_json_object_are_refused(text):
    with pytest.raises(ProtocolError):
        from_json(np.frombuffer(text, np.uint8))


def test_facts_come_as_they_were_sent():
    facts = {"a": [1, None, "ü"], "b": {"c": 0.5}}
    assert from_json(to_json(facts)) == json.loads(json.dumps(facts))
