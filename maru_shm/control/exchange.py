"""The client's mind: requests under way, the session, and everything that arrives late.

Knows no sockets: a ``Transport`` carries messages, keeps their order, and may lose them only
together with the server. ``Client`` (ZeroMQ) and ``LocalPlane`` (in-process) are this class with a
transport, so what is true of one in a simulation is true of the other in production.

How a server's death is noticed: the connection is gone, or replies are overdue. Overdue replies
alone prove nothing (a slow server is no dead one), so the client first asks again for the session
that it has. The same session back: all is well, nothing was lost. No answer for
``HELLO_TIMEOUT_S``: there is no server until one answers; asking goes on with a back-off. Another
session back: the server was restarted, older leases and reservations are gone.

What nobody waits for any more must not leak. A lease that arrives for a request that expired, or
whose ``PendingReply`` was dropped, is released; a reservation is aborted, and that again and again
until a server has confirmed it.

Thread: one, the one that made it. Process: the one that made it; a fork gets a clear error.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from maru_shm.control import messages as m
from maru_shm.control.errors import (
    BadFrame,
    ControlError,
    RequestRefused,
    Unreachable,
)
from maru_shm.control.pending import PendingReply
from maru_shm.control.plane import Connection
from maru_shm.control.wire import ReplyFrame
from maru_shm.errors import MaruError
from maru_shm.types import Generation, Key, LeaseId, Namespace, SessionId

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 2.0
"""A server that does not answer ``OpenSession`` for so long counts as gone. Generous: a server
handles a request in well under a millisecond, but its host may be swapping."""

FIRST_RETRY_S = 0.001
"""A first connect takes about a millisecond; asking again costs next to nothing."""
LAST_RETRY_S = 0.1
"""A send that finds nobody costs microseconds, and a starting server is found this much later."""
REFUSED_RETRY_S = 2.0
"""A server that refused the session will hardly change its mind, but another may take its place."""

T = TypeVar("T")


class Transport(Protocol):
    """Carries messages to one server and back. All calls on the client's thread."""

    def send(self, request_id: int, request: m.Request) -> bool:
        """Send now; false if nobody is connected. ValueError if it can never be sent. Never
        blocks."""

    def receive(self) -> ReplyFrame | None:
        """The next reply that has arrived, if any. Never blocks, never raises."""

    def receive_within(self, timeout_s: float) -> ReplyFrame | None:
        """The next reply; blocks until it is here, at most ``timeout_s``. None may come early:
        then look whether there is anything else to do, and wait on. Never raises."""

    def has_peer(self) -> bool:
        """Whether somebody was connected who takes messages when ``receive`` found nothing."""

    def look_for_server(self) -> MaruError | None:
        """Nobody answers: see to it that there is a server, if that is this client's duty.

        Never blocks or raises; returns why the last attempt failed, if it did."""

    def close(self) -> None:
        """Let go of everything. Bounded."""


class Exchange:
    """Requests of one client over one transport: a ``ControlPlane``."""

    def __init__(
        self, transport: Transport, hello: m.OpenSession, clock: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._hello = hello
        self._clock = clock
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._closed = False
        self._last_id = 0
        self._pending: dict[int, weakref.ref[PendingReply[Any]]] = {}
        self._next_deadline = float("inf")
        # The session, and asking for it.
        self._hello_id: int | None = None
        self._hello_deadline = 0.0
        self._next_hello_at = clock()
        self._retry_s = FIRST_RETRY_S
        self._trouble: MaruError | None = None
        # What must be given back to the server.
        self._unwanted_leases: list[tuple[int, LeaseId]] = []
        self._unwanted_generations: list[Generation] = []
        self._aborting: dict[int, tuple[Generation, ...]] = {}

    # ---------------------------------------------------------------- the control plane

    def poll(self) -> None:
        """See ``ControlPlane``. Raises RuntimeError in a forked child, and nothing else."""
        self._check_process()
        if self._closed:
            return
        while (frame := self._transport.receive()) is not None:
            self._arrived(frame)
        if self._connection is not None and not self._transport.has_peer():
            self._lose_server("it hung up, or has stopped reading")
        self._attend(self._clock())

    def _attend(self, now: float) -> None:
        """Whatever is due, whether or not anything came."""
        if now >= self._next_deadline:
            self._expire(now)
        if self._connection is None or self._hello_id is not None:
            self._seek_session(now)
        if self._unwanted_leases or self._unwanted_generations:
            self._give_back_now()

    def connection(self) -> Connection | None:
        """See ``ControlPlane``."""
        return self._connection

    def submit_lookup_prefix(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> PendingReply[m.LeaseGrant]:
        """See ``ControlPlane``."""
        return self._submit(
            m.LeaseGrant, lambda s: m.LookupPrefix(s, namespace, tuple(keys)), timeout_s
        )

    def submit_lookup_each(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> PendingReply[m.LeaseGrant]:
        """Find and lease every sealed object among the keys, each on its own."""
        return self._submit(
            m.LeaseGrant, lambda s: m.LookupEach(s, namespace, tuple(keys)), timeout_s
        )

    def submit_reserve(
        self, namespace: Namespace, items: Sequence[m.ReserveItem], timeout_s: float
    ) -> PendingReply[m.Reserved]:
        """See ``ControlPlane``."""
        return self._submit(m.Reserved, lambda s: m.Reserve(s, namespace, tuple(items)), timeout_s)

    def submit_commit(
        self, items: Sequence[m.CommitItem], timeout_s: float
    ) -> PendingReply[m.Committed]:
        """See ``ControlPlane``."""
        return self._submit(m.Committed, lambda s: m.Commit(s, tuple(items)), timeout_s)

    def submit_abort(
        self, generations: Sequence[Generation], timeout_s: float
    ) -> PendingReply[m.Done]:
        """See ``ControlPlane``."""
        return self._submit(m.Done, lambda s: m.Abort(s, tuple(generations)), timeout_s)

    def submit_suspect(
        self, generations: Sequence[Generation], timeout_s: float
    ) -> PendingReply[m.Done]:
        """See ``ControlPlane``."""
        return self._submit(m.Done, lambda s: m.ReportSuspect(s, tuple(generations)), timeout_s)

    def submit_renew(self, leases: Sequence[LeaseId], timeout_s: float) -> PendingReply[m.Renewed]:
        """See ``ControlPlane``."""
        return self._submit(m.Renewed, lambda s: m.RenewLeases(s, tuple(leases)), timeout_s)

    def submit_release(self, leases: Sequence[LeaseId], timeout_s: float) -> PendingReply[m.Done]:
        """See ``ControlPlane``."""
        return self._submit(m.Done, lambda s: m.ReleaseLeases(s, tuple(leases)), timeout_s)

    def submit_delete(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> PendingReply[m.Done]:
        """Remove sealed objects that nobody leases."""
        return self._submit(m.Done, lambda s: m.Delete(s, namespace, tuple(keys)), timeout_s)

    def submit_stats(self, timeout_s: float) -> PendingReply[m.Stats]:
        """Ask how the server stands."""
        return self._submit(m.Stats, lambda _: m.GetStats(), timeout_s)

    def submit_list_objects(
        self, after: Generation, limit: int, timeout_s: float
    ) -> PendingReply[m.ObjectRows]:
        """One page of the listing; see ``ListObjects``."""
        return self._submit(m.ObjectRows, lambda _: m.ListObjects(after, limit), timeout_s)

    def close(self) -> None:
        """See ``ControlPlane``. Does nothing in a forked child: the session is its parent's."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._connection is not None:
            self._last_id += 1
            self._transport.send(self._last_id, m.CloseSession(SessionId(self._connection.session)))
        self._connection = None
        for waiting in self._drain_pending():
            waiting.fail(Unreachable("the client was closed before the reply came"))
        self._transport.close()

    # ------------------------------------------------------------------------- sending

    def _submit(
        self, kind: type, make: Callable[[SessionId], m.Request], timeout_s: float
    ) -> PendingReply[Any]:
        self._check_process()
        connection = self._connection
        if connection is None:
            return self._failed(kind, Unreachable("no server is connected"))
        self._last_id = request_id = self._last_id + 1
        try:
            sent = self._transport.send(request_id, make(SessionId(connection.session)))
        except ValueError as error:
            return self._failed(kind, RequestRefused(m.ErrorCode.BAD_REQUEST, str(error)))
        if not sent:
            self._lose_server("a request could not be sent")
            return self._failed(kind, Unreachable("the server is gone, or has stopped reading"))
        # All that need not come before the send comes after: the server is at work meanwhile.
        pending: PendingReply[Any] = PendingReply(kind, self._clock() + timeout_s, self.give_back)
        self._pending[request_id] = weakref.ref(pending)
        if pending.deadline < self._next_deadline:
            self._next_deadline = pending.deadline
        return pending

    def _failed(self, kind: type, error: ControlError) -> PendingReply[Any]:
        pending: PendingReply[Any] = PendingReply(kind, self._clock(), self.give_back)
        pending.fail(error)
        return pending

    # ----------------------------------------------------------------------- receiving

    def _arrived(self, frame: ReplyFrame) -> None:
        reply = frame.reply
        if frame.request_id == self._hello_id:
            self._hello_answered(reply)
            return
        if self._aborting and self._aborting.pop(frame.request_id, None) is not None:
            if type(reply) is not m.Done:
                log.warning("late reservations could not be given back: %s", reply)
            return
        reference = self._pending.pop(frame.request_id, None)
        pending = reference() if reference is not None else None
        if pending is None:
            self.give_back(reply)
        elif type(reply) is pending.kind:
            pending.resolve(reply)
        elif type(reply) is m.Refused:
            pending.fail(RequestRefused(reply.code, reply.message))
        else:
            pending.fail(BadFrame(f"the reply to a request was {type(reply).__name__}"))
            self.give_back(reply)
        connection = self._connection
        if connection is not None and (
            reply.epoch != connection.epoch
            or (type(reply) is m.Refused and reply.code is m.ErrorCode.UNKNOWN_SESSION)
        ):
            self._lose_session("it was restarted")

    def give_back(self, reply: object) -> None:
        """Nobody will take this reply: what it grants goes back with the next ``poll``."""
        if type(reply) is m.LeaseGrant:
            if reply.lease is not None:
                self._unwanted_leases.append((reply.epoch, reply.lease))
        elif type(reply) is m.Reserved:
            self._unwanted_generations += [
                result.extent.generation for result in reply.results if result.extent is not None
            ]

    def _give_back_now(self) -> None:
        connection = self._connection
        if connection is None:
            return
        session = SessionId(connection.session)
        # Taken out before anything else runs: a dropped reply may add to the lists at any time.
        unwanted, self._unwanted_leases = self._unwanted_leases, []
        leases = tuple(lease for epoch, lease in unwanted if epoch == connection.epoch)
        if leases:
            self._last_id += 1
            if not self._transport.send(self._last_id, m.ReleaseLeases(session, leases)):
                self._unwanted_leases += unwanted
                return
        generations, self._unwanted_generations = self._unwanted_generations, []
        if generations:
            self._last_id += 1
            if self._transport.send(self._last_id, m.Abort(session, tuple(generations))):
                self._aborting[self._last_id] = tuple(generations)
            else:
                self._unwanted_generations += generations

    def _expire(self, now: float) -> None:
        overdue = False
        next_deadline = float("inf")
        for request_id, reference in list(self._pending.items()):
            pending = reference()
            if pending is None:
                # Dropped by its owner; a late reply to an unknown id is given back all the same.
                del self._pending[request_id]
            elif pending.deadline <= now:
                del self._pending[request_id]
                pending.fail(Unreachable("no answer from the server in time"))
                overdue = True
            else:
                next_deadline = min(next_deadline, pending.deadline)
        self._next_deadline = next_deadline
        if overdue and self._hello_id is None:
            self._send_hello(now)

    def _drain_pending(self) -> list[PendingReply[Any]]:
        waiting = [pending for ref in self._pending.values() if (pending := ref()) is not None]
        self._pending.clear()
        self._next_deadline = float("inf")
        return waiting

    # --------------------------------------------------------------------- the session

    def _seek_session(self, now: float) -> None:
        if self._hello_id is not None:
            if now < self._hello_deadline:
                return
            self._hello_id = None
            self._lose_server("it does not answer")
            self._back_off(now)
        if self._connection is None and now >= self._next_hello_at:
            self._send_hello(now)

    def _send_hello(self, now: float) -> None:
        self._last_id += 1
        if self._transport.send(self._last_id, self._hello):
            self._hello_id = self._last_id
            self._hello_deadline = now + HELLO_TIMEOUT_S
        else:
            self._lose_server("nobody is connected")
            self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._next_hello_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        self._trouble = self._transport.look_for_server()

    def _hello_answered(self, reply: m.Reply) -> None:
        asked_as = self._hello_id
        self._hello_id = None
        if type(reply) is not m.SessionOpened:
            if isinstance(reply, m.Refused):
                self._trouble = RequestRefused(reply.code, reply.message)
            self._lose_session(f"it refused the session: {reply}")
            self._next_hello_at = self._clock() + REFUSED_RETRY_S
            return
        self._trouble = None
        self._retry_s = FIRST_RETRY_S
        before = self._connection
        self._connection = Connection(
            session=reply.session,
            epoch=reply.epoch,
            lease_term_s=reply.lease_term_s,
            pool=reply.pool,
            lock_path=self._hello.lock_path,
        )
        if before != self._connection:
            log.info("session %#x at epoch %d of %s", reply.session, reply.epoch, reply.pool.path)
        # Messages keep their order, so what was asked before this and is not answered by now
        # went down with the server that it was sent to.
        assert asked_as is not None
        for request_id in [known for known in self._pending if known < asked_as]:
            pending = self._pending.pop(request_id)()
            if pending is not None:
                pending.fail(Unreachable("the server was restarted before it answered"))
        for request_id in [known for known in self._aborting if known < asked_as]:
            self._unwanted_generations += self._aborting.pop(request_id)

    def _lose_server(self, why: str) -> None:
        """Nobody is there: what is under way will not be answered, or too late to be of use."""
        self._lose_session(why)
        self._hello_id = None
        for waiting in self._drain_pending():
            waiting.fail(Unreachable(f"the server was lost before it answered: {why}"))

    def _lose_session(self, why: str) -> None:
        if self._connection is not None:
            log.warning("the Maru server is lost (%s); until one answers, all is a miss", why)
            self._connection = None
            self._retry_s = FIRST_RETRY_S
            self._next_hello_at = self._clock()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this client belongs to process {self._pid} and was forked into {os.getpid()}; "
                "connect anew in the child"
            )
