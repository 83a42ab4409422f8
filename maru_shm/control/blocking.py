"""The synchronous face of an exchange: every call is a submit and a wait with a deadline.

For programs and threads that have nothing else to do meanwhile; an engine uses the submits. A call
costs little more than the round trip: it waits in the socket itself, and takes in one reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from maru_shm.control import messages as m
from maru_shm.control.errors import RequestRefused, ServerStartFailed, Unreachable
from maru_shm.control.exchange import Exchange
from maru_shm.control.pending import PendingReply
from maru_shm.control.plane import Connection
from maru_shm.types import Generation, Key, LeaseId, Namespace

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class BlockingExchange(Exchange):
    """An ``Exchange`` that can also wait. No call waits without a deadline."""

    def wait_connected(self, timeout_s: float) -> Connection:
        """Wait until a session stands.

        Raises Unreachable after ``timeout_s``, RequestRefused if the server refused the session,
        ServerStartFailed if it could not be started.
        """
        deadline = self._clock() + timeout_s
        self.poll()
        while (connection := self._connection) is None:
            if self._trouble is not None:
                raise self._trouble
            if self._clock() >= deadline:
                raise Unreachable("no server answered in time")
            self._wait(deadline)
        return connection

    def lookup_prefix(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> m.LeaseGrant:
        """Like ``submit_lookup_prefix``, and wait. As all calls of this face, it raises
        Unreachable after ``timeout_s`` and RequestRefused if the server says no."""
        return self._call(self.submit_lookup_prefix, timeout_s, namespace, keys)

    def lookup_each(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> m.LeaseGrant:
        """Find and lease every sealed object among the keys, each on its own."""
        return self._call(self.submit_lookup_each, timeout_s, namespace, keys)

    def reserve(
        self, namespace: Namespace, items: Sequence[m.ReserveItem], timeout_s: float
    ) -> m.Reserved:
        """Ask for space for the items, in order; each gets its own answer."""
        return self._call(self.submit_reserve, timeout_s, namespace, items)

    def commit(self, items: Sequence[m.CommitItem], timeout_s: float) -> m.Committed:
        """Make written objects visible."""
        return self._call(self.submit_commit, timeout_s, items)

    def abort(self, generations: Sequence[Generation], timeout_s: float) -> m.Done:
        """Give reservations back that nobody writes to any more."""
        return self._call(self.submit_abort, timeout_s, generations)

    def suspect(self, generations: Sequence[Generation], timeout_s: float) -> m.Done:
        """Report objects that failed a check; they are never served again."""
        return self._call(self.submit_suspect, timeout_s, generations)

    def renew(self, leases: Sequence[LeaseId], timeout_s: float) -> m.Renewed:
        """Begin the term of leases anew."""
        return self._call(self.submit_renew, timeout_s, leases)

    def release(self, leases: Sequence[LeaseId], timeout_s: float) -> m.Done:
        """Give leases back whose objects nobody reads any more."""
        return self._call(self.submit_release, timeout_s, leases)

    def delete(self, namespace: Namespace, keys: Sequence[Key], timeout_s: float) -> m.Done:
        """Remove sealed objects that nobody leases."""
        return self._call(self.submit_delete, timeout_s, namespace, keys)

    def stats(self, timeout_s: float) -> m.Stats:
        """How the server stands."""
        return self._call(self.submit_stats, timeout_s)

    def list_objects(self, after: Generation, limit: int, timeout_s: float) -> m.ObjectRows:
        """One page of the listing; see ``ListObjects``."""
        return self._call(self.submit_list_objects, timeout_s, after, limit)

    def _call(
        self, submit: Callable[[*Ts, float], PendingReply[T]], timeout_s: float, *about: *Ts
    ) -> T:
        """Submit and wait; once more if the server did not know the session (it did nothing)."""
        deadline = self._clock() + timeout_s
        may_retry = True
        while True:
            if self._connection is None:
                try:
                    self.wait_connected(deadline - self._clock())
                except ServerStartFailed as failed:
                    raise Unreachable(str(failed)) from None
            pending = submit(*about, deadline - self._clock())
            while not pending.done():
                self._wait(deadline)
            try:
                return pending.take()
            except RequestRefused as refused:
                if refused.code is not m.ErrorCode.UNKNOWN_SESSION or not may_retry:
                    raise
                may_retry = False

    def _wait(self, deadline: float) -> None:
        """Until something came, or something is due; ``deadline`` is the latest."""
        now = self._clock()
        until = deadline if self._connection is not None else min(deadline, self._next_hello_at)
        if self._hello_id is not None:
            until = min(until, self._hello_deadline)
        frame = self._transport.receive_within(max(until - now, 0.0005)) if now < deadline else None
        if frame is None:
            self.poll()
        else:
            # The usual end of a call: whatever else has come can wait for the next poll.
            self._arrived(frame)
            self._attend(now)
