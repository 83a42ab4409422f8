"""The fields of every request on the wire, both ways; docs/protocol.md has them as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maru_shm.control import messages as m
from maru_shm.control.fields import (
    ABSENT_KEY,
    MAX_PARTS,
    MAX_ROWS,
    Fields,
    bounded,
    clip,
    count_fields,
    digest,
    put_asked_keys,
    put_keys,
    put_u64s,
    same_length,
    take_bytes,
    take_int,
    take_keys,
    take_text,
    take_u64s,
)
from maru_shm.types import (
    Generation,
    Key,
    Namespace,
    OwnerToken,
    PartChecksum,
    SessionId,
)


def _put_open_session(r: m.OpenSession) -> Fields:
    return (r.owner, clip(r.lock_path), clip(r.client))


def _take_open_session(fields: Fields) -> m.OpenSession:
    owner, lock_path, client = count_fields(fields, 3)
    return m.OpenSession(OwnerToken(take_int(owner)), take_text(lock_path), take_text(client))


def _put_close_session(r: m.CloseSession) -> Fields:
    return (r.session,)


def _take_close_session(fields: Fields) -> m.CloseSession:
    (session,) = count_fields(fields, 1)
    return m.CloseSession(SessionId(take_int(session)))


def _put_lookup(r: m.LookupPrefix | m.LookupEach) -> Fields:
    return (r.session, digest(r.namespace), put_asked_keys(bounded(r.keys)))


def _put_delete(r: m.Delete) -> Fields:
    return (r.session, digest(r.namespace), put_keys(bounded(r.keys)))


def _take_keyed(fields: Fields) -> tuple[SessionId, Namespace, tuple[Key, ...]]:
    session, namespace, keys = count_fields(fields, 3)
    return (
        SessionId(take_int(session)),
        Namespace(digest(namespace)),
        bounded(take_keys(take_bytes(keys))),
    )


def _put_leases(r: m.RenewLeases | m.ReleaseLeases) -> Fields:
    return (r.session, put_u64s(bounded(r.leases)))


def _put_generations(r: m.Abort | m.ReportSuspect) -> Fields:
    return (r.session, put_u64s(bounded(r.generations)))


def _take_numbers(fields: Fields) -> tuple[SessionId, tuple[int, ...]]:
    session, numbers = count_fields(fields, 2)
    return SessionId(take_int(session)), bounded(take_u64s(take_bytes(numbers)))


def _put_reserve(r: m.Reserve) -> Fields:
    items = bounded(r.items)
    return (
        r.session,
        digest(r.namespace),
        put_keys([item.key for item in items]),
        bytes(item.parent is not None for item in items),
        put_keys([ABSENT_KEY if item.parent is None else item.parent for item in items]),
        put_u64s(item.length for item in items),
    )


def _take_reserve(fields: Fields) -> m.Reserve:
    session, namespace, packed_keys, has_parent, packed_parents, packed_lengths = count_fields(
        fields, 6
    )
    keys = bounded(take_keys(take_bytes(packed_keys)))
    parents = take_keys(take_bytes(packed_parents))
    lengths = take_u64s(take_bytes(packed_lengths))
    same_length(keys, parents, lengths, take_bytes(has_parent))
    return m.Reserve(
        SessionId(take_int(session)),
        Namespace(digest(namespace)),
        tuple(
            m.ReserveItem(key, parent if has else None, length)
            for key, has, parent, length in zip(keys, has_parent, parents, lengths, strict=True)
        ),
    )


def _put_commit(r: m.Commit) -> Fields:
    items = bounded(r.items)
    return (
        r.session,
        put_u64s(item.generation for item in items),
        bytes(len(bounded(item.parts, MAX_PARTS)) for item in items),
        put_u64s(x for item in items for part in item.parts for x in (part.full, part.sample)),
    )


def _take_commit(fields: Fields) -> m.Commit:
    session, packed_generations, part_counts, packed_sums = count_fields(fields, 4)
    generations = bounded(take_u64s(take_bytes(packed_generations)))
    same_length(generations, take_bytes(part_counts))
    sums = take_u64s(take_bytes(packed_sums))
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
    return m.Commit(SessionId(take_int(session)), tuple(items))


def _take_get_stats(fields: Fields) -> m.GetStats:
    count_fields(fields, 0)
    return m.GetStats()


def _put_list_objects(r: m.ListObjects) -> Fields:
    return (r.after, r.limit)


def _take_list_objects(fields: Fields) -> m.ListObjects:
    after, limit = count_fields(fields, 2)
    if take_int(limit) > MAX_ROWS:
        raise ValueError(f"{limit} rows asked for; at most {MAX_ROWS} come in one page")
    return m.ListObjects(Generation(take_int(after)), limit)


REQUEST_ENCODERS: dict[type, tuple[int, Callable[[Any], Fields]]] = {
    m.OpenSession: (1, _put_open_session),
    m.CloseSession: (2, _put_close_session),
    m.LookupPrefix: (3, _put_lookup),
    m.LookupEach: (4, _put_lookup),
    m.RenewLeases: (5, _put_leases),
    m.ReleaseLeases: (6, _put_leases),
    m.Reserve: (7, _put_reserve),
    m.Commit: (8, _put_commit),
    m.Abort: (9, _put_generations),
    m.ReportSuspect: (10, _put_generations),
    m.Delete: (11, _put_delete),
    m.GetStats: (12, lambda _: ()),
    m.ListObjects: (13, _put_list_objects),
}
"""Kind number and fields of every request."""

REQUEST_DECODERS: dict[int, Callable[[Fields], Any]] = {
    1: _take_open_session,
    2: _take_close_session,
    3: lambda fields: m.LookupPrefix(*_take_keyed(fields)),
    4: lambda fields: m.LookupEach(*_take_keyed(fields)),
    5: lambda fields: m.RenewLeases(*_take_numbers(fields)),  # type: ignore[arg-type] # plain ints
    6: lambda fields: m.ReleaseLeases(*_take_numbers(fields)),  # type: ignore[arg-type] # plain ints
    7: _take_reserve,
    8: _take_commit,
    9: lambda fields: m.Abort(*_take_numbers(fields)),  # type: ignore[arg-type] # plain ints
    10: lambda fields: m.ReportSuspect(*_take_numbers(fields)),  # type: ignore[arg-type] # plain ints
    11: lambda fields: m.Delete(*_take_keyed(fields)),
    12: _take_get_stats,
    13: _take_list_objects,
}
"""What makes a request of a kind's fields; raises ValueError or struct.error."""
