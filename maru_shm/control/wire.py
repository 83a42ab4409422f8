"""How requests and replies look as bytes. docs/protocol.md shows the same for people.

One message is one ZeroMQ frame: a msgpack array

    [version, kind, request id, field, field, ...]

Version, kind and request id stay in these three places in every version of the protocol, and so
does the whole of ``Refused``: two peers of different versions can still tell each other so. The
bulk of a message (keys, extents, generations) is packed into byte strings, see ``packed.py``.

Decoding trusts nothing: any bytes end in a message or in ``BadFrame``. Encoding refuses what the
other side would not take (ValueError), so that a caller's mistake is found where it was made.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgpack  # type: ignore[import-untyped]

from maru_shm.control import messages as m
from maru_shm.control.errors import BadFrame, WrongVersion
from maru_shm.control.packed import (
    put_keys,
    put_u64s,
    take_keys,
    take_u64s,
)
from maru_shm.extents import Extents
from maru_shm.types import (
    KEY_BYTES,
    Extent,
    Generation,
    Key,
    LeaseId,
    Namespace,
    OwnerToken,
    PartChecksum,
    PoolGeometry,
    SessionId,
)

PROTOCOL_VERSION = 1

MAX_ITEMS = 16384
"""Keys, generations or leases in one request; at 256 tokens each, a prompt of 4 million tokens."""

MAX_PARTS = 248
"""Parts with checksums of one object: what a 4096-byte header area holds (docs/format.md)."""

MAX_ROWS = 4096
"""Rows in one page of ``ObjectRows``, and sessions in one ``Stats``."""

MAX_FRAME_BYTES = 4 << 20
"""Longer frames are dropped unread. The longest request of ``MAX_ITEMS`` keys with parents takes
1.2 MiB; a commit of many parts may need more than one request."""

_MAX_TEXT_BYTES = 4096
_INT_LIMIT = 1 << 63
_ABSENT_KEY = Key(bytes(KEY_BYTES))

Fields = Sequence[Any]
_Items = TypeVar("_Items", bound=Sequence[Any])


class RequestFrame(NamedTuple):
    """What a server received."""

    request_id: int
    request: m.Request


class ReplyFrame(NamedTuple):
    """What a client received."""

    request_id: int
    reply: m.Reply


def encode_request(request_id: int, request: m.Request) -> bytes:
    """The frame of ``request``. Raises ValueError if it breaks a bound of this module."""
    return _encode(request_id, request, _REQUEST_ENCODERS)


def decode_request(frame: bytes) -> RequestFrame:
    """Raises BadFrame (WrongVersion among them), nothing else."""
    request_id, request = _decode(frame, _REQUEST_DECODERS)
    return RequestFrame(request_id, request)


def encode_reply(request_id: int, reply: m.Reply) -> bytes:
    """The frame of ``reply``. Raises ValueError if it breaks a bound of this module."""
    return _encode(request_id, reply, _REPLY_ENCODERS)


def decode_reply(frame: bytes) -> ReplyFrame:
    """Raises BadFrame (WrongVersion among them), nothing else. A ``Refused`` of any version is
    understood."""
    request_id, reply = _decode(frame, _REPLY_DECODERS)
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
    version, kind, request_id = parts[0], parts[1], parts[2]
    if not (type(version) is type(kind) is type(request_id) is int):
        raise BadFrame("version, kind and request id must be integers")
    if not 0 <= request_id < _INT_LIMIT:
        raise BadFrame(f"request id {request_id} is out of range")
    if version != PROTOCOL_VERSION and not (decoders is _REPLY_DECODERS and kind == _REFUSED):
        raise WrongVersion(
            f"the message has protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "client and server must come from the same release of Maru",
            request_id,
        )
    take = decoders.get(kind)
    if take is None:
        raise BadFrame(f"message kind {kind} is not known", request_id)
    try:
        return request_id, take(parts[3:])
    except (ValueError, struct.error) as error:
        raise BadFrame(f"message kind {kind}: {error}", request_id) from None


# ------------------------------------------------------------------------- fields


def _bad(what: str, value: object) -> NoReturn:
    raise ValueError(f"expected {what}, found {type(value).__name__}")


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _INT_LIMIT:
        _bad("an integer below 2**63", value)
    return value


def _float(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        _bad("a finite float", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT_BYTES:
        _bad(f"a text of at most {_MAX_TEXT_BYTES} characters", value)
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        _bad("a byte string", value)
    return value


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != KEY_BYTES:
        _bad(f"a byte string of {KEY_BYTES} bytes", value)
    return value


def _texts(value: Any) -> list[str]:
    if type(value) is not list:
        _bad("an array of texts", value)
    return [_text(item) for item in value]


def _count(fields: Fields, count: int) -> Fields:
    if len(fields) != count:
        raise ValueError(f"expected {count} fields, found {len(fields)}")
    return fields


def _bounded(items: _Items, bound: int = MAX_ITEMS) -> _Items:
    if len(items) > bound:
        raise ValueError(f"{len(items)} items in one message; at most {bound} are allowed")
    return items


def _clip(text: str) -> str:
    return text[:_MAX_TEXT_BYTES]


def _same_length(*columns: Sequence[Any]) -> None:
    if len({len(column) for column in columns}) != 1:
        raise ValueError("columns of one message differ in length")


# ------------------------------------------------------------------------- requests


def _put_open_session(r: m.OpenSession) -> Fields:
    return (r.owner, _clip(r.lock_path), _clip(r.client))


def _take_open_session(fields: Fields) -> m.OpenSession:
    owner, lock_path, client = _count(fields, 3)
    return m.OpenSession(OwnerToken(_int(owner)), _text(lock_path), _text(client))


def _put_close_session(r: m.CloseSession) -> Fields:
    return (r.session,)


def _take_close_session(fields: Fields) -> m.CloseSession:
    (session,) = _count(fields, 1)
    return m.CloseSession(SessionId(_int(session)))


def _put_keyed(r: m.LookupPrefix | m.LookupEach | m.Delete) -> Fields:
    return (r.session, _digest(r.namespace), put_keys(_bounded(r.keys)))


def _take_keyed(fields: Fields) -> tuple[SessionId, Namespace, tuple[Key, ...]]:
    session, namespace, keys = _count(fields, 3)
    return (
        SessionId(_int(session)),
        Namespace(_digest(namespace)),
        _bounded(take_keys(_bytes(keys))),
    )


def _put_leases(r: m.RenewLeases | m.ReleaseLeases) -> Fields:
    return (r.session, put_u64s(_bounded(r.leases)))


def _put_generations(r: m.Abort | m.ReportSuspect) -> Fields:
    return (r.session, put_u64s(_bounded(r.generations)))


def _take_numbers(fields: Fields) -> tuple[SessionId, tuple[int, ...]]:
    session, numbers = _count(fields, 2)
    return SessionId(_int(session)), _bounded(take_u64s(_bytes(numbers)))


def _put_reserve(r: m.Reserve) -> Fields:
    items = _bounded(r.items)
    return (
        r.session,
        _digest(r.namespace),
        put_keys([item.key for item in items]),
        bytes(item.parent is not None for item in items),
        put_keys([_ABSENT_KEY if item.parent is None else item.parent for item in items]),
        put_u64s(item.length for item in items),
    )


def _take_reserve(fields: Fields) -> m.Reserve:
    session, namespace, packed_keys, has_parent, packed_parents, packed_lengths = _count(fields, 6)
    keys = _bounded(take_keys(_bytes(packed_keys)))
    parents = take_keys(_bytes(packed_parents))
    lengths = take_u64s(_bytes(packed_lengths))
    _same_length(keys, parents, lengths, _bytes(has_parent))
    return m.Reserve(
        SessionId(_int(session)),
        Namespace(_digest(namespace)),
        tuple(
            m.ReserveItem(key, parent if has else None, length)
            for key, has, parent, length in zip(keys, has_parent, parents, lengths, strict=True)
        ),
    )


def _put_commit(r: m.Commit) -> Fields:
    items = _bounded(r.items)
    return (
        r.session,
        put_u64s(item.generation for item in items),
        bytes(len(_bounded(item.parts, MAX_PARTS)) for item in items),
        put_u64s(x for item in items for part in item.parts for x in (part.full, part.sample)),
    )


def _take_commit(fields: Fields) -> m.Commit:
    session, packed_generations, part_counts, packed_sums = _count(fields, 4)
    generations = _bounded(take_u64s(_bytes(packed_generations)))
    _same_length(generations, _bytes(part_counts))
    sums = take_u64s(_bytes(packed_sums))
    if len(sums) != 2 * sum(part_counts):
        raise ValueError(f"{len(sums)} checksums for {sum(part_counts)} parts of two each")
    parts = [PartChecksum(full, sample) for full, sample in zip(sums[::2], sums[1::2], strict=True)]
    items = []
    first = 0
    for generation, count in zip(generations, part_counts, strict=True):
        if count > MAX_PARTS:
            raise ValueError(f"{count} parts in one object; at most {MAX_PARTS} are allowed")
        items.append(m.CommitItem(Generation(generation), tuple(parts[first : first + count])))
        first += count
    return m.Commit(SessionId(_int(session)), tuple(items))


def _take_get_stats(fields: Fields) -> m.GetStats:
    _count(fields, 0)
    return m.GetStats()


def _put_list_objects(r: m.ListObjects) -> Fields:
    return (r.after, r.limit)


def _take_list_objects(fields: Fields) -> m.ListObjects:
    after, limit = _count(fields, 2)
    if _int(limit) > MAX_ROWS:
        raise ValueError(f"{limit} rows asked for; at most {MAX_ROWS} come in one page")
    return m.ListObjects(Generation(_int(after)), limit)


# ------------------------------------------------------------------------- replies


def _put_pool(pool: m.PoolInfo) -> Fields:
    geometry = pool.geometry
    return (
        pool.path,
        pool.medium,
        pool.uuid,
        put_u64s(
            (
                geometry.pool_bytes,
                geometry.segment_bytes,
                geometry.first_segment_offset,
                geometry.num_segments,
            )
        ),
    )


def _take_pool(fields: Fields) -> m.PoolInfo:
    path, medium, uuid, sizes = _count(fields, 4)
    if len(_bytes(uuid)) != 16:
        raise ValueError(f"pool uuid of {len(uuid)} bytes")
    numbers = take_u64s(_bytes(sizes))
    if len(numbers) != 4:
        raise ValueError(f"pool geometry of {len(numbers)} sizes")
    return m.PoolInfo(_text(path), _text(medium), uuid, PoolGeometry(*numbers))


def _put_session_opened(r: m.SessionOpened) -> Fields:
    return (r.epoch, r.session, float(r.lease_term_s), *_put_pool(r.pool))


def _take_session_opened(fields: Fields) -> m.SessionOpened:
    epoch, session, term = _count(fields[:3], 3)
    return m.SessionOpened(
        SessionId(_int(session)), _int(epoch), _float(term), _take_pool(fields[3:])
    )


def _put_lease_grant(r: m.LeaseGrant) -> Fields:
    return (r.epoch, r.lease or 0, Extents.of(r.extents).packed)


def _take_lease_grant(fields: Fields) -> m.LeaseGrant:
    epoch, lease, extents = _count(fields, 3)
    return m.LeaseGrant(
        _int(epoch), LeaseId(_int(lease)) or None, _bounded(Extents(_bytes(extents)))
    )


def _put_renewed(r: m.Renewed) -> Fields:
    return (r.epoch, put_u64s(r.lost))


def _put_committed(r: m.Committed) -> Fields:
    return (r.epoch, put_u64s(r.lost))


def _take_lost(fields: Fields) -> tuple[int, tuple[int, ...]]:
    epoch, lost = _count(fields, 2)
    return _int(epoch), _bounded(take_u64s(_bytes(lost)))


def _put_reserved(r: m.Reserved) -> Fields:
    results = _bounded(r.results)
    return (
        r.epoch,
        bytes(result.outcome.value for result in results),
        Extents.of(result.extent for result in results).packed,
    )


def _take_reserved(fields: Fields) -> m.Reserved:
    epoch, outcomes, packed_extents = _count(fields, 3)
    extents = _bounded(Extents(_bytes(packed_extents)))
    _same_length(extents, _bytes(outcomes))
    results = []
    for value, extent in zip(outcomes, extents, strict=True):
        outcome = m.ReserveOutcome(value)
        if (outcome is m.ReserveOutcome.GRANTED) != (extent is not None):
            raise ValueError(f"an extent belongs to GRANTED and to nothing else, not {outcome}")
        results.append(m.ReserveResult(outcome, extent))
    return m.Reserved(_int(epoch), tuple(results))


def _put_done(r: m.Done) -> Fields:
    return (r.epoch, r.count)


def _take_done(fields: Fields) -> m.Done:
    epoch, count = _count(fields, 2)
    return m.Done(_int(epoch), _int(count))


def _put_stats(r: m.Stats) -> Fields:
    return (
        r.epoch,
        r.server_pid,
        float(r.uptime_s),
        list(_put_pool(r.pool)),
        put_u64s(
            (
                r.populated_bytes,
                r.used_bytes,
                r.objects,
                r.reservations,
                r.quarantined,
                r.leases,
                r.lookups,
                r.lookup_keys,
                r.hit_keys,
                r.reserved_total,
                r.committed_total,
                r.aborted_total,
                r.evicted_total,
                r.suspect_total,
                r.no_space_total,
            )
        ),
        [_clip(client.client) for client in _bounded(r.sessions, MAX_ROWS)],
        put_u64s(x for c in r.sessions for x in (c.session, c.leases, c.reservations)),
    )


def _take_stats(fields: Fields) -> m.Stats:
    epoch, pid, uptime, pool, packed_counts, names, packed_clients = _count(fields, 7)
    if type(pool) is not list:
        _bad("an array for the pool", pool)
    counts = take_u64s(_bytes(packed_counts))
    clients = _texts(names)
    numbers = take_u64s(_bytes(packed_clients))
    if len(counts) != 15 or len(numbers) != 3 * len(clients):
        raise ValueError("counters of another number than this version has")
    return m.Stats(  # type: ignore[call-arg]
        _int(epoch),
        _int(pid),
        _float(uptime),
        _take_pool(pool),
        *counts,  # type: ignore[arg-type]
        tuple(
            m.ClientStats(SessionId(session), client, leases, reservations)
            for client, session, leases, reservations in zip(
                clients, numbers[0::3], numbers[1::3], numbers[2::3], strict=True
            )
        ),
    )


_ROW = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQQQdIB")
"""Namespace, key, offset, length, generation, age in seconds, leases, state."""


def _put_object_rows(r: m.ObjectRows) -> Fields:
    rows = [
        _ROW.pack(
            row.namespace,
            row.key,
            row.extent.offset,
            row.extent.length,
            row.extent.generation,
            row.age_s,
            row.leases,
            row.state.value,
        )
        for row in _bounded(r.rows, MAX_ROWS)
    ]
    return (r.epoch, b"".join(rows))


def _take_object_rows(fields: Fields) -> m.ObjectRows:
    epoch, packed = _count(fields, 2)
    return m.ObjectRows(
        _int(epoch),
        tuple(
            m.ObjectRow(
                Namespace(namespace),
                Key(key),
                m.ObjectState(state),
                Extent(offset, length, Generation(generation)),
                _float(age),
                leases,
            )
            for namespace, key, offset, length, generation, age, leases, state in (
                _ROW.iter_unpack(_bytes(packed))
            )
        ),
    )


def _put_refused(r: m.Refused) -> Fields:
    return (r.epoch, r.code.value, _clip(r.message))


def _take_refused(fields: Fields) -> m.Refused:
    epoch, code, message = _count(fields, 3)
    return m.Refused(_int(epoch), m.ErrorCode(_int(code)), _text(message))


# ------------------------------------------------------------------------- kinds

_REFUSED = 127

_REQUEST_ENCODERS: dict[type, tuple[int, Callable[[Any], Fields]]] = {
    m.OpenSession: (1, _put_open_session),
    m.CloseSession: (2, _put_close_session),
    m.LookupPrefix: (3, _put_keyed),
    m.LookupEach: (4, _put_keyed),
    m.RenewLeases: (5, _put_leases),
    m.ReleaseLeases: (6, _put_leases),
    m.Reserve: (7, _put_reserve),
    m.Commit: (8, _put_commit),
    m.Abort: (9, _put_generations),
    m.ReportSuspect: (10, _put_generations),
    m.Delete: (11, _put_keyed),
    m.GetStats: (12, lambda _: ()),
    m.ListObjects: (13, _put_list_objects),
}

_REQUEST_DECODERS: dict[int, Callable[[Fields], Any]] = {
    1: _take_open_session,
    2: _take_close_session,
    3: lambda fields: m.LookupPrefix(*_take_keyed(fields)),
    4: lambda fields: m.LookupEach(*_take_keyed(fields)),
    5: lambda fields: m.RenewLeases(*_take_numbers(fields)),  # type: ignore[arg-type]
    6: lambda fields: m.ReleaseLeases(*_take_numbers(fields)),  # type: ignore[arg-type]
    7: _take_reserve,
    8: _take_commit,
    9: lambda fields: m.Abort(*_take_numbers(fields)),  # type: ignore[arg-type]
    10: lambda fields: m.ReportSuspect(*_take_numbers(fields)),  # type: ignore[arg-type]
    11: lambda fields: m.Delete(*_take_keyed(fields)),
    12: _take_get_stats,
    13: _take_list_objects,
}

_REPLY_ENCODERS: dict[type, tuple[int, Callable[[Any], Fields]]] = {
    m.SessionOpened: (65, _put_session_opened),
    m.LeaseGrant: (66, _put_lease_grant),
    m.Renewed: (67, _put_renewed),
    m.Reserved: (68, _put_reserved),
    m.Committed: (69, _put_committed),
    m.Done: (70, _put_done),
    m.Stats: (71, _put_stats),
    m.ObjectRows: (72, _put_object_rows),
    m.Refused: (_REFUSED, _put_refused),
}

_REPLY_DECODERS: dict[int, Callable[[Fields], Any]] = {
    65: _take_session_opened,
    66: _take_lease_grant,
    67: lambda fields: m.Renewed(*_take_lost(fields)),  # type: ignore[arg-type]
    68: _take_reserved,
    69: lambda fields: m.Committed(*_take_lost(fields)),  # type: ignore[arg-type]
    70: _take_done,
    71: _take_stats,
    72: _take_object_rows,
    _REFUSED: _take_refused,
}
