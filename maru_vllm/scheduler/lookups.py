"""Which leading chunks of a request lie sealed in the pool, asked without waiting.

A lookup starts when the request arrives and is normally answered before the scheduler asks. A
grant is a lease on all the objects that were found; it belongs to this module until a load takes
it over or it is given back. Grants that grew old while the request queued are asked anew: their
lease may be close to its end, and the pool may hold more by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique

from maru_shm.control.errors import ControlError
from maru_shm.control.messages import LeaseGrant
from maru_shm.control.plane import Connection, ControlPlane, Pending
from maru_shm.types import Extent, Key, LeaseId, Namespace
from maru_vllm.scheduler.outbox import Outbox, same_session
from maru_vllm.scheduler.ports import Clock
from maru_vllm.stats import Counter, MaruStats

REPLY_TIMEOUT_S = 1.0
"""A request may queue for longer than the scheduler is ready to wait once it asks; an answer that
took this long is not worth keeping the question for."""

GRANT_AGE_OF_TERM = 1 / 3
"""A grant older than this part of its lease's term is asked anew before a load is built on it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease on the longest sealed prefix."""

    lease: LeaseId
    extents: tuple[Extent, ...]
    """One per leading chunk, at least one."""
    origin: Connection
    taken_at: float


@unique
class Verdict(Enum):
    """What there is to say about a request without a grant."""

    ASK_AGAIN = "ask again"
    NOTHING = "nothing"


@dataclass(slots=True)
class _Lookup:
    """A question under way, or its answer."""

    pending: Pending[LeaseGrant] | None
    """None once answered."""
    origin: Connection
    submitted_at: float
    num_keys: int
    first_asked_at: float | None = None
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class _Abandoned:
    pending: Pending[LeaseGrant]
    origin: Connection


class Lookups:
    """Questions and unused grants of all waiting requests. Owned by the scheduler's thread."""

    def __init__(
        self,
        plane: ControlPlane,
        outbox: Outbox,
        stats: MaruStats,
        clock: Clock,
        patience_s: float,
    ) -> None:
        self._plane = plane
        self._outbox = outbox
        self._stats = stats
        self._clock = clock
        self._patience_s = patience_s
        self._lookups: dict[str, _Lookup] = {}
        self._abandoned: list[_Abandoned] = []

    def start(
        self,
        request_id: str,
        namespace: Namespace,
        keys: Sequence[Key],
        connection: Connection | None,
    ) -> None:
        """Ask for ``keys`` unless a question or a grant stands; does nothing without a server."""
        if connection is None or not keys or request_id in self._lookups:
            return
        self._lookups[request_id] = _Lookup(
            pending=self._plane.submit_lookup_prefix(namespace, tuple(keys), REPLY_TIMEOUT_S),
            origin=connection,
            submitted_at=self._clock(),
            num_keys=len(keys),
        )

    def knows(self, request_id: str) -> bool:
        """Whether a question or an answer of this request stands."""
        return request_id in self._lookups

    def ask(self, request_id: str, connection: Connection | None) -> Grant | Verdict:
        """The scheduler wants to know now. Repeating the question changes nothing."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return Verdict.NOTHING
        now = self._clock()
        if lookup.first_asked_at is None:
            lookup.first_asked_at = now
        if lookup.pending is not None:
            self._plane.poll()
            if not lookup.pending.done():
                if now - lookup.first_asked_at < self._patience_s:
                    return Verdict.ASK_AGAIN
                self._stats.count(Counter.LOOKUPS_LATE)
                return Verdict.NOTHING
            self._take_answer(lookup, now)
        if lookup.grant is None or not same_session(lookup.origin, connection):
            return Verdict.NOTHING
        return lookup.grant

    def is_stale(self, request_id: str, connection: Connection | None) -> bool:
        """Whether the answer is too old to build a load on, or stems from another session."""
        lookup = self._lookups.get(request_id)
        if lookup is None or not (lookup.pending is None or lookup.pending.done()):
            return False
        if connection is not None and not same_session(lookup.origin, connection):
            return True
        age_s = self._clock() - lookup.submitted_at
        return age_s > lookup.origin.lease_term_s * GRANT_AGE_OF_TERM

    def _take_answer(self, lookup: _Lookup, now: float) -> None:
        assert lookup.pending is not None
        pending, lookup.pending = lookup.pending, None
        try:
            reply = pending.take()
        except ControlError:
            self._stats.count(Counter.LOOKUPS_FAILED)
            return
        self._stats.count(Counter.LOOKUPS)
        self._stats.count(Counter.LOOKUP_CHUNKS, lookup.num_keys)
        self._stats.count(Counter.FOUND_CHUNKS, len(reply.extents))
        self._stats.add_seconds(Counter.LOOKUP_SECONDS, now - lookup.submitted_at)
        extents = tuple(extent for extent in reply.extents if extent is not None)
        if reply.lease is None:
            return
        if reply.epoch != lookup.origin.epoch or len(extents) != len(reply.extents) or not extents:
            self._outbox.release(reply.lease, lookup.origin)
            return
        lookup.grant = Grant(reply.lease, extents, lookup.origin, now)

    def take(self, request_id: str) -> Grant | None:
        """Hand the grant over: whoever took it releases it."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is None:
            return None
        if lookup.pending is not None:
            self._abandoned.append(_Abandoned(lookup.pending, lookup.origin))
        return lookup.grant

    def drop(self, request_id: str) -> None:
        """Nobody needs the answer any more; a lease, also a late one, goes back."""
        grant = self.take(request_id)
        if grant is not None:
            self._outbox.release(grant.lease, grant.origin)

    def collect(self) -> None:
        """Give late grants back."""
        still: list[_Abandoned] = []
        for abandoned in self._abandoned:
            if not abandoned.pending.done():
                still.append(abandoned)
                continue
            try:
                reply = abandoned.pending.take()
            except ControlError:
                continue
            if reply.lease is not None and reply.epoch == abandoned.origin.epoch:
                self._outbox.release(reply.lease, abandoned.origin)
        self._abandoned = still

    @property
    def awaits_answer(self) -> bool:
        """Whether a lease may still arrive that has to be given back. Bounded by the timeout."""
        return bool(self._abandoned)
