"""The server's mind: one request in, one reply out, the pool brought up to date in between.

No sockets, no time but the clock that it is given, one thread. What the index decides comes back
as effects; they are applied to the pool *before* the reply leaves, so whoever has an extent in
its hands finds the header that belongs to it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from maru_shm.control import messages as m
from maru_shm.control.sessions import Owners, Sessions
from maru_shm.index.effects import Effect
from maru_shm.index.errors import IndexRefusalError, UnknownSession
from maru_shm.index.index import Index
from maru_shm.pool.errors import PoolError
from maru_shm.types import OwnerToken, SessionId

log = logging.getLogger(__name__)

Clock = Callable[[], float]

_NO_SPACE = m.ReserveResult(m.ReserveOutcome.NO_SPACE, None)


class Medium(Protocol):
    """What the service needs of the pool: to be told of, and to be changed."""

    def info(self) -> m.PoolInfo:
        """How clients find it."""

    def populated_bytes(self) -> int:
        """How much of the server's own mapping is populated."""

    def apply(self, effects: Sequence[Effect]) -> None:
        """Carry the effects out, in order."""


class Service:
    """Answers requests from one index over one pool. Never raises out of ``handle``."""

    def __init__(
        self,
        index: Index,
        medium: Medium,
        owners: Owners,
        clock: Clock,
        *,
        epoch: int,
        lease_term_s: float,
    ) -> None:
        self._index = index
        self._medium = medium
        self._owners = owners
        self._clock = clock
        self._epoch = epoch
        self._lease_term_s = lease_term_s
        self._sessions = Sessions(epoch, owners, index.quarantined_owners())
        self._started_at = clock()
        self._last_warning = ""
        self._handlers: dict[type, Callable[[Any], m.Reply]] = {
            m.OpenSession: self._open_session,
            m.CloseSession: self._close_session,
            m.LookupPrefix: self._lookup_prefix,
            m.LookupEach: self._lookup_each,
            m.RenewLeases: self._renew,
            m.ReleaseLeases: self._release,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.ReportSuspect: self._suspect,
            m.Delete: self._delete,
            m.GetStats: self._stats,
            m.ListObjects: self._list_objects,
        }

    @property
    def epoch(self) -> int:
        """This incarnation, as every reply says."""
        return self._epoch

    @property
    def num_sessions(self) -> int:
        """Sessions that stand, those on their way out included."""
        return len(self._sessions)

    @property
    def index(self) -> Index:
        """For tests: the index behind the answers."""
        return self._index

    def handle(self, request: m.Request) -> m.Reply:
        """Answer one request. A refusal, and a failure in here, is a ``Refused``."""
        try:
            return self._handlers[type(request)](request)
        except UnknownSession as error:
            return self.refuse(m.ErrorCode.UNKNOWN_SESSION, str(error))
        except IndexRefusalError as error:
            return self.refuse(m.ErrorCode.BAD_REQUEST, str(error))
        except Exception as error:
            log.exception("request %s failed", type(request).__name__)
            return self.refuse(
                m.ErrorCode.INTERNAL, f"{type(error).__name__}: {error}; see the server's log"
            )

    def refuse(self, code: m.ErrorCode, message: str) -> m.Refused:
        """A refusal that carries this server's epoch."""
        return m.Refused(self._epoch, code, message)

    def take_back(self, request: m.Request, reply: m.Reply) -> None:
        """The reply could not be delivered: undo what it grants, nobody else knows of it."""
        if isinstance(request, m.LookupPrefix | m.LookupEach) and isinstance(reply, m.LeaseGrant):
            if reply.lease is not None:
                self.handle(m.ReleaseLeases(request.session, (reply.lease,)))
        elif isinstance(request, m.Reserve) and isinstance(reply, m.Reserved):
            granted = tuple(r.extent.generation for r in reply.results if r.extent is not None)
            if granted:
                self.handle(m.Abort(request.session, granted))

    def tend(self) -> None:
        """What must happen now and then (about twice a second): find the dead, end old leases."""
        for owner in self._sessions.reap():
            log.info("owner %016x is gone; its leases and reservations are freed", owner)
            self._apply_each(self._index.owner_died(owner))
        self._apply_each(self._index.expire())

    # ------------------------------------------------------------------------ sessions

    def _open_session(self, request: m.OpenSession) -> m.Reply:
        expected = self._owners.lock_path(request.owner)
        if not 0 < request.owner < 1 << 63 or request.lock_path != expected:
            # Anything else could make this server lock, and later remove, a file of somebody else.
            return self.refuse(
                m.ErrorCode.BAD_REQUEST,
                f"the session's lock file must be {expected}, not {request.lock_path}; client and "
                "server must use the same runtime directory (MARU_RUNTIME_DIR)",
            )
        if not self._owners.watch(request.owner):
            return self.refuse(
                m.ErrorCode.BAD_REQUEST, f"nobody holds the session's lock file {expected}"
            )
        known = self._sessions.find(request.owner)
        session = self._sessions.open(request.owner, request.client)
        if known is None:
            self._index.open_session(session.id, request.owner)
            log.info("session %#x opened by %s", session.id, request.client)
        return m.SessionOpened(session.id, self._epoch, self._lease_term_s, self._medium.info())

    def _close_session(self, request: m.CloseSession) -> m.Reply:
        if not self._sessions.is_open(request.session):
            raise UnknownSession(request.session)
        owner = self._sessions.leave(request.session).owner
        # A worker that still holds the lock file may still write: then ``tend`` frees the
        # reservations when it has let go.
        if self._owners.reap(owner):
            self._forget(owner)
        return m.Done(self._epoch, 1)

    def _forget(self, owner: OwnerToken) -> None:
        self._sessions.forget(owner)
        self._apply(self._index.owner_died(owner))

    def _check_open(self, session: SessionId) -> None:
        if not self._sessions.is_open(session):
            raise UnknownSession(session)

    # ------------------------------------------------------------------------- reading

    def _lookup_prefix(self, request: m.LookupPrefix) -> m.Reply:
        self._check_open(request.session)
        found = self._index.lookup_prefix(request.session, request.namespace, request.keys)
        return m.LeaseGrant(self._epoch, found.lease, found.extents)

    def _lookup_each(self, request: m.LookupEach) -> m.Reply:
        self._check_open(request.session)
        found = self._index.lookup_each(request.session, request.namespace, request.keys)
        return m.LeaseGrant(self._epoch, found.lease, found.extents)

    def _renew(self, request: m.RenewLeases) -> m.Reply:
        self._check_open(request.session)
        return m.Renewed(self._epoch, tuple(self._index.renew(request.session, request.leases)))

    def _release(self, request: m.ReleaseLeases) -> m.Reply:
        self._check_open(request.session)
        return m.Done(self._epoch, self._index.release(request.session, request.leases))

    # ------------------------------------------------------------------------- writing

    def _reserve(self, request: m.Reserve) -> m.Reply:
        self._check_open(request.session)
        answer = self._index.reserve(request.session, request.namespace, request.items)
        try:
            self._apply(answer.effects)
        except PoolError as error:
            # Others took the blocks that the medium had free. Nobody was told of the grants yet.
            self._warn_of_space(error)
            self._apply_each(answer.effects)
            granted = [r.extent.generation for r in answer.results if r.extent is not None]
            self._apply_each(self._index.abort(request.session, granted).effects)
            return m.Reserved(
                self._epoch,
                tuple(r if r.extent is None else _NO_SPACE for r in answer.results),
            )
        return m.Reserved(self._epoch, tuple(answer.results))

    def _commit(self, request: m.Commit) -> m.Reply:
        self._check_open(request.session)
        answer = self._index.commit(request.session, request.items)
        try:
            self._apply(answer.effects)
        except PoolError as error:
            # More parts than the header has room for. The index believes them sealed by now.
            lost = set(answer.lost)
            sealed = [i.generation for i in request.items if i.generation not in lost]
            self._apply_each(answer.effects)
            self._apply_each(self._index.suspect(request.session, sealed).effects)
            return self.refuse(m.ErrorCode.BAD_REQUEST, f"{error}; the objects were dropped")
        return m.Committed(self._epoch, tuple(answer.lost))

    def _abort(self, request: m.Abort) -> m.Reply:
        self._check_open(request.session)
        answer = self._index.abort(request.session, request.generations)
        self._apply(answer.effects)
        return m.Done(self._epoch, answer.count)

    def _suspect(self, request: m.ReportSuspect) -> m.Reply:
        self._check_open(request.session)
        answer = self._index.suspect(request.session, request.generations)
        self._apply(answer.effects)
        if answer.count:
            log.warning(
                "session %#x reported %d objects as corrupt; they were removed",
                request.session,
                answer.count,
            )
        return m.Done(self._epoch, answer.count)

    def _delete(self, request: m.Delete) -> m.Reply:
        self._check_open(request.session)
        answer = self._index.delete(request.session, request.namespace, request.keys)
        self._apply(answer.effects)
        return m.Done(self._epoch, answer.count)

    # ---------------------------------------------------------------------- looking in

    def _stats(self, _: m.GetStats) -> m.Reply:
        counts = self._index.counts()
        held = {each.session: each for each in self._index.session_counts()}
        return m.Stats(
            epoch=self._epoch,
            server_pid=os.getpid(),
            uptime_s=self._clock() - self._started_at,
            pool=self._medium.info(),
            populated_bytes=self._medium.populated_bytes(),
            used_bytes=counts.used_bytes,
            objects=counts.objects,
            reservations=counts.reservations,
            quarantined=counts.quarantined,
            leases=counts.leases,
            lookups=counts.lookups,
            lookup_keys=counts.lookup_keys,
            hit_keys=counts.hit_keys,
            reserved_total=counts.reserved_total,
            committed_total=counts.committed_total,
            aborted_total=counts.aborted_total,
            evicted_total=counts.evicted_total,
            suspect_total=counts.suspect_total,
            no_space_total=counts.no_space_total,
            sessions=tuple(
                m.ClientStats(
                    session.id,
                    session.client,
                    held[session.id].leases,
                    held[session.id].reservations,
                )
                for session in self._sessions
            ),
        )

    def _list_objects(self, request: m.ListObjects) -> m.Reply:
        rows = self._index.list_objects(request.after, request.limit)
        return m.ObjectRows(self._epoch, tuple(rows))

    def _apply(self, effects: Sequence[Effect]) -> None:
        if effects:
            self._medium.apply(effects)

    def _apply_each(self, effects: Sequence[Effect]) -> None:
        """Apply what can be applied, where the index has gone ahead and cannot go back.

        Effects of one call may be applied twice: in the same order they come to the same.
        """
        for effect in effects:
            try:
                self._medium.apply((effect,))
            except PoolError as error:
                log.debug("left out %s: %s", effect, error)

    def _warn_of_space(self, error: PoolError) -> None:
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            log.warning("cannot store: %s", error)
