from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
from control_cases import NAMESPACE, chain, key
from hypothesis import given, settings
from hypothesis import strategies as st
from message_strategies import replies, requests, u63

from maru_shm.control import messages as m
from maru_shm.control.errors import BadFrame, WrongVersion
from maru_shm.control.fields import MAX_ITEMS, MAX_PARTS
from maru_shm.control.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from maru_shm.types import (
    Extent,
    Generation,
    Key,
    LeaseId,
    OwnerToken,
    PartChecksum,
    PoolGeometry,
    SessionId,
)

GOLDEN = Path(__file__).parent / "golden_frames.json"

Decode = Callable[[bytes], Any]
DECODERS: list[Decode] = [decode_request, decode_reply]

POOL = m.PoolInfo(
    "/dev/shm/maru-0/p.pool", "tmpfs", bytes(range(16)), PoolGeometry(1 << 30, 1 << 26, 4096, 15)
)
SESSION = SessionId(5 << 32 | 1)
EXTENT = Extent(8192, 1000, Generation(5 << 40 | 7))

EXAMPLES: list[m.Request | m.Reply] = [
    m.OpenSession(OwnerToken(0x1234), "/tmp/maru-0/sessions/0000000000001234.lock", "vllm (pid 9)"),
    m.CloseSession(SESSION),
    m.LookupPrefix(SESSION, NAMESPACE, (key(1), key(2))),
    m.LookupEach(SESSION, NAMESPACE, (key(1),)),
    m.RenewLeases(SESSION, (LeaseId(3), LeaseId(4))),
    m.ReleaseLeases(SESSION, (LeaseId(3),)),
    m.Reserve(SESSION, NAMESPACE, chain(2, length=1 << 20)),
    m.Commit(
        SESSION,
        (
            m.CommitItem(Generation(7), (PartChecksum(1, 2), PartChecksum(3, 4))),
            m.CommitItem(Generation(8), ()),
        ),
    ),
    m.Abort(SESSION, (Generation(7),)),
    m.ReportSuspect(SESSION, (Generation(7),)),
    m.Delete(SESSION, NAMESPACE, (key(1),)),
    m.GetStats(),
    m.ListObjects(Generation(7), 100),
    m.SessionOpened(SESSION, 5, 30.0, POOL),
    m.LeaseGrant(5, LeaseId(3), (EXTENT, None)),
    m.LeaseGrant(5, None, ()),
    m.Renewed(5, (LeaseId(4),)),
    m.Reserved(
        5,
        (
            m.ReserveResult(m.ReserveOutcome.GRANTED, EXTENT),
            m.ReserveResult(m.ReserveOutcome.NO_SPACE, None),
        ),
    ),
    m.Committed(5, (Generation(8),)),
    m.Done(5, 2),
    m.Stats(5, 99, 1.5, POOL, *range(15), sessions=(m.ClientStats(SESSION, "vllm", 1, 2),)),
    m.ObjectRows(5, (m.ObjectRow(NAMESPACE, key(1), m.ObjectState.SEALED, EXTENT, 2.5, 1),)),
    m.Refused(5, m.ErrorCode.UNKNOWN_SESSION, "session 1 is not open"),
]

MISFITS = tuple(m.ReserveItem(Key(b"x" * length), None, 1) for length in (31, 33))


def encode(message: m.Request | m.Reply) -> bytes:
    if isinstance(message, get_args(m.Request)):
        return encode_request(77, message)
    return encode_reply(77, message)


def test_frames_are_the_recorded_bytes() -> None:
    """Change the protocol's version when this fails on purpose; write the file with
    ``python tests/maru_shm/control/test_wire.py``."""
    recorded = json.loads(GOLDEN.read_text())
    assert recorded["version"] == PROTOCOL_VERSION
    assert [encode(message).hex() for message in EXAMPLES] == [
        frame["hex"] for frame in recorded["frames"]
    ]


def test_recorded_bytes_decode_to_the_messages_they_were_made_of() -> None:
    for frame, message in zip(json.loads(GOLDEN.read_text())["frames"], EXAMPLES, strict=True):
        raw = bytes.fromhex(frame["hex"])
        if isinstance(message, get_args(m.Request)):
            assert decode_request(raw).request == message
        else:
            assert decode_reply(raw).reply == message


def test_every_kind_of_message_is_recorded() -> None:
    assert {type(message) for message in EXAMPLES} == {*get_args(m.Request), *get_args(m.Reply)}


@given(u63, requests)
def test_requests_survive_the_wire(request_id: int, request: m.Request) -> None:
    frame = decode_request(encode_request(request_id, request))
    assert (frame.request_id, frame.request) == (request_id, request)


@given(u63, replies)
def test_replies_survive_the_wire(request_id: int, reply: m.Reply) -> None:
    frame = decode_reply(encode_reply(request_id, reply))
    assert (frame.request_id, frame.reply) == (request_id, reply)
    assert hash(frame.reply) == hash(reply)


def ends_in_a_message_or_bad_frame(decode: Decode, frame: bytes) -> None:
    with suppress(BadFrame):
        decode(frame)


@given(st.sampled_from(DECODERS), st.binary(max_size=200))
def test_random_bytes_end_in_bad_frame_and_nothing_else(decode: Decode, frame: bytes) -> None:
    ends_in_a_message_or_bad_frame(decode, frame)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.sampled_from(DECODERS), st.integers(0, 130), st.lists(json_like, max_size=8))
def test_any_fields_end_in_a_message_or_in_bad_frame(
    decode: Decode, kind: int, fields: list[object]
) -> None:
    frame = msgpack.packb([PROTOCOL_VERSION, kind, 1, *fields])
    ends_in_a_message_or_bad_frame(decode, frame)


@settings(max_examples=300)
@given(st.one_of(requests, replies), st.data())
def test_damaged_frames_end_in_a_message_or_in_bad_frame(
    message: m.Request | m.Reply, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for position in data.draw(st.lists(st.integers(0, len(frame) * 8 - 1), max_size=3)):
        frame[position // 8] ^= 1 << position % 8
    cut = data.draw(st.integers(0, len(frame)))
    for decode in DECODERS:
        ends_in_a_message_or_bad_frame(decode, bytes(frame))
        ends_in_a_message_or_bad_frame(decode, bytes(frame[:cut]))


@pytest.mark.parametrize("decode", DECODERS)
def test_another_version_is_named_together_with_ours(decode: Decode) -> None:
    frame = msgpack.packb([PROTOCOL_VERSION + 1, 12, 4711, "fields", "of", "tomorrow"])
    with pytest.raises(
        WrongVersion, match=rf"version {PROTOCOL_VERSION + 1}.* {PROTOCOL_VERSION}"
    ) as bad:
        decode(frame)
    assert bad.value.request_id == 4711


def test_a_refusal_of_another_version_is_understood() -> None:
    refusal = m.Refused(9, m.ErrorCode.WRONG_VERSION, "versions 1 and 2")
    parts = msgpack.unpackb(encode_reply(4, refusal))
    parts[0] = PROTOCOL_VERSION + 1
    assert decode_reply(msgpack.packb(parts)).reply == refusal


def test_a_bad_frame_names_its_request_where_that_can_be_read() -> None:
    with pytest.raises(BadFrame) as bad:
        decode_request(msgpack.packb([PROTOCOL_VERSION, 3, 42, "not a session", b"", b""]))
    assert bad.value.request_id == 42


@pytest.mark.parametrize(
    "request_",
    [
        m.LookupPrefix(SESSION, NAMESPACE, (key(1),) * (MAX_ITEMS + 1)),
        m.ReleaseLeases(SESSION, (LeaseId(1),) * (MAX_ITEMS + 1)),
        m.Reserve(SESSION, NAMESPACE, chain(1) * (MAX_ITEMS + 1)),
        m.Commit(SESSION, (m.CommitItem(Generation(1), (PartChecksum(0, 0),) * (MAX_PARTS + 1)),)),
        m.Abort(SESSION, (Generation(-1),)),
        m.Abort(SESSION, (Generation(1 << 64),)),
        m.CloseSession(SessionId(1 << 64)),
        m.LookupPrefix(SESSION, NAMESPACE, (Key(b"short"),)),
        m.Delete(SESSION, NAMESPACE, (Key(b"x" * 31), Key(b"x" * 33))),
        m.Reserve(SESSION, NAMESPACE, MISFITS),
    ],
    ids=[
        "keys",
        "leases",
        "items",
        "parts",
        "negative",
        "too big",
        "session",
        "a short key",
        "keys that only add up",
        "stored keys that only add up",
    ],
)
def test_what_breaks_a_bound_is_refused_where_it_is_made(request_: m.Request) -> None:
    with pytest.raises(ValueError, match=r"at most|32 bytes|64 bits"):
        encode_request(1, request_)


def test_the_largest_requests_fit_a_frame() -> None:
    keys = tuple(key(number) for number in range(MAX_ITEMS))
    items = chain(MAX_ITEMS)
    for request in (
        m.LookupPrefix(SESSION, NAMESPACE, keys),
        m.Reserve(SESSION, NAMESPACE, items),
    ):
        frame = encode_request(1, request)
        assert len(frame) <= MAX_FRAME_BYTES
        assert decode_request(frame).request == request


def test_more_items_than_allowed_are_not_read() -> None:
    packed = bytes(32 * (MAX_ITEMS + 1))
    with pytest.raises(BadFrame, match="at most"):
        decode_request(msgpack.packb([PROTOCOL_VERSION, 3, 1, 1, NAMESPACE, packed]))
    with pytest.raises(BadFrame, match="at most"):
        decode_request(bytes(MAX_FRAME_BYTES + 1))


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps(
            {
                "version": PROTOCOL_VERSION,
                "frames": [
                    {"message": type(message).__name__, "hex": encode(message).hex()}
                    for message in EXAMPLES
                ],
            },
            indent=1,
        )
        + "\n"
    )
