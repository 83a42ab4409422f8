"""Leases: who reads what, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from maru_shm.index.entries import Entry
from maru_shm.types import Generation, LeaseId, OwnerToken, SessionId


class Session:
    """What one client's life at this server holds."""

    __slots__ = ("id", "leases", "owner", "reservations")

    def __init__(self, session: SessionId, owner: OwnerToken) -> None:
        self.id = session
        self.owner = owner
        self.leases: dict[LeaseId, Lease] = {}
        self.reservations: dict[Generation, Entry] = {}


class Lease:
    """One session's right to read the objects of one lookup."""

    __slots__ = ("entries", "expires_at", "holder", "id")

    def __init__(
        self, lease: LeaseId, holder: Session, entries: Sequence[Entry], expires_at: float
    ) -> None:
        self.id = lease
        self.holder = holder
        self.entries = entries
        self.expires_at = expires_at


class LeaseBook:
    """Every lease that stands, soonest to expire first: one term for all keeps that order.

    Knows nothing of what a lease protects; whoever removes one must end it (``Index``).
    """

    def __init__(self, term_s: float, before_first_id: int = 0) -> None:
        """Ids count up from ``before_first_id`` + 1; another range in every epoch, so that a
        release that comes late, from before a restart, can end no lease of after it."""
        self._term_s = term_s
        self._standing: OrderedDict[LeaseId, Lease] = OrderedDict()
        self._last_id = before_first_id

    def __len__(self) -> int:
        return len(self._standing)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._standing.values())

    def grant(self, holder: Session, entries: Sequence[Entry], now: float) -> Lease:
        """A new lease on ``entries`` from ``now`` on."""
        self._last_id += 1
        lease = Lease(LeaseId(self._last_id), holder, entries, now + self._term_s)
        self._standing[lease.id] = holder.leases[lease.id] = lease
        return lease

    def renew(self, lease: Lease, now: float) -> None:
        """Begin the lease's term anew."""
        lease.expires_at = now + self._term_s
        self._standing.move_to_end(lease.id)

    def remove(self, lease: Lease) -> None:
        """Strike out a lease that stands."""
        del self._standing[lease.id]
        del lease.holder.leases[lease.id]

    def overdue(self, now: float) -> list[Lease]:
        """Leases whose term is over; they stand until they are removed."""
        found = []
        for lease in self._standing.values():
            if lease.expires_at > now:
                break
            found.append(lease)
        return found
