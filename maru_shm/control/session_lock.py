"""Proof of life: a lock file that a client and its workers hold for as long as they live.

Each client makes ``<sessions>/<owner token>.lock`` and holds a shared ``flock`` on it; every worker
that may write to the pool for that client joins with a shared lock of its own. The kernel drops a
lock when its last holder dies, however it dies, so the server knows "dead" from "slow" for certain
and at once: the owner is dead exactly when the server gets the exclusive lock.

Rules that the three roles keep:

- A lock on a file that has another inode than the path now (or none) proves nothing: whoever
  gets a lock looks again. So nobody can join an owner that was declared dead.
- Nobody unlocks explicitly; closing the descriptor does. A forked child shares the open file, and
  an explicit unlock would take its parent's proof away.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from maru_shm.control.file_lock import still_names
from maru_shm.errors import MaruError
from maru_shm.types import OwnerToken


class SessionLockLost(MaruError):
    """The session that this lock file stood for is over; writes for it must not begin."""


def session_lock_path(sessions_dir: Path, owner: OwnerToken) -> Path:
    """Where the lock file of ``owner`` lies."""
    return sessions_dir / f"{owner:016x}.lock"


class SessionLock:
    """One process's hold on a session's lock file. Close it when the last write is done."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Give the hold up. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def create_session_lock(sessions_dir: Path, owner: OwnerToken) -> SessionLock:
    """Make the lock file of a new owner and hold it. For the client.

    Raises OSError if the directory is missing or not writable.
    """
    path = session_lock_path(sessions_dir, owner)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _hold(path, descriptor):
            return SessionLock(path, descriptor)


def join_session_lock(path: str | Path) -> SessionLock:
    """Hold the lock file of a session that exists. For workers, before their first write.

    Raises SessionLockLost if that session is over.
    """
    path = Path(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SessionLockLost(f"{path}: gone; the session it stood for is over") from None
    if not _hold(path, descriptor):
        raise SessionLockLost(f"{path}: replaced; the session it stood for is over")
    return SessionLock(path, descriptor)


class SessionWatch:
    """The server's eye on one lock file.

    It keeps the file open: should something (a cleaner of temporary files) unlink it, the holders'
    locks still count.
    """

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError if there is no such file: then nobody lives."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def reap(self) -> bool:
        """Whether nobody holds the file any more; if so it is removed, and this watch is over."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Looks used to whoever cleans temporary files by age.
            os.utime(self._descriptor)
            return False
        # Removed while the exclusive lock is held: whoever waits for the lock sees it gone.
        if still_names(self._path, self._descriptor):
            self._path.unlink(missing_ok=True)
        self.close()
        return True

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)


def _hold(path: Path, descriptor: int) -> bool:
    """Take a shared lock; false (and closed) if the path no longer names this file."""
    # Waits only for a server's probe, which holds its lock for microseconds.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if still_names(path, descriptor):
        return True
    os.close(descriptor)
    return False
