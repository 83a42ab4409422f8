"""How requests and replies look as bytes. docs/protocol.md shows the same for people.

One message is one ZeroMQ frame: a msgpack array

    [version, kind, request id, field, field, ...]

Version, kind and request id stay in these three places in every version of the protocol, and so
does the whole of ``Refused``: two peers of different versions can still tell each other so. The
bulk of a message (keys, extents, generations) is packed into byte strings, see
``fields.py``; the fields of every kind stand in ``request_fields.py`` and ``reply_fields.py``.

Decoding trusts nothing: any bytes end in a message or in ``BadFrame``. Encoding refuses what the
other side would not take (ValueError), so that a caller's mistake is found where it was made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped] # ships no types

from maru_shm.control import messages as m
from maru_shm.control.errors import BadFrame, WrongVersion
from maru_shm.control.fields import (
    INT_LIMIT,
    MAX_ROWS,
    Fields,
)
from maru_shm.control.reply_fields import REFUSED, REPLY_DECODERS, REPLY_ENCODERS
from maru_shm.control.request_fields import REQUEST_DECODERS, REQUEST_ENCODERS

PROTOCOL_VERSION = 1

MAX_FRAME_BYTES = 4 << 20
"""Longer frames are dropped unread. The longest request of ``MAX_ITEMS`` keys with parents takes
1.2 MiB; a commit of many parts may need more than one request."""


class RequestFrame(NamedTuple):
    """What a server received."""

    request_id: int
    request: m.Request


class ReplyFrame(NamedTuple):
    """What a client received."""

    request_id: int
    reply: m.Reply


def encode_request(request_id: int, request: m.Request) -> bytes:
    """The frame of ``request``. Raises ValueError if it breaks a bound of the protocol."""
    return _encode(request_id, request, REQUEST_ENCODERS)


def decode_request(frame: bytes) -> RequestFrame:
    """Raises BadFrame (WrongVersion among them), nothing else."""
    request_id, request = _decode(frame, REQUEST_DECODERS)
    return RequestFrame(request_id, request)


def encode_reply(request_id: int, reply: m.Reply) -> bytes:
    """The frame of ``reply``. Raises ValueError if it breaks a bound of the protocol."""
    return _encode(request_id, reply, REPLY_ENCODERS)


def decode_reply(frame: bytes) -> ReplyFrame:
    """Raises BadFrame (WrongVersion among them), nothing else. A ``Refused`` of any version is
    understood."""
    request_id, reply = _decode(frame, REPLY_DECODERS)
    return ReplyFrame(request_id, reply)


# ------------------------------------------------------------------------- frames

_pack = msgpack.Packer().pack
"""One packer for all: a new one allocates 256 KiB. It packs plain values under the GIL, so threads
do not meet in it."""


def _encode(
    request_id: int, message: object, encoders: dict[type, tuple[int, Callable[[Any], Fields]]]
) -> bytes:
    kind, put = encoders[type(message)]
    try:
        frame: bytes = _pack((PROTOCOL_VERSION, kind, request_id, *put(message)))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a number does not fit its 64 bits: {error}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(
            f"message of {len(frame)} bytes is longer than a frame may be ({MAX_FRAME_BYTES}); "
            "send fewer items at once"
        )
    return frame


def _decode(frame: bytes, decoders: dict[int, Callable[[Fields], Any]]) -> tuple[int, Any]:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        parts = msgpack.unpackb(
            frame, max_array_len=MAX_ROWS, max_map_len=0, max_ext_len=0, use_list=True
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadFrame(f"not msgpack: {error!r}") from None
    if type(parts) is not list or len(parts) < 3:
        raise BadFrame("not an array of version, kind, request id and fields")
    version, kind, request_id, *fields = parts
    if not (type(version) is type(kind) is type(request_id) is int):
        raise BadFrame("version, kind and request id must be integers")
    if not 0 <= request_id < INT_LIMIT:
        raise BadFrame(f"request id {request_id} is out of range")
    if version != PROTOCOL_VERSION and not (decoders is REPLY_DECODERS and kind == REFUSED):
        raise WrongVersion(
            f"the message has protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "client and server must come from the same release of Maru",
            request_id,
        )
    take = decoders.get(kind)
    if take is None:
        raise BadFrame(f"message kind {kind} is not known", request_id)
    try:
        return request_id, take(fields)
    except (ValueError, struct.error) as error:
        raise BadFrame(f"message kind {kind}: {error}", request_id) from None
