"""Requests and replies of the control plane, as plain values.

Every request is a batch. How they look on the wire, and the protocol's version, stand in
``wire.py`` and docs/protocol.md; what they mean stands here. Replies carry the server's epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique

from maru_shm.types import (
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

# ---------------------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begin (or, after a server restart, begin again) this client's life at the server."""

    owner: OwnerToken
    lock_path: str
    """File that the client and its workers hold a shared flock on for as long as they live."""
    client: str
    """For people: program, pid, purpose. Shown by ``maru stat``."""


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What a process needs to map the pool."""

    path: str
    medium: str
    """Name of the medium kind, as ``maru_shm.pool.medium.open_medium`` takes it."""
    uuid: bytes
    """16 bytes; a pool made anew has another."""
    geometry: PoolGeometry


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The session stands; here is the pool that its extents lie in."""

    session: SessionId
    epoch: int
    lease_term_s: float
    pool: PoolInfo


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Say goodbye: the client itself reads and writes no more. Reservations that a worker of it
    may still be writing to (it holds the lock file) are freed when that worker is gone."""

    session: SessionId


# ---------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class LookupPrefix:
    """Find and lease the longest run of sealed objects from the first key on."""

    session: SessionId
    namespace: Namespace
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class LookupEach:
    """Find and lease every sealed object among the keys, each on its own."""

    session: SessionId
    namespace: Namespace
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Answer to both lookups. The leased objects' bytes do not change while the lease stands."""

    epoch: int
    lease: LeaseId | None
    """None when nothing was found."""
    extents: Sequence[Extent | None]
    """For ``LookupPrefix`` the found prefix only (no None); for ``LookupEach`` one per key.
    Immutable: a tuple, or ``maru_shm.extents.Extents``, which builds what is looked at."""


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Begin the term of these leases anew."""

    session: SessionId
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to ``RenewLeases``."""

    epoch: int
    lost: tuple[LeaseId, ...]
    """Leases that no longer stand; their objects may change at any moment."""


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """The client reads nothing under these leases any more."""

    session: SessionId
    leases: tuple[LeaseId, ...]


# ---------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class ReserveItem:
    """One object that the client wants to write."""

    key: Key
    parent: Key | None
    """Key of the object that this one continues; None at the start of a chain. The parent may
    be missing from the pool; where it is there, it outlives its children."""
    length: int
    """Payload bytes, all parts together."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for space. Items are granted or not one by one, in order."""

    session: SessionId
    namespace: Namespace
    items: tuple[ReserveItem, ...]


@unique
class ReserveOutcome(Enum):
    """What came of one ``ReserveItem``; the values are the wire's."""

    GRANTED = 0
    PRESENT = 1
    """Sealed already; nothing to do."""
    BEING_WRITTEN = 2
    """Another reservation for this key stands."""
    NO_SPACE = 3
    """Nothing could be evicted for it."""
    TOO_LARGE = 4
    """Larger than a segment's payload: will never fit this pool."""


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """Answer to one ``ReserveItem``."""

    outcome: ReserveOutcome
    extent: Extent | None
    """Set exactly when GRANTED. Write the payload there, then commit or abort the generation."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to ``Reserve``: one result per item, in order."""

    epoch: int
    results: tuple[ReserveResult, ...]


@dataclass(frozen=True, slots=True)
class CommitItem:
    """One written object."""

    generation: Generation
    parts: tuple[PartChecksum, ...]
    """One per part, in part order; empty if the writer computed none. Parts are equal in size:
    part ``i`` of ``n`` covers payload bytes ``[i * length // n, (i + 1) * length // n)``."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Make written objects visible. All their bytes must already be written and flushed."""

    session: SessionId
    items: tuple[CommitItem, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer to ``Commit``."""

    epoch: int
    lost: tuple[Generation, ...]
    """Reservations that no longer stood (older epoch, session gone): the bytes are dropped."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Give reservations back. The caller promises that nobody writes there any more."""

    session: SessionId
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class ReportSuspect:
    """These objects failed a check; they disappear, and are never served again."""

    session: SessionId
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove sealed objects that nobody leases."""

    session: SessionId
    namespace: Namespace
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to requests that report a count only."""

    epoch: int
    count: int
    """How many of the request's items took effect."""


# ---------------------------------------------------------------------------- looking in


@dataclass(frozen=True, slots=True)
class GetStats:
    """Needs no session."""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """One session as the server sees it."""

    session: SessionId
    client: str
    leases: int
    reservations: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A server at one moment; counters only ever grow within an epoch."""

    epoch: int
    server_pid: int
    uptime_s: float
    pool: PoolInfo
    populated_bytes: int
    used_bytes: int
    """Bytes of slots that hold a sealed, reserved or quarantined object."""
    objects: int
    reservations: int
    quarantined: int
    leases: int
    lookups: int
    lookup_keys: int
    hit_keys: int
    reserved_total: int
    committed_total: int
    aborted_total: int
    evicted_total: int
    suspect_total: int
    no_space_total: int
    sessions: tuple[ClientStats, ...]


@dataclass(frozen=True, slots=True)
class ListObjects:
    """Needs no session. Pages through the sealed and reserved objects."""

    after: Generation
    """Continue behind this generation (0: from the start); ascending generations."""
    limit: int


@unique
class ObjectState(Enum):
    """Of an object in a listing; the values are the wire's."""

    WRITING = 1
    SEALED = 2


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object in a listing."""

    namespace: Namespace
    key: Key
    state: ObjectState
    extent: Extent
    age_s: float
    """Since its last use."""
    leases: int


@dataclass(frozen=True, slots=True)
class ObjectRows:
    """One page of a listing; a page shorter than the limit is the last."""

    epoch: int
    rows: tuple[ObjectRow, ...]


# ---------------------------------------------------------------------------- failure


@unique
class ErrorCode(Enum):
    """Why a request was refused; the values are the wire's."""

    BAD_REQUEST = 1
    UNKNOWN_SESSION = 2
    """Usually: the server was restarted. Open the session again."""
    WRONG_VERSION = 3
    INTERNAL = 4


@dataclass(frozen=True, slots=True)
class Refused:
    """The server did nothing, and why."""

    epoch: int
    code: ErrorCode
    message: str


Request = (
    OpenSession
    | CloseSession
    | LookupPrefix
    | LookupEach
    | RenewLeases
    | ReleaseLeases
    | Reserve
    | Commit
    | Abort
    | ReportSuspect
    | Delete
    | GetStats
    | ListObjects
)
Reply = (
    SessionOpened
    | LeaseGrant
    | Renewed
    | Reserved
    | Committed
    | Done
    | Stats
    | ObjectRows
    | Refused
)
