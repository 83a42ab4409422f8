"""Who is connected, and who has died.

An *owner* is one client process's life; a *session* is that life at one server incarnation. An
owner that opens again at the same incarnation (it was cut off, or its answer got lost) gets the
session that it has, with all leases and reservations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, unique
from pathlib import Path
from typing import Protocol

from maru_shm.control.session_lock import SessionWatch, session_lock_path
from maru_shm.types import OwnerToken, SessionId

SESSION_COUNTER_BITS = 32
"""A session id is ``epoch << 32 | counter``: no session of an older incarnation can be taken for
one of this incarnation."""


class Owners(Protocol):
    """Knows which owners live. ``LockFiles`` asks the kernel; a simulation decides itself."""

    def lock_path(self, owner: OwnerToken) -> str:
        """Where that owner's proof of life must be."""

    def watch(self, owner: OwnerToken) -> bool:
        """Begin to watch an owner that opens a session; false if it gives no proof of life."""

    def reap(self, owner: OwnerToken) -> bool:
        """Whether the owner and all its workers are dead. Once true it stays true."""


class LockFiles:
    """Owners proven alive by lock files (``session_lock``)."""

    def __init__(self, sessions_dir: Path, earlier_dirs: Iterable[Path] = ()) -> None:
        """``earlier_dirs``: where the pool's earlier server kept them, if elsewhere."""
        self._dir = sessions_dir
        self._earlier = tuple(earlier_dirs)
        self._watches: dict[OwnerToken, SessionWatch] = {}

    def lock_path(self, owner: OwnerToken) -> str:
        """See ``Owners``."""
        return str(session_lock_path(self._dir, owner))

    def watch(self, owner: OwnerToken) -> bool:
        """See ``Owners``."""
        return not self.reap(owner)

    def reap(self, owner: OwnerToken) -> bool:
        """See ``Owners``."""
        watch = self._watches.pop(owner, None) or self._find(owner)
        if watch is None or watch.reap():
            return True
        self._watches[owner] = watch
        return False

    def sweep(self) -> None:
        """Remove the files that dead clients of earlier servers left."""
        for path in self._dir.glob("*.lock"):
            with suppress(FileNotFoundError):
                watch = SessionWatch(path)
                if not watch.reap():
                    watch.close()

    def _find(self, owner: OwnerToken) -> SessionWatch | None:
        for directory in (self._dir, *self._earlier):
            with suppress(FileNotFoundError):
                return SessionWatch(session_lock_path(directory, owner))
        return None


@unique
class SessionPhase(Enum):
    """How far a session's life has come."""

    OPEN = 1
    LEAVING = 2
    """The client said goodbye, but a worker of it may still write."""


@dataclass(slots=True)
class Session:
    """One client as the server knows it."""

    id: SessionId
    owner: OwnerToken
    client: str
    phase: SessionPhase


class Sessions:
    """All sessions of one server incarnation, and the owners it must still watch."""

    def __init__(self, epoch: int, owners: Owners, absent: Iterable[OwnerToken] = ()) -> None:
        """``absent``: living owners that have reservations from before this incarnation."""
        self._first = epoch << SESSION_COUNTER_BITS
        self._owners = owners
        self._by_owner: dict[OwnerToken, Session] = {}
        self._open: dict[SessionId, Session] = {}
        self._absent = set(absent)
        self._opened = 0

    def find(self, owner: OwnerToken) -> Session | None:
        """The session of ``owner``, open or leaving."""
        return self._by_owner.get(owner)

    def open(self, owner: OwnerToken, client: str) -> Session:
        """A session for ``owner``: the one it has, or a new one."""
        session = self._by_owner.get(owner)
        if session is None:
            self._opened += 1
            session = Session(
                SessionId(self._first | self._opened), owner, client, SessionPhase.OPEN
            )
            self._by_owner[owner] = session
        session.phase = SessionPhase.OPEN
        session.client = client
        self._open[session.id] = session
        return session

    def is_open(self, session: SessionId) -> bool:
        """Whether requests of this session are answered."""
        return session in self._open

    def leave(self, session: SessionId) -> Session:
        """The client said goodbye. KeyError if the session is not open."""
        leaving = self._open.pop(session)
        leaving.phase = SessionPhase.LEAVING
        return leaving

    def reap(self) -> list[OwnerToken]:
        """Owners that have died since the last call; they are forgotten here."""
        dead = [
            owner
            for owner in (*self._by_owner, *(self._absent - self._by_owner.keys()))
            if self._owners.reap(owner)
        ]
        for owner in dead:
            self.forget(owner)
        return dead

    def forget(self, owner: OwnerToken) -> None:
        """Drop all that is known of ``owner``."""
        self._absent.discard(owner)
        session = self._by_owner.pop(owner, None)
        if session is not None:
            self._open.pop(session.id, None)

    def __len__(self) -> int:
        """How many sessions stand, those on their way out included."""
        return len(self._by_owner)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_owner.values())
