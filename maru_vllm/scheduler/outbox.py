"""What the half tells the server without waiting for the answer.

Releases, commits, aborts and suspects gather during a step and leave in one request per kind.
Which session an entry stems from decides what becomes of it when the server was restarted
meanwhile:

| entry | same session | another session, same pool | another pool |
| --- | --- | --- | --- |
| release | sent | dropped: the lease is gone | dropped |
| commit | sent | turned into an abort: the space may be quarantined for us | dropped |
| abort | sent | sent: takes the space out of quarantine | dropped |
| suspect | sent | sent | dropped |

Aborts and suspects are kept until a server took them; a commit whose answer never came becomes an
abort, because a reservation that nobody settles stays for as long as this process lives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from maru_shm.control.errors import ControlError
from maru_shm.control.messages import CommitItem, Committed, Done
from maru_shm.control.plane import Connection, ControlPlane, Pending
from maru_shm.types import Generation, LeaseId
from maru_vllm.stats import Counter, MaruStats

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 1.0
"""For requests that nobody waits for; long enough that a busy server is not mistaken for a dead
one, short enough that a lost commit becomes an abort soon."""


def same_session(one: Connection | None, other: Connection | None) -> bool:
    """Whether leases and reservations taken on ``one`` stand on ``other``."""
    return (
        one is not None
        and other is not None
        and (one.session, one.epoch) == (other.session, other.epoch)
    )


def same_pool(one: Connection, other: Connection) -> bool:
    """Whether extents granted on ``one`` name the same bytes on ``other``."""
    return one.pool.uuid == other.pool.uuid


@dataclass(frozen=True, slots=True)
class _Sent:
    """Aborts or suspects under way."""

    generations: tuple[Generation, ...]
    origin: Connection
    pending: Pending[Done]


@dataclass(slots=True)
class _Undelivered:
    """Generations that a server has still to be told about, with where they stem from."""

    waiting: list[tuple[Generation, Connection]] = field(default_factory=list)
    sent: list[_Sent] = field(default_factory=list)

    def take_sendable(self, connection: Connection) -> tuple[Generation, ...]:
        """All that concern the pool that stands now; the others are forgotten."""
        ready = tuple(g for g, origin in self.waiting if same_pool(origin, connection))
        self.waiting.clear()
        return ready

    def collect(self) -> None:
        """Put back what did not arrive."""
        still: list[_Sent] = []
        for sent in self.sent:
            if not sent.pending.done():
                still.append(sent)
                continue
            try:
                sent.pending.take()
            except ControlError:
                self.waiting.extend((g, sent.origin) for g in sent.generations)
        self.sent = still


@dataclass(frozen=True, slots=True)
class _Commit:
    items: tuple[CommitItem, ...]
    origin: Connection
    pending: Pending[Committed]


class Outbox:
    """Owned by the scheduler's thread; nothing here waits or raises for a dead server."""

    def __init__(self, plane: ControlPlane, stats: MaruStats) -> None:
        self._plane = plane
        self._stats = stats
        self._releases: list[tuple[LeaseId, Connection]] = []
        self._released: list[Pending[Done]] = []
        self._commits: list[tuple[CommitItem, Connection]] = []
        self._committing: list[_Commit] = []
        self._aborts = _Undelivered()
        self._suspects = _Undelivered()

    def release(self, lease: LeaseId, origin: Connection) -> None:
        """Give a lease back."""
        self._releases.append((lease, origin))

    def commit(self, item: CommitItem, origin: Connection) -> None:
        """Make an object visible that all ranks have written."""
        self._commits.append((item, origin))

    def abort(self, generation: Generation, origin: Connection) -> None:
        """Give a reservation back that no rank writes to any more."""
        self._aborts.waiting.append((generation, origin))

    def suspect(self, generations: Sequence[Generation], origin: Connection) -> None:
        """Tell the server that these objects failed a check."""
        self._suspects.waiting.extend((g, origin) for g in generations)

    def collect(self) -> None:
        """Take in answers."""
        self._aborts.collect()
        self._suspects.collect()
        self._released = [pending for pending in self._released if not pending.done()]
        committing: list[_Commit] = []
        for commit in self._committing:
            if not commit.pending.done():
                committing.append(commit)
                continue
            try:
                lost = commit.pending.take().lost
            except ControlError as error:
                logger.debug("commit of %d objects unanswered: %s", len(commit.items), error)
                for item in commit.items:
                    self.abort(item.generation, commit.origin)
                self._stats.count(Counter.STORES_LOST, len(commit.items))
            else:
                self._stats.count(Counter.STORES_LOST, len(lost))
                self._stats.count(Counter.STORED_CHUNKS, len(commit.items) - len(lost))
        self._committing = committing

    def flush(self, connection: Connection | None) -> None:
        """Send what has gathered. Suspects go first: a later reserve of the same key in this step
        must find the bad object gone."""
        if connection is None:
            return
        if generations := self._suspects.take_sendable(connection):
            self._suspects.sent.append(
                _Sent(
                    generations,
                    connection,
                    self._plane.submit_suspect(generations, REPLY_TIMEOUT_S),
                )
            )
        self._flush_commits(connection)
        if generations := self._aborts.take_sendable(connection):
            self._aborts.sent.append(
                _Sent(
                    generations, connection, self._plane.submit_abort(generations, REPLY_TIMEOUT_S)
                )
            )
        leases = tuple(
            lease for lease, origin in self._releases if same_session(origin, connection)
        )
        self._releases.clear()
        if leases:
            self._released.append(self._plane.submit_release(leases, REPLY_TIMEOUT_S))

    def _flush_commits(self, connection: Connection) -> None:
        items: list[CommitItem] = []
        for item, origin in self._commits:
            if same_session(origin, connection):
                items.append(item)
            else:
                self._stats.count(Counter.STORES_LOST)
                self.abort(item.generation, origin)
        self._commits.clear()
        if items:
            pending = self._plane.submit_commit(items, REPLY_TIMEOUT_S)
            self._committing.append(_Commit(tuple(items), connection, pending))

    @property
    def awaits_answer(self) -> bool:
        """Whether a request is under way whose loss would have to be made good. Bounded: every
        request ends by its timeout, and what waits for a server to come back does not count."""
        return bool(self._committing or self._aborts.sent or self._suspects.sent)
