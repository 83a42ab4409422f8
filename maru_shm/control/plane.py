"""What the engine's scheduler needs of the store, whoever provides it.

``Client`` (sockets) and the simulation's in-process plane both satisfy ``ControlPlane``. Every
call returns at once; nothing here waits. The caller drives progress by calling ``poll``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from maru_shm.control.messages import (
    CommitItem,
    Committed,
    Done,
    LeaseGrant,
    PoolInfo,
    Renewed,
    Reserved,
    ReserveItem,
)
from maru_shm.types import Generation, Key, LeaseId, Namespace

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A request under way. Owned by the thread that submitted it."""

    def done(self) -> bool:
        """Whether ``take`` would return or raise now. Never blocks, never raises."""

    def take(self) -> T_co:
        """The reply. Raises ControlError if it failed, RuntimeError if it is not done."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The session that stands now. Another ``epoch`` or ``session`` means: leases and
    reservations taken before are gone (leases may still read: generations protect them)."""

    session: int
    epoch: int
    lease_term_s: float
    pool: PoolInfo
    lock_path: str


class ControlPlane(Protocol):
    """Requests of one engine. Single-threaded: only the scheduler's thread calls these.

    A submit while no session stands returns a Pending that is done and raises Unreachable.
    Every Pending is done at the latest ``timeout_s`` after its submit (as seen by ``poll``).
    """

    def poll(self) -> None:
        """Take in what has arrived, expire what is overdue, go on with (re)connecting.
        Never blocks, never raises."""

    def connection(self) -> Connection | None:
        """None while there is no server."""

    def submit_lookup_prefix(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> Pending[LeaseGrant]:
        """Find and lease the longest run of sealed objects from the first key on."""
        ...

    def submit_reserve(
        self, namespace: Namespace, items: Sequence[ReserveItem], timeout_s: float
    ) -> Pending[Reserved]:
        """Ask for space for the items, in order; each gets its own answer."""
        ...

    def submit_commit(self, items: Sequence[CommitItem], timeout_s: float) -> Pending[Committed]:
        """Make written objects visible."""
        ...

    def submit_abort(self, generations: Sequence[Generation], timeout_s: float) -> Pending[Done]:
        """Give reservations back that nobody writes to any more."""
        ...

    def submit_suspect(self, generations: Sequence[Generation], timeout_s: float) -> Pending[Done]:
        """Report objects that failed a check; they are never served again."""
        ...

    def submit_renew(self, leases: Sequence[LeaseId], timeout_s: float) -> Pending[Renewed]:
        """Begin the term of leases anew."""
        ...

    def submit_release(self, leases: Sequence[LeaseId], timeout_s: float) -> Pending[Done]:
        """Give leases back whose objects nobody reads any more."""
        ...

    def close(self) -> None:
        """Close the session (leases and reservations go) and the socket. Idempotent; bounded."""
