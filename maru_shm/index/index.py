"""The index: what lies where in the pool, who may read it, who is writing it, what goes next.

A pure data structure: no socket, no memory mapping, no clock but the one given to it. Every
change of bytes leaves it as an effect (``effects``) that the service applies before it answers.
One thread calls it (the server's); nothing here blocks or locks.

    Index                 sessions, leases, the rules of every request     (this file)
      Reserving           one request for space
      Placement           room for new objects: segments and eviction
        Catalog           all that has space: by key, generation, slot, age
          Forest          keys of one namespace and the chains between them
          Segments        segments, slots, size classes
          EvictionPolicy  order of the evictable leaves of one size class
      LeaseBook           leases in the order in which they expire

Costs do not grow with the number of objects, but for memory misses: 128 keys of one chain are
looked up in about 20 us (benchmarks/index_scale.py). Removed entries leave no reference cycles;
a process that keeps millions of objects is better off without Python's cyclic garbage collector
(``gc.disable()``), whose full passes visit every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from maru_shm.control.messages import (
    CommitItem,
    ObjectRow,
    ObjectState,
    ReserveItem,
)
from maru_shm.extents import ABSENT_EXTENT, Extents
from maru_shm.index.answers import (
    CommitAnswer,
    CountAnswer,
    IndexCounts,
    Lookup,
    ReserveAnswer,
    SessionCounts,
)
from maru_shm.index.catalog import Catalog
from maru_shm.index.effects import Effect, WriteSealed
from maru_shm.index.entries import Entry, EntryState
from maru_shm.index.errors import InvalidLength, UnknownSession
from maru_shm.index.eviction import policy_named
from maru_shm.index.found import FoundSegment
from maru_shm.index.invariants import check
from maru_shm.index.leases import Lease, LeaseBook, Session
from maru_shm.index.placement import Placement
from maru_shm.index.reserving import Reserving
from maru_shm.index.restoring import restore
from maru_shm.index.segments import Segments
from maru_shm.types import (
    Generation,
    Key,
    LeaseId,
    Namespace,
    OwnerToken,
    PoolGeometry,
    SessionId,
)

Clock = Callable[[], float]
"""Seconds, never going backwards; from where is of no importance."""


@dataclass(slots=True)
class _Counters:
    lookups: int = 0
    lookup_keys: int = 0
    hit_keys: int = 0
    reserved: int = 0
    committed: int = 0
    aborted: int = 0
    suspect: int = 0
    no_space: int = 0


class Index:
    """Objects of one pool in one epoch of its server."""

    def __init__(
        self,
        geometry: PoolGeometry,
        epoch: int,
        clock: Clock,
        *,
        lease_term_s: float = 30.0,
        policy: str = "lru",
    ) -> None:
        """An index of an empty pool. Raises UnknownPolicy."""
        self._clock = clock
        self._catalog = Catalog(Segments(geometry, policy_named(policy)), epoch)
        self._placement = Placement(self._catalog)
        self._sessions: dict[SessionId, Session] = {}
        self._leases = LeaseBook(lease_term_s, before_first_id=epoch << 32)
        self._counters = _Counters()

    def restore(
        self, found: Iterable[FoundSegment], owner_lives: Callable[[OwnerToken], bool]
    ) -> list[Effect]:
        """Take in what a walk over the pool found. At most once, and before everything else.

        Reservations of owners that live are quarantined: their slots stay untouched until
        ``owner_died``, or until a session of that owner commits (in vain) or aborts them.
        """
        if not self._catalog.untouched:
            raise RuntimeError("restore() came after objects were added; it must come first")
        return restore(self._catalog, found, owner_lives, self._clock())

    # ------------------------------------------------------------------------ sessions

    def open_session(self, session: SessionId, owner: OwnerToken) -> None:
        """Begin a session; its id must never have been used in this epoch."""
        if session in self._sessions:
            raise ValueError(f"session {session} is open already; every opening needs a new id")
        self._sessions[session] = Session(session, owner)

    def close_session(self, session: SessionId) -> list[Effect]:
        """Drop the session's leases and free its reservations. A closed one is no error.

        Needs: the owner is known to be dead, or said goodbye with no copy in flight.
        """
        effects: list[Effect] = []
        holder = self._sessions.pop(session, None)
        if holder is not None:
            now = self._clock()
            for lease in list(holder.leases.values()):
                self._end(lease, now)
            for entry in holder.reservations.values():
                self._catalog.drop(entry, effects)
            self._counters.aborted += len(holder.reservations)
            self._catalog.segments.return_emptied(effects)
        return effects

    def owner_died(self, owner: OwnerToken) -> list[Effect]:
        """No process of this owner writes any more: close its sessions, free its quarantine."""
        effects: list[Effect] = []
        for session in [s.id for s in self._sessions.values() if s.owner == owner]:
            effects += self.close_session(session)
        for generation in list(self._catalog.quarantine.get(owner, ())):
            self._catalog.release_quarantined(owner, generation, effects)
        self._catalog.segments.return_emptied(effects)
        return effects

    def quarantined_owners(self) -> list[OwnerToken]:
        """Owners of an earlier epoch that still keep slots out of use."""
        return list(self._catalog.quarantine)

    # ------------------------------------------------------------------------- reading

    def lookup_prefix(
        self, session: SessionId, namespace: Namespace, keys: Sequence[Key]
    ) -> Lookup:
        """Find and lease the longest run of sealed objects from the first key on.

        The leased objects count as used until the lease ends.
        """
        holder = self._session(session)
        found: list[Entry] = []
        forest = self._catalog.forests.get(namespace)
        if forest is not None:
            get, append = forest.sealed.get, found.append
            entry: Entry | None = None
            for key in keys:
                if entry is None or entry.key != key:
                    entry = get(key)
                    if entry is None:
                        break
                entry.leases += 1
                append(entry)
                entry = entry.heir
        extents = Extents(b"".join([entry.packed_extent for entry in found]))
        return Lookup(self._lease(holder, found, len(keys)), extents)

    def lookup_each(self, session: SessionId, namespace: Namespace, keys: Sequence[Key]) -> Lookup:
        """Find and lease every sealed object among the keys; None where there is none."""
        holder = self._session(session)
        found: list[Entry] = []
        extents = [ABSENT_EXTENT] * len(keys)
        forest = self._catalog.forests.get(namespace)
        if forest is not None:
            get, append = forest.sealed.get, found.append
            heir: Entry | None = None
            for position, key in enumerate(keys):
                entry = heir if heir is not None and heir.key == key else get(key)
                if entry is None:
                    heir = None
                    continue
                entry.leases += 1
                append(entry)
                extents[position] = entry.packed_extent
                heir = entry.heir
        lease = self._lease(holder, found, len(keys))
        return Lookup(lease, Extents(b"".join(extents)))

    def renew(self, session: SessionId, leases: Sequence[LeaseId]) -> list[LeaseId]:
        """Begin the terms of these leases anew; returns those that no longer stand."""
        holder = self._session(session)
        now = self._clock()
        self._end_overdue(now)
        lost = []
        for number in leases:
            lease = holder.leases.get(number)
            if lease is None:
                lost.append(number)
            else:
                self._leases.renew(lease, now)
        return lost

    def release(self, session: SessionId, leases: Sequence[LeaseId]) -> int:
        """End these leases; returns how many stood."""
        holder = self._session(session)
        now = self._clock()
        self._end_overdue(now)
        standing = [lease for n in dict.fromkeys(leases) if (lease := holder.leases.get(n))]
        for lease in standing:
            self._end(lease, now)
        return len(standing)

    # ------------------------------------------------------------------------- writing

    def reserve(
        self, session: SessionId, namespace: Namespace, items: Sequence[ReserveItem]
    ) -> ReserveAnswer:
        """Grant space for objects to write, one item after the other.

        First writer wins: a key that is there or being written (by whomever) is not granted
        again. Never evicted for an item: what is leased, what something in the pool continues,
        and the parents of this call's items, because a chain is of no use without its head.
        """
        holder = self._session(session)
        for item in items:
            if item.length < 1:
                raise InvalidLength(item.length)
        now = self._clock()
        self._end_overdue(now)
        call = Reserving(self._catalog, self._placement, holder, namespace, now)
        answer = call.run(items)
        self._counters.reserved += call.granted
        self._counters.no_space += call.no_space
        return answer

    def commit(self, session: SessionId, items: Sequence[CommitItem]) -> CommitAnswer:
        """Make this session's written objects visible.

        A generation that is not reserved by this session is lost. If it is one of its owner's
        quarantined ones the slot is freed: the committer says that nobody writes there now.
        """
        holder = self._session(session)
        now = self._clock()
        lost: list[Generation] = []
        effects: list[Effect] = []
        for item in items:
            entry = holder.reservations.pop(item.generation, None)
            if entry is None:
                lost.append(item.generation)
                self._catalog.release_quarantined(holder.owner, item.generation, effects)
                continue
            effects.append(WriteSealed(entry.slot_offset, item.generation, item.parts))
            self._catalog.seal(entry, now)
            self._counters.committed += 1
        self._catalog.segments.return_emptied(effects)
        return CommitAnswer(lost, effects)

    def abort(self, session: SessionId, generations: Sequence[Generation]) -> CountAnswer:
        """Give this session's reservations, and its owner's quarantined ones, back."""
        holder = self._session(session)
        count = 0
        effects: list[Effect] = []
        for generation in generations:
            entry = holder.reservations.pop(generation, None)
            if entry is not None:
                self._catalog.drop(entry, effects)
                self._counters.aborted += 1
                count += 1
            elif self._catalog.release_quarantined(holder.owner, generation, effects):
                count += 1
        self._catalog.segments.return_emptied(effects)
        return CountAnswer(count, effects)

    def suspect(self, session: SessionId, generations: Sequence[Generation]) -> CountAnswer:
        """Take sealed objects that failed a check out of sight, for good.

        The header is cleared at once; the space is given out again only when the last lease on
        it has ended. What continued them stays, and is found by its own key.
        """
        self._session(session)
        count = 0
        effects: list[Effect] = []
        for generation in generations:
            entry = self._catalog.by_generation.get(generation)
            if entry is not None and entry.state is EntryState.SEALED:
                self._catalog.condemn(entry, effects)
                count += 1
        self._counters.suspect += count
        self._catalog.segments.return_emptied(effects)
        return CountAnswer(count, effects)

    def delete(self, session: SessionId, namespace: Namespace, keys: Sequence[Key]) -> CountAnswer:
        """Remove the sealed objects among the keys that nobody leases."""
        self._session(session)
        effects: list[Effect] = []
        self._end_overdue(self._clock())
        forest = self._catalog.forests.get(namespace)
        count = 0
        if forest is not None:
            for key in keys:
                entry = forest.sealed.get(key)
                if entry is not None and not entry.leases:
                    self._catalog.drop(entry, effects)
                    count += 1
        self._catalog.segments.return_emptied(effects)
        return CountAnswer(count, effects)

    # ------------------------------------------------------------------- now and then

    def expire(self) -> list[Effect]:
        """End leases whose term is over, and give empty segments back.

        Call it every few seconds. Nothing goes wrong if it comes late: ``reserve``, ``renew``,
        ``release`` and ``delete`` end overdue leases themselves.
        """
        effects: list[Effect] = []
        self._end_overdue(self._clock())
        self._catalog.segments.return_emptied(effects)
        return effects

    def counts(self) -> IndexCounts:
        """How things stand."""
        total = self._counters
        return IndexCounts(
            used_bytes=self._catalog.segments.used_bytes,
            objects=self._catalog.num_sealed,
            reservations=sum(len(s.reservations) for s in self._sessions.values()),
            quarantined=sum(map(len, self._catalog.quarantine.values())),
            leases=len(self._leases),
            lookups=total.lookups,
            lookup_keys=total.lookup_keys,
            hit_keys=total.hit_keys,
            reserved_total=total.reserved,
            committed_total=total.committed,
            aborted_total=total.aborted,
            evicted_total=self._placement.evicted_total,
            suspect_total=total.suspect,
            no_space_total=total.no_space,
        )

    def session_counts(self) -> list[SessionCounts]:
        """What each open session holds, in the order of their opening."""
        return [
            SessionCounts(s.id, leases=len(s.leases), reservations=len(s.reservations))
            for s in self._sessions.values()
        ]

    def list_objects(self, after: Generation, limit: int) -> list[ObjectRow]:
        """The first ``limit`` sealed and reserved objects behind generation ``after``."""
        now = self._clock()
        return [
            ObjectRow(
                namespace=entry.forest.namespace,
                key=entry.key,
                state=ObjectState.SEALED
                if entry.state is EntryState.SEALED
                else ObjectState.WRITING,
                extent=entry.extent,
                age_s=0.0 if entry.leases else now - entry.stamp,
                leases=entry.leases,
            )
            for entry in self._catalog.by_generation.after(after, limit)
        ]

    def check_invariants(self) -> None:
        """For tests: raises AssertionError that says what is inconsistent. Visits everything."""
        check(self._catalog, self._sessions.values(), self._leases)

    # ------------------------------------------------------------------------- within

    def _session(self, session: SessionId) -> Session:
        try:
            return self._sessions[session]
        except KeyError:
            raise UnknownSession(session) from None

    def _lease(self, holder: Session, found: list[Entry], num_keys: int) -> LeaseId | None:
        total = self._counters
        total.lookups += 1
        total.lookup_keys += num_keys
        if not found:
            return None
        total.hit_keys += len(found)
        return self._leases.grant(holder, found, self._clock()).id

    def _end_overdue(self, now: float) -> None:
        for lease in self._leases.overdue(now):
            self._end(lease, now)

    def _end(self, lease: Lease, now: float) -> None:
        """Strike a lease out. The deepest object becomes evictable first."""
        self._leases.remove(lease)
        catalog = self._catalog
        touch, unleased = catalog.segments.touch, catalog.unleased
        segment = None
        for entry in reversed(lease.entries):
            entry.stamp = now
            entry.leases -= 1
            if entry.segment is not segment:
                segment = entry.segment
                touch(segment, now)
            if not entry.leases and entry.first_child is None:
                unleased(entry)
