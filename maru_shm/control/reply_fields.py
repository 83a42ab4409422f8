"""The fields of every reply on the wire, both ways; docs/protocol.md has them as a table."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from maru_shm.control import messages as m
from maru_shm.control.fields import (
    MAX_ROWS,
    Fields,
    bad,
    bounded,
    clip,
    count_fields,
    put_u64s,
    same_length,
    take_bytes,
    take_float,
    take_int,
    take_text,
    take_texts,
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
    PoolGeometry,
    SessionId,
)

REFUSED = 127
"""Kind of ``Refused``, in every version."""


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
    path, medium, uuid, sizes = count_fields(fields, 4)
    if len(take_bytes(uuid)) != 16:
        raise ValueError(f"pool uuid of {len(uuid)} bytes")
    numbers = take_u64s(take_bytes(sizes))
    if len(numbers) != 4:
        raise ValueError(f"pool geometry of {len(numbers)} sizes")
    return m.PoolInfo(take_text(path), take_text(medium), uuid, PoolGeometry(*numbers))


def _put_session_opened(r: m.SessionOpened) -> Fields:
    return (r.epoch, r.session, float(r.lease_term_s), *_put_pool(r.pool))


def _take_session_opened(fields: Fields) -> m.SessionOpened:
    epoch, session, term = count_fields(fields[:3], 3)
    return m.SessionOpened(
        SessionId(take_int(session)), take_int(epoch), take_float(term), _take_pool(fields[3:])
    )


def _put_lease_grant(r: m.LeaseGrant) -> Fields:
    return (r.epoch, r.lease or 0, Extents.of(r.extents).packed)


def _take_lease_grant(fields: Fields) -> m.LeaseGrant:
    epoch, lease, extents = count_fields(fields, 3)
    return m.LeaseGrant(
        take_int(epoch), LeaseId(take_int(lease)) or None, Extents(take_bytes(extents))
    )


def _put_renewed(r: m.Renewed) -> Fields:
    return (r.epoch, put_u64s(r.lost))


def _put_committed(r: m.Committed) -> Fields:
    return (r.epoch, put_u64s(r.lost))


def _take_lost(fields: Fields) -> tuple[int, tuple[int, ...]]:
    epoch, lost = count_fields(fields, 2)
    return take_int(epoch), bounded(take_u64s(take_bytes(lost)))


def _put_reserved(r: m.Reserved) -> Fields:
    results = bounded(r.results)
    return (
        r.epoch,
        bytes(result.outcome.value for result in results),
        Extents.of(result.extent for result in results).packed,
    )


def _take_reserved(fields: Fields) -> m.Reserved:
    epoch, outcomes, packed_extents = count_fields(fields, 3)
    extents = bounded(Extents(take_bytes(packed_extents)))
    same_length(extents, take_bytes(outcomes))
    results = []
    for value, extent in zip(outcomes, extents, strict=True):
        outcome = m.ReserveOutcome(value)
        if (outcome is m.ReserveOutcome.GRANTED) != (extent is not None):
            raise ValueError(f"an extent belongs to GRANTED and to nothing else, not {outcome}")
        results.append(m.ReserveResult(outcome, extent))
    return m.Reserved(take_int(epoch), tuple(results))


def _put_done(r: m.Done) -> Fields:
    return (r.epoch, r.count)


def _take_done(fields: Fields) -> m.Done:
    epoch, count = count_fields(fields, 2)
    return m.Done(take_int(epoch), take_int(count))


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
        [clip(client.client) for client in bounded(r.sessions, MAX_ROWS)],
        put_u64s(x for c in r.sessions for x in (c.session, c.leases, c.reservations)),
    )


def _take_stats(fields: Fields) -> m.Stats:
    epoch, pid, uptime, pool, packed_counts, names, packed_clients = count_fields(fields, 7)
    if type(pool) is not list:
        bad("an array for the pool", pool)
    counts = take_u64s(take_bytes(packed_counts))
    clients = take_texts(names)
    numbers = take_u64s(take_bytes(packed_clients))
    if len(counts) != 15 or len(numbers) != 3 * len(clients):
        raise ValueError("counters of another number than this version has")
    return m.Stats(  # type: ignore[call-arg] # counted above
        take_int(epoch),
        take_int(pid),
        take_float(uptime),
        _take_pool(pool),
        *counts,  # type: ignore[arg-type] # counted above
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
        for row in bounded(r.rows, MAX_ROWS)
    ]
    return (r.epoch, b"".join(rows))


def _take_object_rows(fields: Fields) -> m.ObjectRows:
    epoch, packed = count_fields(fields, 2)
    return m.ObjectRows(
        take_int(epoch),
        tuple(
            m.ObjectRow(
                Namespace(namespace),
                Key(key),
                m.ObjectState(state),
                Extent(offset, length, Generation(generation)),
                take_float(age),
                leases,
            )
            for namespace, key, offset, length, generation, age, leases, state in (
                _ROW.iter_unpack(take_bytes(packed))
            )
        ),
    )


def _put_refused(r: m.Refused) -> Fields:
    return (r.epoch, r.code.value, clip(r.message))


def _take_refused(fields: Fields) -> m.Refused:
    epoch, code, message = count_fields(fields, 3)
    return m.Refused(take_int(epoch), m.ErrorCode(take_int(code)), take_text(message))


REPLY_ENCODERS: dict[type, tuple[int, Callable[[Any], Fields]]] = {
    m.SessionOpened: (65, _put_session_opened),
    m.LeaseGrant: (66, _put_lease_grant),
    m.Renewed: (67, _put_renewed),
    m.Reserved: (68, _put_reserved),
    m.Committed: (69, _put_committed),
    m.Done: (70, _put_done),
    m.Stats: (71, _put_stats),
    m.ObjectRows: (72, _put_object_rows),
    m.Refused: (REFUSED, _put_refused),
}
"""Kind number and fields of every reply."""

REPLY_DECODERS: dict[int, Callable[[Fields], Any]] = {
    65: _take_session_opened,
    66: _take_lease_grant,
    67: lambda fields: m.Renewed(*_take_lost(fields)),  # type: ignore[arg-type] # plain ints
    68: _take_reserved,
    69: lambda fields: m.Committed(*_take_lost(fields)),  # type: ignore[arg-type] # plain ints
    70: _take_done,
    71: _take_stats,
    72: _take_object_rows,
    REFUSED: _take_refused,
}
"""What makes a reply of a kind's fields; raises ValueError or struct.error."""
