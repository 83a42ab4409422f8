"""Exclusive locks on files, for "only one of us": starters, servers of a pool, servers of a socket.

The kernel drops the lock with its last holder. A lock on a file that its path no longer names
proves nothing, so whoever gets one looks again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def still_names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` names the very file that ``descriptor`` is open on."""
    mine = os.fstat(descriptor)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


class FileLock:
    """An exclusive lock that this process holds. Made by ``try_lock``."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def read(self) -> bytes:
        """What the file says: a note by an earlier holder."""
        assert self._descriptor is not None
        return os.pread(self._descriptor, 1 << 16, 0)

    def write(self, note: bytes) -> None:
        """Replace what the file says."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, note, 0)

    def remove(self) -> None:
        """Unlink the file and give the lock up."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Give the lock up. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def try_lock(path: Path) -> FileLock | None:
    """Make the file if need be and lock it; None if another process holds it.

    Raises OSError if the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if still_names(path, descriptor):
            return FileLock(path, descriptor)
        os.close(descriptor)
